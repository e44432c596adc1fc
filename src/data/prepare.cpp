#include "data/prepare.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/threads.h"
#include "data/documents.h"
#include "tokenizer/tokenizer.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

struct Record {
  uint64_t key;           // the document's hash; later what it is ordered by
  uint64_t begin, bytes;  // in the scratch file
};

uint64_t seeded_hash(uint64_t seed, std::string_view text) {
  Hasher hasher;
  hasher.update(&seed, sizeof seed);
  hasher.update(text.data(), text.size());
  return hasher.digest();
}

// Documents that are tokenised together, one thread each. The limits bound memory; results do not depend on
// them.
constexpr size_t kBatchDocuments = 1024, kBatchBytes = size_t{32} << 20, kKept = 32768;

struct Slot {
  RawDocument raw;
  Document document;
  uint64_t hash = 0;
  std::vector<int32_t> ids;
  std::vector<std::byte> packed;
  std::exception_ptr error;
};

struct Tokenised {
  std::vector<Record> records;
  uint64_t empty_documents = 0;
};

Tokenised tokenise(DocumentReader& reader, const Tokenizer& tokenizer, TokenType type, uint64_t seed,
                   ScratchFile& scratch, const std::function<void(const PrepareProgress&)>& progress) {
  Tokenised result;
  std::vector<Slot> slots(kBatchDocuments);
  for (bool more = true; more;) {
    size_t count = 0, bytes = 0;
    while (count < kBatchDocuments && bytes < kBatchBytes && (more = reader.next_raw(slots[count].raw)))
      bytes += slots[count++].raw.bytes.size();
    parallel_for(int64_t(count), [&](int64_t i) {
      Slot& slot = slots[size_t(i)];
      try {
        reader.parse(slot.raw, slot.document);
        slot.ids.clear();
        tokenizer.encode(slot.document.text, slot.ids);
        slot.ids.push_back(tokenizer.eot());
        slot.packed.clear();
        pack_tokens(slot.ids, type, slot.packed);
        slot.hash = seeded_hash(seed, slot.document.text);
      } catch (...) {
        slot.error = std::current_exception();
      }
    });
    for (size_t i = 0; i < count; ++i) {
      if (slots[i].error) std::rethrow_exception(slots[i].error);
      if (slots[i].document.text.empty()) {
        ++result.empty_documents;
      } else {
        result.records.push_back({slots[i].hash, scratch.written(), slots[i].packed.size()});
        scratch.write(slots[i].packed.data(), slots[i].packed.size());
      }
      // A long document must not keep its memory in each slot that one ever passes through.
      if (slots[i].raw.bytes.capacity() + slots[i].ids.capacity() > kKept) slots[i] = Slot{};
    }
    if (progress) progress({"tokenising", reader.bytes_read(), reader.total_bytes(), result.records.size()});
  }
  return result;
}

// Sorts the records by hash and returns how many of them, from the front, are for validation.
size_t split(std::vector<Record>& records, double val_fraction) {
  std::sort(records.begin(), records.end(), [](const Record& a, const Record& b) {
    return a.key != b.key ? a.key < b.key : a.bytes != b.bytes ? a.bytes < b.bytes : a.begin < b.begin;
  });
  const uint64_t limit = uint64_t(std::ldexp(val_fraction, 64));  // val_fraction < 1: no overflow
  const size_t n = records.size();
  const auto first_from = [&](uint64_t key) {
    return size_t(std::lower_bound(records.begin(), records.end(), key,
                                   [](const Record& r, uint64_t k) { return r.key < k; }) -
                  records.begin());
  };
  size_t val = first_from(limit);
  if (val_fraction == 0) return 0;
  if (n == 1) {
    spdlog::warn("there is one document only: it is for training and val.bin stays empty");
    return 0;
  }
  // Copies of a text stay together where the other side still gets something.
  if (val == 0) {
    const uint64_t smallest = records.front().key;
    val = smallest == UINT64_MAX ? n : first_from(smallest + 1);
    spdlog::info(
        "no document fell to the validation side at val_fraction {}: the one with the smallest hash goes "
        "there",
        val_fraction);
  } else if (val == n) {
    spdlog::info(
        "all documents fell to the validation side at val_fraction {}: the one with the largest hash is for "
        "training",
        val_fraction);
  }
  if (val == n) val = first_from(records.back().key);
  if (val == 0) val = 1;  // nothing but copies of one text
  return val;
}

