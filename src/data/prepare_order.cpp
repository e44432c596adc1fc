#include <algorithm>
#include <array>
#include <cmath>
#include <exception>

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/threads.h"
#include "data/external_sort.h"
#include "data/prepare_passes.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

struct BySplit {
  bool operator()(const DocumentRecord& a, const DocumentRecord& b) const {
    if (a.split_key != b.split_key) return a.split_key < b.split_key;
    if (a.text_key != b.text_key) return a.text_key < b.text_key;
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.begin < b.begin;
  }
};

// A document with its place in the output; validation comes first.
struct Placed {
  uint64_t train, order, begin, bytes;
};
struct ByPlace {
  bool operator()(const Placed& a, const Placed& b) const {
    if (a.train != b.train) return a.train < b.train;
    return a.order != b.order ? a.order < b.order : a.begin < b.begin;
  }
};

using SplitSorter = ExternalSorter<DocumentRecord, BySplit>;
using PlaceSorter = ExternalSorter<Placed, ByPlace>;
constexpr uint64_t kReportEvery = 65536;  // documents

// How many documents have keys below the limit, and at the two ends.
struct KeyCounts {
  uint64_t all = 0, below_limit = 0;
  uint64_t smallest = UINT64_MAX, at_smallest = 0, largest = 0, at_largest = 0;
  void add(uint64_t key, uint64_t limit) {
    ++all;
    below_limit += key < limit;
    if (key < smallest) smallest = key, at_smallest = 0;
    if (key > largest) largest = key, at_largest = 0;
    at_smallest += key == smallest;
    at_largest += key == largest;
  }
};

// How many of the documents, in the order of their keys, are for validation.
uint64_t validation_documents(const KeyCounts& counts, double val_fraction) {
  if (val_fraction == 0) return 0;
  if (counts.all == 1) {
    spdlog::warn("there is one document only: it is for training and val.bin stays empty");
    return 0;
  }
  // Copies of a text stay together where the other side still gets something.
  uint64_t val = counts.below_limit;
  if (val == 0) {
    val = counts.at_smallest;
    spdlog::info(
        "no document fell to the validation side at val_fraction {}: the one with the smallest hash goes "
        "there",
        val_fraction);
  } else if (val == counts.all) {
    spdlog::info(
        "all documents fell to the validation side at val_fraction {}: the one with the largest hash is for "
        "training",
        val_fraction);
  }
  if (val == counts.all) val = counts.all - counts.at_largest;
  return std::max<uint64_t>(val, 1);  // 0: nothing but copies of one text
}

KeyCounts sort_by_split(const PrepareWork& work, uint64_t limit, SplitSorter& sorter,
                        const std::function<void(uint64_t)>& report) {
  KeyCounts counts;
  std::vector<DocumentRecord> block(8192);
  for (uint64_t at = 0; at < work.state.documents; at += block.size()) {
    block.resize(size_t(std::min<uint64_t>(block.size(), work.state.documents - at)));
    work.records().read(at * sizeof(DocumentRecord), block.data(), block.size() * sizeof(DocumentRecord));
    for (const DocumentRecord& record : block) {
      counts.add(record.split_key, limit);
      sorter.add(record);
    }
    report(at + block.size());
  }
  sorter.finish();
  return counts;
}

// Gives each document its side and a hash to be ordered by that also counts the copies of one text.
void place(SplitSorter& sorter, uint64_t val_documents, SplitBy split_by, PlaceSorter& placed,
           TokenMeta& meta, const std::function<void(uint64_t)>& report) {
  uint64_t copy = 0;
  DocumentRecord record, before{};
  for (uint64_t rank = 0; sorter.next(record); ++rank, before = record) {
    const bool train = rank >= val_documents;
    const bool first = rank == 0 || rank == val_documents;
    copy =
        !first && record.split_key == before.split_key && record.text_key == before.text_key ? copy + 1 : 0;
    const uint64_t words[3] = {copy, record.text_key, record.split_key};
    const uint64_t by_text[2] = {record.text_key, copy};
    const uint64_t order =
        split_by == SplitBy::text ? hash64(by_text, sizeof by_text) : hash64(words, sizeof words);
    placed.add({train, order, record.begin, record.bytes});
    SplitMeta& side = train ? meta.train : meta.val;
    ++side.documents;
    side.tokens += record.bytes / uint64_t(meta.type);
    side.text_bytes += record.text_bytes;
    if (rank % kReportEvery == 0) report(rank);
  }
  placed.finish();
}

// A stretch of tokens on its way from where it was read to where it is written.
struct Stretch {
  uint64_t from, to, bytes;
};
struct Block {
  std::vector<std::byte> bytes;
  std::vector<Stretch> stretches;
  uint64_t documents = 0;  // that end in it
};
constexpr size_t kBlockBytes = size_t{8} << 20, kStretchBytes = size_t{1} << 20;

