// StreamGraph: work on a GPU that is issued once and then started again and again with one call, with the
// same places in memory and the same launch shapes every time. Plain C++ like device.h; on the CPU there is
// nothing to record.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <variant>

#include "tensor/device.h"
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

// Graphs of work that comes again, by a key that holds all that its launches depend on. Work whose key comes
// for the first time is issued as it is, by which everything that it needs gets allocated; the second time it
// is recorded, and from then on started. Graphs name places in scratch: when that has grown they are recorded
// anew. `most` are kept, those that were used last. With each graph goes an `Attached`, for what it names.
template <class Key, class Attached = std::monostate>
class StreamGraphs {
 public:
  explicit StreamGraphs(size_t most) : most_(most) {}

  // On a GPU. `record` records what `issue` issues.
  void run(const Exec& ex, const Key& key, const std::function<void()>& issue) {
    run(ex, key, issue, [&](StreamGraph& graph, Attached&) { graph.record(ex, issue); });
  }
  void run(const Exec& ex, const Key& key, const std::function<void()>& issue,
           const std::function<void(StreamGraph&, Attached&)>& record) {
    const size_t growths = device_scratch_growths();
    if (std::exchange(growths_, growths) != growths)
      for (auto& [k, known] : known_) known.graph = {};
    ++uses_;
    const auto found = known_.find(key);
    if (found == known_.end()) {
      if (known_.size() == most_)
        known_.erase(std::ranges::min_element(known_, {}, [](const auto& k) { return k.second.last_use; }));
      issue();
      known_[key].last_use = uses_;
      return;
    }
    Known& known = found->second;
    known.last_use = uses_;
    if (!known.graph) record(known.graph, known.attached);
    known.graph.start(ex);
  }

 private:
  struct Known {
    Attached attached;
    StreamGraph graph;  // none: its work has been issued, but not recorded since scratch grew
    uint64_t last_use = 0;
  };
  size_t most_;
  std::map<Key, Known> known_;
  size_t growths_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace sps