// Replaces each key by a hash that also counts the copies of one text, and sorts by it.
void shuffle(std::span<Record> records) {
  uint64_t copy = 0, previous = 0;
  for (size_t i = 0; i < records.size(); ++i) {
    copy = i > 0 && records[i].key == previous ? copy + 1 : 0;
    previous = records[i].key;
    const uint64_t words[2] = {previous, copy};
    records[i].key = hash64(words, sizeof words);
  }
  std::sort(records.begin(), records.end(), [](const Record& a, const Record& b) {
    return a.key != b.key ? a.key < b.key : a.begin < b.begin;
  });
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

// What stands in `out` already, if it may only be replaced by the same content. Refuses at once where the new
// content cannot be the same.
std::optional<TokenMeta> existing_data_set(const PrepareOptions& options, const Tokenizer& tokenizer) {
  const fs::path& out = options.out;
  if (options.force) return std::nullopt;
  if (is_there(out / "meta.json")) {
    if (is_marked_unfinished(out)) return std::nullopt;
    const TokenMeta old = *read_token_meta(out);
    const auto refuse = [&](std::string_view what, const auto& was, const auto& is) {
      fail(
          "{} already holds a data set with {} {}, not {}; choose another folder or add --force to replace "
          "it",
          out.string(), what, was, is);
    };
    if (old.tokenizer != tokenizer.name()) refuse("the tokenizer", old.tokenizer, tokenizer.name());
    if (old.fingerprint != tokenizer.fingerprint())
      refuse("the tokenizer fingerprint", old.fingerprint, tokenizer.fingerprint());
    if (old.seed != options.seed) refuse("the seed", old.seed, options.seed);
    if (old.val_fraction != options.val_fraction)
      refuse("val_fraction", old.val_fraction, options.val_fraction);
    return old;
  }
  for (const char* name : {"train.bin", "val.bin"})
    if (is_there(out / name))
      fail(
          "{} already exists, without a meta.json that tells what it is; choose another folder or add "
          "--force to "
          "replace it",
          (out / name).string());
  return std::nullopt;
}

// Puts the three files in place. A kill in between leaves a folder that readers refuse; an error leaves what
// was there before, or, once the first file of an existing data set is replaced, a folder that readers
// refuse.
void publish(const fs::path& out, TokenWriter& train, TokenWriter& val, const TokenMeta& meta) {
  train.flush();
  val.flush();
  const fs::path paths[] = {out / "meta.json", out / "train.bin", out / "val.bin"};
  const bool fresh = std::none_of(std::begin(paths), std::end(paths), is_there);
  const std::optional<std::string> old_meta =
      is_there(paths[0]) ? std::optional(read_text(paths[0])) : std::nullopt;
  bool replaced = false;
  mark_unfinished(out);
  try {
    train.commit();
    replaced = true;
    val.commit();
    write_token_meta(out, meta);
  } catch (...) {
    std::error_code ignored;
    if (fresh) {
      for (const fs::path& path : paths) fs::remove(path, ignored);
    } else if (!replaced) {
      if (old_meta)
        write_atomically(paths[0], *old_meta);
      else
        fs::remove(paths[0], ignored);
    }
    throw;
  }
}

}  // namespace

TokenMeta prepare(const PrepareOptions& options,
                  const std::function<void(const PrepareProgress&)>& progress) {
  if (!(options.val_fraction >= 0 && options.val_fraction < 1))
    usage_error("val_fraction is {}, but a number from 0 up to, not including, 1 is expected",
                options.val_fraction);
  if (options.out.empty()) usage_error("no output folder is given");
  const auto tokenizer = make_tokenizer(options.tokenizer);
  DocumentReader reader(options.inputs, options.text_field);
  const bool new_folder = !is_there(options.out);
  const auto old = existing_data_set(options, *tokenizer);
  make_writable_directory(options.out);

  try {
    TokenMeta meta;
    meta.tokenizer = tokenizer->name();
    meta.fingerprint = tokenizer->fingerprint();
    meta.vocab_size = tokenizer->vocab_size();
    meta.eot = tokenizer->eot();
    meta.type = token_type_for(meta.vocab_size);
    meta.seed = options.seed;
    meta.val_fraction = options.val_fraction;
    meta.text_field = options.text_field;
    meta.inputs = options.inputs;

    ScratchFile scratch(options.out);
    auto [records, empty_documents] = tokenise(reader, *tokenizer, meta.type, meta.seed, scratch, progress);
    if (records.empty())
      fail("there is no text in the input: {} files, {} empty documents", reader.files(), empty_documents);
    if (empty_documents > 0) spdlog::info("skipped {} empty documents", empty_documents);
    const size_t val_documents = split(records, meta.val_fraction);

    const MappedFile packed = scratch.map();
    PrepareProgress state{"writing", 0, scratch.written(), 0};
    const auto write = [&](TokenWriter& writer, std::span<Record> side) -> SplitMeta {
      shuffle(side);
      for (const Record& record : side) {
        writer.append_bytes(packed.bytes().subspan(record.begin, record.bytes));
        state.done += record.bytes;
        ++state.documents;
        if (progress && state.documents % kBatchDocuments == 0) progress(state);
      }
      return {writer.tokens(), side.size(), writer.hash()};
    };
    TokenWriter train(options.out / "train.bin", meta.type), val(options.out / "val.bin", meta.type);
    meta.val = write(val, std::span(records).first(val_documents));
    meta.train = write(train, std::span(records).subspan(val_documents));
    if (progress) progress(state);

    if (old && (old->train != meta.train || old->val != meta.val))
      fail(
          "{} already holds a data set of {} training tokens with other content (the new one has {}); choose "
          "another "
          "folder or add --force to replace it",
          options.out.string(), old->train.tokens, meta.train.tokens);
    publish(options.out, train, val, meta);
    return meta;
  } catch (...) {
    std::error_code ignored;
    if (new_folder) fs::remove(options.out, ignored);  // only if it is empty
    throw;
  }
}

}  // namespace sps