// Hands out the documents of one side in order, in blocks of a bounded size; long ones are cut.
class BlockSource {
 public:
  BlockSource(PlaceSorter& sorter, uint64_t documents) : sorter_(sorter), documents_(documents) {}
  bool next(Block& block) {
    block.stretches.clear();
    block.documents = 0;
    size_t size = 0;
    while (size < kBlockBytes && (current_.bytes > 0 || advance())) {
      const size_t n = size_t(std::min<uint64_t>({current_.bytes, kStretchBytes, kBlockBytes - size}));
      block.stretches.push_back({current_.begin, size, n});
      size += n;
      current_.begin += n;
      current_.bytes -= n;
      block.documents += current_.bytes == 0;
    }
    block.bytes.resize(size);
    // Neighbours on the disk are read by one thread after each other.
    std::sort(block.stretches.begin(), block.stretches.end(),
              [](const Stretch& a, const Stretch& b) { return a.from < b.from; });
    return size > 0;
  }

 private:
  bool advance() {
    if (documents_ == 0) return false;
    SPS_CHECK(sorter_.next(current_));
    --documents_;
    return true;
  }
  PlaceSorter& sorter_;
  uint64_t documents_;
  Placed current_{};
};

// One side: a block is read by all threads while the one before is written.
void write_side(const WorkFile& tokens, PlaceSorter& sorter, SplitMeta& side, TokenWriter& writer,
                PrepareProgress& state, const PrepareHooks& hooks) {
  BlockSource source(sorter, side.documents);
  std::array<Block, 2> blocks;
  bool writing = false;
  for (size_t turn = 0;; ++turn) {
    Block &current = blocks[turn % 2], &previous = blocks[(turn + 1) % 2];
    const bool reading = source.next(current);
    if (!reading && !writing) break;
    std::vector<std::exception_ptr> errors(current.stretches.size() + 1);
    parallel_for(int64_t(errors.size()), [&](int64_t piece) {
      try {
        if (piece == 0) {
          if (writing) writer.append_bytes(previous.bytes);
          return;
        }
        const Stretch& s = current.stretches[size_t(piece - 1)];
        tokens.read(s.from, current.bytes.data() + s.to, size_t(s.bytes));
      } catch (...) {
        errors[size_t(piece)] = std::current_exception();
      }
    });
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
    if (writing) {
      state.done += previous.bytes.size();
      state.documents += previous.documents;
      hooks.report(state);
    }
    writing = reading;
    if (hooks.stopping()) throw PrepareStopped();
  }
  SPS_CHECK(writer.tokens() == side.tokens);
  side.hash = writer.hash();
}

std::unique_ptr<TokenWriter> writer_for(const fs::path& path, const TokenMeta& meta, const SplitMeta& side) {
  if (meta.format == TokenFormat::llmc) return std::make_unique<TokenWriter>(path, meta.type, side.tokens);
  return std::make_unique<TokenWriter>(path, meta.type);
}

}  // namespace

OrderedFiles write_in_order(const PrepareOptions& options, const PrepareWork& work, TokenMeta& meta,
                            const PrepareHooks& hooks) {
  const uint64_t documents = work.state.documents;
  PlaceSorter placed(work.folder() / "places", options.sort_bytes);
  {
    // Half of the sorting is done when every record has been read, the rest when each has its place.
    const auto report_from = [&](uint64_t done_before) {
      return [&, done_before](uint64_t done) {
        constexpr uint64_t bytes = sizeof(DocumentRecord);
        hooks.report(
            {"sorting", (done_before + done) * bytes, 2 * documents * bytes, (done_before + done) / 2});
        if (hooks.stopping()) throw PrepareStopped();
      };
    };
    SplitSorter by_split(work.folder() / "keys", options.sort_bytes);
    const uint64_t limit = uint64_t(std::ldexp(options.val_fraction, 64));  // val_fraction < 1: no overflow
    const KeyCounts counts = sort_by_split(work, limit, by_split, report_from(0));
    place(by_split, validation_documents(counts, options.val_fraction), options.split_by, placed, meta,
          report_from(documents));
    hooks.report({"sorting", 2 * documents * sizeof(DocumentRecord), 2 * documents * sizeof(DocumentRecord),
                  documents});
  }
  OrderedFiles files{writer_for(options.out / "train.bin", meta, meta.train),
                     writer_for(options.out / "val.bin", meta, meta.val)};
  PrepareProgress state{"writing", 0, work.state.token_bytes, 0};
  hooks.report(state);
  write_side(work.tokens(), placed, meta.val, *files.val, state, hooks);
  write_side(work.tokens(), placed, meta.train, *files.train, state, hooks);
  return files;
}

}  // namespace sps
