// Sorting more records than memory may hold: sorted runs are written to one file and merged while they are
// read back. A record is plain data; the order must be total where the result shall not depend on the memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/files.h"

namespace sps {

// add() them all, finish(), then take them in order with next(). The file is written only if the records
// exceed the memory, and removed with the object.
template <class Record, class Before>
class ExternalSorter {
  static_assert(std::is_trivially_copyable_v<Record>);

 public:
  ExternalSorter(std::filesystem::path file, size_t memory_bytes, Before before = {})
      : path_(std::move(file)), room_(std::max<size_t>(memory_bytes / sizeof(Record), 2)), before_(before) {}
  ~ExternalSorter() {
    std::error_code ignored;
    if (file_) std::filesystem::remove(path_, ignored);
  }
  ExternalSorter(const ExternalSorter&) = delete;
  ExternalSorter& operator=(const ExternalSorter&) = delete;

  void add(const Record& record) {
    SPS_CHECK(!finished_);
    if (records_.size() == room_) write_run();
    records_.push_back(record);
    ++size_;
  }

  void finish() {
    SPS_CHECK(!std::exchange(finished_, true));
    if (runs_.empty()) {
      std::sort(records_.begin(), records_.end(), before_);
      return;
    }
    write_run();
    std::vector<Record>().swap(records_);
    const size_t share = std::max<size_t>(room_ / runs_.size(), 1);
    for (size_t i = 0; i < runs_.size(); ++i) {
      runs_[i].share = share;
      if (refill(runs_[i])) heap_.push_back(i);
    }
    std::make_heap(heap_.begin(), heap_.end(), after());
  }

  bool next(Record& record) {
    SPS_CHECK(finished_);
    if (runs_.empty()) {
      if (at_ == records_.size()) return false;
      record = records_[at_++];
      return true;
    }
    if (heap_.empty()) return false;
    std::pop_heap(heap_.begin(), heap_.end(), after());
    Run& run = runs_[heap_.back()];
    record = run.buffer[run.at++];
    if (run.at < run.buffer.size() || refill(run))
      std::push_heap(heap_.begin(), heap_.end(), after());
    else
      heap_.pop_back();
    return true;
  }

  uint64_t size() const { return size_; }
  size_t runs() const { return runs_.size(); }  // 0: everything was in memory

 private:
  struct Run {
    uint64_t begin, left;  // records: where the rest stands in the file, and how many
    std::vector<Record> buffer{};
    size_t at = 0, share = 0;
  };

  void write_run() {
    if (!file_) file_ = std::make_unique<WorkFile>(path_);
    std::sort(records_.begin(), records_.end(), before_);
    runs_.push_back({file_->size() / sizeof(Record), records_.size()});
    file_->append(records_.data(), records_.size() * sizeof(Record));
    records_.clear();
  }
  bool refill(Run& run) {
    const size_t n = size_t(std::min<uint64_t>(run.share, run.left));
    run.buffer.resize(n);
    run.at = 0;
    file_->read(run.begin * sizeof(Record), run.buffer.data(), n * sizeof(Record));
    run.begin += n;
    run.left -= n;
    return n > 0;
  }
  // Of two runs the one whose next record comes later; equal records come in the order of the runs.
  auto after() {
    return [this](size_t a, size_t b) {
      const Record &x = runs_[a].buffer[runs_[a].at], &y = runs_[b].buffer[runs_[b].at];
      return before_(y, x) || (!before_(x, y) && a > b);
    };
  }

  std::filesystem::path path_;
  size_t room_;  // records that memory holds
  Before before_;
  std::vector<Record> records_;
  std::unique_ptr<WorkFile> file_;
  std::vector<Run> runs_;
  std::vector<size_t> heap_;
  uint64_t size_ = 0;
  size_t at_ = 0;
  bool finished_ = false;
};

}  // namespace sps
