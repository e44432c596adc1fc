// StreamGraph: work on a GPU that is issued once and then started again and again with one call, with the
// same places in memory and the same launch shapes every time. Plain C++ like device.h; on the CPU there is
// nothing to record.
#pragma once

#include <functional>
#include <utility>

#include "tensor/exec.h"

namespace sps {

class StreamGraph {
 public:
  StreamGraph() = default;
  ~StreamGraph();
  StreamGraph(StreamGraph&& other) noexcept
      : graph_(std::exchange(other.graph_, nullptr)), stream_(other.stream_) {}
  StreamGraph& operator=(StreamGraph&& other) noexcept {
    std::swap(graph_, other.graph_), std::swap(stream_, other.stream_);
    return *this;
  }
  explicit operator bool() const { return graph_ != nullptr; }

  // Keeps what `issue` issues on ex's stream; none of it runs. Everything it needs must have been allocated:
  // it must not wait, copy from or to memory that is not pinned, or grow scratch (Error). What it throws
  // comes through, and the stream is as it was.
  void record(const Exec& ex, const std::function<void()>& issue);
  // All of it, in the stream's order. The memory it names must still be there.
  void start(const Exec& ex) const;

 private:
  void* graph_ = nullptr;
  void* stream_ = nullptr;  // where it may be under way; the end of a graph waits for it
};

}  // namespace sps
