#include "tokenizer/bpe_trainer.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <exception>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/threads.h"
#include "tokenizer/bpe_merger.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/splitter.h"
#include "tokenizer/word_table.h"

namespace sps {

namespace {

constexpr size_t kShards = 32;  // of the table, by hash: each is filled by one thread at a time
using Shards = std::array<WordTable, kShards>;

void add_word(Shards& shards, std::string_view word) {
  const uint64_t hash = hash64(word);
  shards[hash >> 59].add(word, hash, 1);
}
static_assert(kShards == 1 << 5);

// The id of each byte: its place among the 256 characters of the printable alphabet.
std::array<int32_t, 256> alphabet_ids() {
  std::array<int, 256> bytes{};
  for (int b = 0; b < 256; ++b) bytes[size_t(b)] = b;
  const auto written = [](int b) { return to_alphabet(std::string(1, char(b))); };
  // UTF-8 of two bytes sorts like its code points and after that of one.
  std::sort(bytes.begin(), bytes.end(), [&](int a, int b) { return written(a) < written(b); });
  std::array<int32_t, 256> ids{};
  for (int id = 0; id < 256; ++id) ids[size_t(bytes[size_t(id)])] = id;
  return ids;
}

// The special tokens in the order of their ids, checked.
std::vector<std::string> special_tokens(const BpeTrainerOptions& options) {
  std::vector<std::string> tokens{options.eot};
  tokens.insert(tokens.end(), options.special.begin(), options.special.end());
  std::unordered_set<std::string> seen;
  for (const std::string& token : tokens) {
    if (token.empty()) usage_error("a special token is empty, but at least one character is expected");
    if (!is_utf8(token)) usage_error("the special token '{}' is not UTF-8", token);
    if (!seen.insert(token).second) usage_error("the special token '{}' is given twice", token);
    if (const auto bytes = from_alphabet(token); bytes && bytes->size() == 1)
      usage_error(
          "the special token '{}' is how a single byte is written in a vocabulary; expected a longer one",
          token);
  }
  return tokens;
}

void check_at_least(std::string_view name, int64_t value, int64_t least) {
  if (value < least) usage_error("{} is {}, but at least {} is expected", name, value, least);
}

}  // namespace

struct BpeTrainer::Impl {
  explicit Impl(BpeTrainerOptions given)
      : options(std::move(given)),
        special(special_tokens(options)),
        splits(named_pattern(options.pattern)),
        splitter(splits) {
    check_at_least("vocab_size", options.vocab_size, 256 + int64_t(special.size()));
    check_at_least("min_frequency", options.min_frequency, 1);
    check_at_least("max_token_bytes", options.max_token_bytes, 1);
    check_at_least("max_word_bytes", options.max_word_bytes, 4);
    check_at_least("table_bytes", options.table_bytes, 1);
  }

  // Words longer than the limit in parts, cut between characters.
  template <class Visit>
  void for_each_part(std::string_view word, Visit&& visit) const {
    const size_t limit = size_t(options.max_word_bytes);
    while (word.size() > limit) {
      size_t cut = limit;
      for (int back = 0; back < 3 && (word[cut] & 0xC0) == 0x80; ++back) --cut;
      if ((word[cut] & 0xC0) == 0x80) cut = limit;  // not UTF-8
      visit(word.substr(0, cut));
      word.remove_prefix(cut);
    }
    visit(word);
  }

  // What is in the table depends on the sequence of add() calls alone, and so does what leaves it.
  void keep_within_limit() {
    const auto bytes = [&] {
      int64_t sum = 0;
      for (const WordTable& shard : table) sum += shard.bytes();
      return sum;
    };
    if (bytes() <= options.table_bytes) return;
    const uint64_t before = different_words();
    // To three quarters, so that it is not done again at once.
    int64_t frequency = 0;
    while (bytes() > options.table_bytes / 4 * 3) {
      frequency = 2 * frequency + 1;
      parallel_for(kShards, [&](int64_t s) { table[size_t(s)].drop_up_to(frequency); });
    }
    stats.dropped_words += before - different_words();
    stats.dropped_frequency = std::max(stats.dropped_frequency, uint64_t(frequency));
  }

