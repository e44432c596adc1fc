// Activation recomputation: what a training pass does not keep for its backward pass but makes again there,
// stage by stage and with the same operations on the same shapes, so that not a bit of loss or gradients
// changes. What is made again lies in memory that all stages share.
#pragma once

#include <string_view>
#include <vector>

#include "model/freeze.h"
#include "model/plan.h"

namespace sps {

enum class Recompute : uint8_t {
  none,   // everything is kept (but the FFN's hidden rows, which the gradient of its SwiGLU brings along)
  ffn,    // the norms' outputs and the FFN's inside are made again: one product of the FFN's two
  block,  // of a stage only the residuals that enter it are kept, and what other stages read
};
std::string_view name_of(Recompute mode);              // "none", "ffn", "block"
Recompute recompute_from_name(std::string_view name);  // usage error for anything but those names

// What of a stage lies in shared memory: what is made again, and also what nobody reads again, because there
// is no backward pass (train = false) or it ends above a frozen tower.
Recompute shared_part(const Plan& plan, const Stage& stage, Recompute mode, Freeze freeze, bool train);

// What the backward pass makes again of each of the plan's stages. Nothing of the one that runs last: its
// part of the shared memory is still as it was.
std::vector<Recompute> made_again(const Plan& plan, Recompute mode, Freeze freeze);

}  // namespace sps
