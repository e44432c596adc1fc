#include "tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <unordered_set>

#include "base/error.h"
#include "tokenizer/long_word.h"
#include "tokenizer/save_tokenizer_json.h"
#include "tokenizer/unicode.h"
#include "tokenizer/word_cache.h"

namespace sps {

static_assert(std::endian::native == std::endian::little,
              "the masks of WordCache take the first byte for the lowest");

namespace {

constexpr size_t kMaxAddedText = 4096;
constexpr int64_t kMaxIds = int64_t{1} << 24;

void check_merges(const BpeModel& model) {
  const auto token = [&](size_t merge, const char* side, int32_t id) -> const std::string& {
    if (id < 0 || size_t(id) >= model.tokens.size() || model.tokens[size_t(id)].empty())
      fail("merge {} has id {} on its {}, which is no token", merge, id, side);
    return model.tokens[size_t(id)];
  };
  for (size_t i = 0; i < model.merges.size(); ++i) {
    const auto& [left, right, result] = model.merges[i];
    const std::string &a = token(i, "left", left), &b = token(i, "right", right),
                      &ab = token(i, "result", result);
    if (ab.size() != a.size() + b.size() || !ab.starts_with(a) || !ab.ends_with(b))
      fail("merge {} joins ids {} and {} to id {}, which has other bytes than both together", i, left, right,
           result);
  }
}

void check_added(const BpeModel& model) {
  std::unordered_set<std::string_view> texts;
  int64_t before = -1;
  bool eot_is_special = false;
  for (const AddedToken& token : model.added) {
    if (token.id <= before)
      fail("the added token '{}' has id {}, but one before it has {}", token.text, token.id, before);
    before = token.id;
    if (token.id >= kMaxIds)
      fail("the added token '{}' has id {}; ids end at {}", token.text, token.id, kMaxIds - 1);
    if (token.text.empty()) fail("the added token with id {} has no text", token.id);
    if (token.text.size() > kMaxAddedText)
      fail("the added token with id {} has {} bytes; at most {} are possible", token.id, token.text.size(),
           kMaxAddedText);
    if (!texts.insert(token.text).second) fail("the added token '{}' is there twice", token.text);
    if (size_t(token.id) < model.tokens.size() && !model.tokens[size_t(token.id)].empty())
      fail("id {} is a token and the added token '{}' too", token.id, token.text);
    if (token.id == model.eot) eot_is_special = token.special;
  }
  if (!eot_is_special) fail("the end of text, id {}, is no special added token", model.eot);
}

const BpeModel& checked(const BpeModel& model) {
  if (int64_t(model.tokens.size()) > kMaxIds)
    fail("a vocabulary of {} tokens is too large; at most {} are possible", model.tokens.size(), kMaxIds);
  check_merges(model);
  check_added(model);
  return model;
}

}  // namespace

BpeTokenizer::BpeTokenizer(BpeModel model)
    : model_(std::move(model)),
      index_(checked(model_).tokens),
      merges_(model_.merges),
      splitter_(model_.splits),
      added_(model_.added) {
  if (const int32_t id = index_.repeated(); id != TokenIndex::kNone)
    fail("ids {} and {} are the same token", index_.find(model_.tokens[size_t(id)]), id);
  if (const int64_t i = merges_.repeated(); i >= 0)
    fail("merge {} joins ids {} and {}, which an earlier one does too", i, model_.merges[size_t(i)].left,
         model_.merges[size_t(i)].right);
  for (int byte = 0; byte < 256; ++byte) {
    byte_ids_[size_t(byte)] = index_.find(std::string(1, char(byte)));
    if (byte_ids_[size_t(byte)] == TokenIndex::kNone) fail("byte {} has no token of its own", byte);
  }
  const size_t added_end = model_.added.empty() ? 0 : size_t(model_.added.back().id) + 1;
  bytes_.resize(std::max(model_.tokens.size(), added_end));
  for (size_t id = 0; id < model_.tokens.size(); ++id) bytes_[id] = model_.tokens[id];
  for (const AddedToken& token : model_.added)
    if (!token.special) bytes_[size_t(token.id)] = token.text;
  drop_dead_merges();
  fingerprint_ = make_fingerprint();
  static std::atomic<uint32_t> numbers{0};
  number_ = ++numbers;
}

// Where a merge makes a token, the token's bytes were merged in the order in which they are merged when they
// are alone: nothing crossed their border, and inside it the earliest pair is the same. So a token has one
// merge that can ever make it, the last one when its bytes stand alone, or none. Others, which rank files and
// some tokenizer.json have many of, are left out.
void BpeTokenizer::drop_dead_merges() {
  std::vector<uint8_t> live(model_.merges.size(), 0);
  merges_up_.assign(model_.tokens.size(), 0);
  std::vector<int32_t> ids;
  for (size_t id = 0; id < model_.tokens.size(); ++id) {
    const std::string& token = model_.tokens[id];
    if (token.empty()) continue;
    longest_token_ = std::max(longest_token_, token.size());
    ids.clear();
    const auto applied = merge_bytes(token, ids);
    merges_up_[id] = applied.count == 1;
    if (applied.count == 1 && applied.last_merge != MergeTable::kNoMerge) live[applied.last_merge] = 1;
  }
  for (size_t i = 0; i < live.size(); ++i)
    if (live[i] != 0) live_merges_.push_back(model_.merges[i]);
  merges_ = MergeTable(live_merges_);
}

// Of everything that decides the ids, with lengths, so that no two models give the same bytes. What makes no
// difference to ids makes none here, so that the files of one tokenizer in several formats agree.
std::string BpeTokenizer::make_fingerprint() const {
  Hasher hasher;
  const auto number = [&](int64_t n) { hasher.update(&n, sizeof n); };
  const auto text = [&](std::string_view t) {
    number(int64_t(t.size()));
    hasher.update(t.data(), t.size());
  };
  text("byte-level BPE 1");
  size_t used = model_.tokens.size();
  while (used > 0 && model_.tokens[used - 1].empty()) --used;
  number(int64_t(used));
  bool all_merge_up = true;
  for (size_t i = 0; i < used; ++i) {
    text(model_.tokens[i]);
    if (!model_.tokens[i].empty() && merges_up_[i] == 0) all_merge_up = false;
  }
  number(int64_t(live_merges_.size()));
  for (const Merge& merge : live_merges_) number(int64_t(merge.left) << 32 | merge.right);
  number(int64_t(model_.splits.size()));
  for (const SplitStep& step : model_.splits) {
    number(int64_t(step.kind));
    // Two spellings of one pattern.
    const bool gpt2 = step.kind == SplitStep::Kind::pattern && step.pattern == patterns::gpt2_tiktoken;
    text(gpt2 ? patterns::gpt2 : std::string_view(step.pattern));
  }
  number((model_.whole_words && !all_merge_up) | model_.prefix_space << 1 | model_.nfc << 2);
  number(int64_t(model_.added.size()));
  for (const AddedToken& token : model_.added) {
    number(token.id);
    number(token.special);
    text(token.text);
  }
  number(model_.eot);
  return hex(hasher.digest());
}

std::string BpeTokenizer::name() const {
  return fmt::format("bpe-{}", vocab_size());
}

std::string BpeTokenizer::to_json() const {
  return to_tokenizer_json(model_);
}

void BpeTokenizer::encode(std::string_view text, std::vector<int32_t>& ids, SpecialText special) const {
  Output out{ids};
  encode(text, out, special);
}

void BpeTokenizer::encode_in_parts(std::string_view text,
                                   const std::function<void(std::span<const int32_t>)>& take) const {
  constexpr size_t kPart = size_t{1} << 16;
  std::vector<int32_t> ids;
  Output out{ids, &take, kPart};
  encode(text, out, SpecialText::plain);
  if (!ids.empty()) take(ids);
}

void BpeTokenizer::encode(std::string_view text, Output& out, SpecialText special) const {
  if (!added_.any(special)) return encode_between(text, out);
  for (size_t begin = 0; begin < text.size();) {
    const auto found = added_.find(text, begin, special);
    encode_between(text.substr(begin, found.begin - begin), out);
    if (found.id >= 0) out.ids.push_back(found.id);
    begin = found.end;
  }
}

void BpeTokenizer::encode_between(std::string_view text, Output& out) const {
  if (text.empty()) return;
  std::string normal, spaced;
  if (model_.nfc) text = to_nfc(text, normal);
  if (model_.prefix_space && !text.starts_with(' ')) {
    spaced.reserve(text.size() + 1);
    text = (spaced += ' ').append(text);
    std::string().swap(normal);
  }
  encode_words(text, out);
}

// Words go through a short queue, so that the memory of the cache is on its way by the time it is looked at.
void BpeTokenizer::encode_words(std::string_view text, Output& out) const {
  constexpr size_t kQueue = 8;
  struct Waiting {
    std::string_view word;
    WordCache::Key key;
  } queue[kQueue];
  WordCache& cache = WordCache::of_this_thread();
  std::vector<int32_t>& ids = out.ids;
  const char* const end = text.data() + text.size();
  const auto is_cached = [](std::string_view word) {
    return word.size() > 1 && word.size() <= WordCache::kMaxWord;
  };
  const auto emit = [&](const Waiting& waiting) {
    const std::string_view word = waiting.word;
    if (word.size() == 1) return ids.push_back(byte_ids_[static_cast<unsigned char>(word[0])]);
    if (!is_cached(word)) return encode_word(word, out);
    if (const auto* slot = cache.find(waiting.key, number_)) {
      if (slot->count == 1) return ids.push_back(slot->ids[0]);
      ids.insert(ids.end(), slot->ids, slot->ids + slot->count);
      return;
    }
    const size_t before = ids.size();
    encode_word(word, out);
    const auto its = std::span<const int32_t>(ids).subspan(before);
    if (its.size() <= WordCache::kMaxIds) cache.put(waiting.key, number_, its);
  };
  size_t words = 0;
  splitter_.for_each(text, [&](std::string_view word) {
    Waiting& place = queue[words % kQueue];
    if (words++ >= kQueue) {
      emit(place);
      out.hand_on();
    }
    place.word = word;
    if (!is_cached(word)) return;
    place.key = WordCache::key(word, size_t(end - word.data()));
    cache.prefetch(place.key);
  });
  for (size_t i = words < kQueue ? 0 : words - kQueue; i < words; ++i) emit(queue[i % kQueue]);
  out.hand_on();
}

void BpeTokenizer::encode_word(std::string_view word, Output& out) const {
  if (word.size() <= longest_token_) {
    const int32_t id = index_.find(word);
    if (id != TokenIndex::kNone && (model_.whole_words || merges_up_[size_t(id)] != 0))
      return out.ids.push_back(id);
  }
  if (word.size() <= LongWordMerger::kWindow) {
    merge_bytes(word, out.ids);
    return;
  }
  LongWordMerger(merges_, index_, byte_ids_).merge(word, [&](std::span<const int32_t> some) {
    out.ids.insert(out.ids.end(), some.begin(), some.end());
    out.hand_on();
  });
}

MergeTable::Applied BpeTokenizer::merge_bytes(std::string_view word, std::vector<int32_t>& ids) const {
  const size_t before = ids.size();
  ids.resize(before + word.size());
  for (size_t i = 0; i < word.size(); ++i) ids[before + i] = byte_ids_[static_cast<unsigned char>(word[i])];
  const auto applied = merges_.apply(std::span(ids).subspan(before));
  ids.resize(before + applied.count);
  return applied;
}

}  // namespace sps