  uint64_t different_words() const {
    uint64_t sum = 0;
    for (const WordTable& shard : table) sum += shard.size();
    return sum;
  }

  BpeTrainerOptions options;
  std::vector<std::string> special;
  std::vector<SplitStep> splits;
  Splitter splitter;
  Shards table;
  std::vector<Shards> local;  // of each thread, for one batch
  BpeTrainerStats stats;
};

BpeTrainer::BpeTrainer(BpeTrainerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
BpeTrainer::~BpeTrainer() = default;

const BpeTrainerStats& BpeTrainer::stats() const {
  return impl_->stats;
}

void BpeTrainer::add(std::span<const std::string> texts) {
  Impl& m = *impl_;
  m.local.resize(std::max(m.local.size(), size_t(thread_count())));
  std::vector<uint64_t> words(texts.size());
  std::vector<std::exception_ptr> errors(texts.size());
  parallel_for(int64_t(texts.size()), [&](int64_t i) {
    try {
      Shards& shards = m.local[size_t(thread_index())];
      m.splitter.for_each(texts[size_t(i)], [&](std::string_view word) {
        ++words[size_t(i)];
        m.for_each_part(word, [&](std::string_view part) { add_word(shards, part); });
      });
    } catch (...) {
      errors[size_t(i)] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  parallel_for(kShards, [&](int64_t s) {
    for (Shards& shards : m.local) {
      m.table[size_t(s)].add(shards[size_t(s)]);
      shards[size_t(s)].clear();
    }
  });
  for (size_t i = 0; i < texts.size(); ++i) {
    ++m.stats.texts;
    m.stats.text_bytes += texts[i].size();
    m.stats.words += words[i];
  }
  m.keep_within_limit();
  m.stats.different_words = m.different_words();
}

BpeModel BpeTrainer::train(const std::function<void(int64_t)>& progress) {
  Impl& m = *impl_;
  if (m.stats.words == 0) fail("there is no text to train a tokenizer on");
  m.local.clear();
  BpeMerger merger(alphabet_ids());
  for (WordTable& shard : m.table) {
    shard.for_each([&](std::string_view word, int64_t count) { merger.add_word(word, count); });
    shard = WordTable{};
  }
  MergeLimits limits{.tokens = m.options.vocab_size - int64_t(m.special.size()),
                     .min_frequency = m.options.min_frequency,
                     .max_token_bytes = m.options.max_token_bytes,
                     .never = {}};
  // A vocabulary file holds each text once: a token spelled like a special one there would take its place.
  for (const std::string& token : m.special)
    if (auto bytes = from_alphabet(token)) limits.never.insert(std::move(*bytes));
  merger.run(limits, progress);

  BpeModel model;
  model.tokens = merger.tokens();
  model.merges = merger.merges();
  model.splits = m.splits;
  model.eot = int32_t(model.tokens.size());
  for (const std::string& token : m.special) {
    model.added.push_back({token, int32_t(model.tokens.size()), true});
    model.tokens.emplace_back();
  }
  return model;
}

std::vector<SplitStep> named_pattern(std::string_view name) {
  const std::pair<std::string_view, std::string_view> known[] = {{"gpt2", patterns::gpt2},
                                                                 {"llama3", patterns::cl100k},
                                                                 {"qwen2", patterns::qwen2},
                                                                 {"o200k", patterns::o200k}};
  std::string names;
  for (const auto& [known_name, pattern] : known) {
    if (name == known_name) return {{SplitStep::Kind::pattern, std::string(pattern)}};
    names += (names.empty() ? "" : ", ") + std::string(known_name);
  }
  // A bare word is a valid regular expression too, but nobody means it.
  if (std::all_of(name.begin(), name.end(),
                  [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-'; }))
    usage_error("no pattern is called '{}'; known: {}, or a regular expression", name, names);
  return {{SplitStep::Kind::pattern, std::string(name)}};
}

}  // namespace sps
