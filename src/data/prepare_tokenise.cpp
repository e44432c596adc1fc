#include <array>
#include <exception>

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/threads.h"
#include "data/prepare_passes.h"

namespace sps {
namespace {

// Documents that are tokenised together. The limits bound memory; results do not depend on them.
constexpr size_t kBatchDocuments = 1024, kBatchBytes = size_t{4} << 20;
constexpr size_t kKeptBytes = 4096;  // memory that a slot keeps for its next document
// Larger batches, which is those with a large document, are read, tokenised and written one after the other.
constexpr size_t kLargeBatchBytes = size_t{16} << 20;
constexpr size_t kPartBytes = size_t{1} << 20;

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
  TokenParts tokens;
  std::exception_ptr error;
};

struct Batch {
  std::vector<Slot> slots = std::vector<Slot>(kBatchDocuments);
  size_t count = 0, bytes = 0;
  std::exception_ptr error;  // of reading on after the last of them
  bool last = false;
  ReaderPosition end;
  uint64_t bytes_read = 0;
};

void read_batch(DocumentReader& reader, Batch& batch) {
  batch.count = batch.bytes = 0;
  try {
    for (; batch.count < kBatchDocuments && batch.bytes < kBatchBytes; ++batch.count) {
      RawDocument& raw = batch.slots[batch.count].raw;
      if (!reader.next_raw(raw)) {
        batch.last = true;
        break;
      }
      batch.bytes += raw.bytes.size();
    }
  } catch (...) {
    batch.error = std::current_exception();
  }
  batch.end = reader.position();
  batch.bytes_read = reader.bytes_read();
}

// Packs ids into parts of a bounded size, so that a large document is never copied to grow.
void append_ids(std::span<const int32_t> ids, TokenType type, TokenParts& parts) {
  if (parts.empty() || parts.back().size() >= kPartBytes) parts.emplace_back();
  pack_tokens(ids, type, parts.back());
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
    if (slot.tokens.size() == 1)
      slot.tokens[0].clear();
    else
      slot.tokens.clear();
    if (text.empty()) return;
    slot.text_key = seeded_hash(options.seed, text);
    slot.split_key =
        options.split_by == SplitBy::text ? slot.text_key : seeded_hash(options.seed, slot.document.id);
    const TokenType type = token_type_for(tokenizer.vocab_size());
    ids.clear();
    if (tokenizer.bos() >= 0 && tokenizer.bos() != tokenizer.eot()) ids.push_back(tokenizer.bos());
    if (text.size() > kPartBytes) {
      append_ids(ids, type, slot.tokens);
      ids.clear();
      tokenizer.encode_in_parts(text,
                                [&](std::span<const int32_t> some) { append_ids(some, type, slot.tokens); });
    } else {
      tokenizer.encode(text, ids);
    }
    if (text.capacity() > kKeptBytes) slot.document = {};
    ids.push_back(tokenizer.eot());
    append_ids(ids, type, slot.tokens);
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
    if (slot.tokens.size() > 1 || (!slot.tokens.empty() && slot.tokens[0].capacity() > kKeptBytes))
      TokenParts().swap(slot.tokens);
  }
  batch.count = 0;
  work.state.position = batch.end;
}

void rethrow_first_error(const Batch& batch) {
  for (size_t i = 0; i < batch.count; ++i)
    if (batch.slots[i].error) std::rethrow_exception(batch.slots[i].error);
  if (batch.error) std::rethrow_exception(batch.error);
}

// Looks once, as soon as enough of the input is tokenised to go by, whether the disk has room for the rest.
class SpaceCheck {
 public:
  SpaceCheck(const PrepareOptions& options, uint64_t total_bytes) : options_(options), total_(total_bytes) {}

  // What is in `work` came from the first `bytes_read` bytes of the input.
  void look(const PrepareWork& work, uint64_t bytes_read) {
    if (done_ || total_ == 0 || bytes_read < options_.space_sample_bytes || bytes_read >= total_) return;
    done_ = true;
    const double parts = double(total_) / double(bytes_read);
    const double tokens = parts * double(work.state.token_bytes);
    const double records = parts * double(work.state.documents) * sizeof(DocumentRecord);
    const double sorted = records > double(options_.sort_bytes) ? records : 0;
    const double needed = (tokens - double(work.state.token_bytes)) + tokens + records + sorted;
    const double free = double(free_bytes());
    const std::string sentence = fmt::format("{} needs about {} more on its disk, which has {} free",
                                             options_.out.string(), human_bytes(needed), human_bytes(free));
    if (free < needed / 2) fail("{}: make room, choose another folder or prepare less", sentence);
    if (free < needed) spdlog::warn("{}", sentence);
  }

 private:
  uint64_t free_bytes() const {
    if (options_.free_bytes) return options_.free_bytes(options_.out);
    std::error_code error;
    const auto space = std::filesystem::space(options_.out, error);
    return error ? UINT64_MAX : uint64_t(space.available);
  }

  const PrepareOptions& options_;
  uint64_t total_;
  bool done_ = false;
};

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
  SpaceCheck space(options, reader.total_bytes());
  if (work.saved()) space.look(work, reader.bytes_read());
  std::array<Batch, 3> batches;
  std::vector<std::vector<int32_t>> ids(static_cast<size_t>(thread_count()));  // by thread
  read_batch(reader, batches[0]);
  for (size_t turn = 0;; ++turn) {
    Batch &current = batches[turn % 3], &next = batches[(turn + 1) % 3], &previous = batches[(turn + 2) % 3];
    std::exception_ptr write_error;
    const auto read_next = [&] {
      if (!current.last && !current.error) read_batch(reader, next);
    };
    const auto write_previous = [&] {
      try {
        if (turn == 0) return;
        write_batch(previous, work);
        space.look(work, previous.bytes_read);
        save_after(options.save_seconds);
      } catch (...) {
        write_error = std::current_exception();
      }
    };
    const auto tokenise_one = [&](int64_t i) {
      tokenise(reader, tokenizer, options, current.slots[size_t(i)], ids[size_t(thread_index())]);
    };
    if (current.bytes > kLargeBatchBytes) {
      write_previous();
      if (!write_error) parallel_for(int64_t(current.count), tokenise_one);
      read_next();
    } else {
      parallel_for(int64_t(current.count) + 2, [&](int64_t piece) {
        if (piece == 0)
          read_next();
        else if (piece == 1)
          write_previous();
        else
          tokenise_one(piece - 2);
      });
    }
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
