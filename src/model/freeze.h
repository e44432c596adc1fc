// A frozen state tower (two-tower spec, section 1.8): its tensors take part in the forward pass and in
// nothing else. They get no gradient, so the tower's backward pass is dead work and is not done; they have no
// moments, do not decay and are not updated.
#pragma once

#include <string_view>

#include "model/config.h"

namespace sps {

struct Freeze {
  bool state = false;      // embed and state.*
  bool read_head = false;  // read_head.* as well
  bool covers(std::string_view parameter) const;
  bool operator==(const Freeze&) const = default;
};

// Usage error unless every weight of the state tower is its own and its rows depend on nothing else, so that
// a prediction tower can be trained beside it.
void check_freezable(const ModelConfig& config);

}  // namespace sps
