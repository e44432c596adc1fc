#include <array>
#include <exception>

#include "base/error.h"
#include "base/hash.h"
#include "base/progress.h"
#include "base/threads.h"
#include "data/prepare_passes.h"

namespace sps {
namespace {

// Documents that are tokenised together. The limits bound memory; results do not depend on them.
constexpr size_t kBatchDocuments = 1024, kBatchBytes = size_t{4} << 20;
constexpr size_t kKeptBytes = 4096;           // memory that a slot keeps for its next document
constexpr size_t kKeptIds = size_t{1} << 20;  // and that a thread keeps

uint64_t seeded_hash(uint64_t seed, std::string_view text) {
  Hasher hasher;
  hasher.update(&seed, sizeof seed);
  hasher.update(text.data(), text.size());
  return hasher.digest();
}

struct Slot {
  RawDocument raw;
  Document document;
  uint64_t split_key = 0, text_key = 0, text_bytes = 0;
  std::vector<std::byte> tokens;
  std::exception_ptr error;
};

struct Batch {
  std::vector<Slot> slots = std::vector<Slot>(kBatchDocuments);
  size_t count = 0;
  std::exception_ptr error;  // of reading on after the last of them
  bool last = false;
  ReaderPosition end;
  uint64_t bytes_read = 0;
};

void read_batch(DocumentReader& reader, Batch& batch) {
  batch.count = 0;
  try {
    for (size_t bytes = 0; batch.count < kBatchDocuments && bytes < kBatchBytes; ++batch.count) {
      RawDocument& raw = batch.slots[batch.count].raw;
      if (!reader.next_raw(raw)) {
        batch.last = true;
        break;
      }
      bytes += raw.bytes.size();
    }
  } catch (...) {
    batch.error = std::current_exception();
  }
  batch.end = reader.position();
  batch.bytes_read = reader.bytes_read();
}

// `ids` is the thread's: one buffer for all its documents, and no more memory than the tokens need in the
// slots.
void tokenise(const DocumentReader& reader, const Tokenizer& tokenizer, const PrepareOptions& options,
              Slot& slot, std::vector<int32_t>& ids) {
  try {
    reader.parse(slot.raw, slot.document);
    if (slot.raw.bytes.capacity() > kKeptBytes) slot.raw = {};
    const std::string& text = slot.document.text;
    slot.text_bytes = text.size();
    slot.tokens.clear();
    if (text.empty()) return;
    slot.text_key = seeded_hash(options.seed, text);
    slot.split_key =
        options.split_by == SplitBy::text ? slot.text_key : seeded_hash(options.seed, slot.document.id);
    ids.clear();
    ids.reserve(text.size() + 1);
    tokenizer.encode(text, ids);
    ids.push_back(tokenizer.eot());
    if (text.capacity() > kKeptBytes) slot.document = {};
    pack_tokens(ids, token_type_for(tokenizer.vocab_size()), slot.tokens);
    if (ids.capacity() > kKeptIds) std::vector<int32_t>().swap(ids);
  } catch (...) {
    slot.error = std::current_exception();
  }
}

void write_batch(Batch& batch, PrepareWork& work) {
  for (size_t i = 0; i < batch.count; ++i) {
    Slot& slot = batch.slots[i];
    if (slot.text_bytes == 0)
      ++work.state.empty_documents;
    else
      work.add(slot.tokens, slot.split_key, slot.text_key, slot.text_bytes);
    if (slot.tokens.capacity() > kKeptBytes) std::vector<std::byte>().swap(slot.tokens);
  }
  batch.count = 0;
  work.state.position = batch.end;
}

void rethrow_first_error(const Batch& batch) {
  for (size_t i = 0; i < batch.count; ++i)
    if (batch.slots[i].error) std::rethrow_exception(batch.slots[i].error);
  if (batch.error) std::rethrow_exception(batch.error);
}

}  // namespace

void tokenise_documents(DocumentReader& reader, const Tokenizer& tokenizer, const PrepareOptions& options,
                        bool resumable, PrepareWork& work, const PrepareHooks& hooks) {
  if (work.saved()) reader.seek(work.state.position);
  const auto report = [&](uint64_t bytes) {
    hooks.report({"tokenising", bytes, reader.total_bytes(), work.state.documents});
  };
  report(reader.bytes_read());
  double began = monotonic_seconds();
  const auto save_after = [&](double seconds) {
    if (!resumable || monotonic_seconds() - began < seconds) return;
    work.save();
    began = monotonic_seconds();
  };

  // Three batches are under way: while the documents of one are tokenised, one thread reads the next and one
  // writes the one before.
  std::array<Batch, 3> batches;
  std::vector<std::vector<int32_t>> ids(static_cast<size_t>(thread_count()));  // by thread
  read_batch(reader, batches[0]);
  for (size_t turn = 0;; ++turn) {
    Batch &current = batches[turn % 3], &next = batches[(turn + 1) % 3], &previous = batches[(turn + 2) % 3];
    std::exception_ptr write_error;
    parallel_for(int64_t(current.count) + 2, [&](int64_t piece) {
      if (piece >= 2)
        return tokenise(reader, tokenizer, options, current.slots[size_t(piece - 2)],
                        ids[size_t(thread_index())]);
      if (piece == 0) {
        if (!current.last && !current.error) read_batch(reader, next);
        return;
      }
      try {
        if (turn == 0) return;
        write_batch(previous, work);
        save_after(options.save_seconds);
      } catch (...) {
        write_error = std::current_exception();
      }
    });
    if (write_error) std::rethrow_exception(write_error);
    try {
      rethrow_first_error(current);
    } catch (...) {
      work.give_up();  // the same input gives the same error
      throw;
    }
    report(current.bytes_read);
    if (!hooks.stopping() && !current.last) continue;
    write_batch(current, work);
    work.state.complete = current.last;
    // Work of a moment is not worth a note, unless it is to be continued.
    save_after(hooks.stopping() || work.saved() ? 0 : options.save_seconds);
    if (hooks.stopping()) throw PrepareStopped();
    report(current.bytes_read);
    break;
  }
  work.flush();
}

}  // namespace sps
