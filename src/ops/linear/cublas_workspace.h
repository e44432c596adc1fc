// What every product on a GPU may use of DeviceSlot::workspace.
#pragma once

#include <cstddef>

namespace sps::ops {

constexpr size_t kCublasWorkspaceBytes = size_t{64} << 20;

}  // namespace sps::ops
