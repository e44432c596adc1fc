// The model's keys as options: names, types and help of what config.h describes.
#pragma once

#include "base/options.h"
#include "model/config.h"

namespace sps {

// Adds every "model." key, bound to the fields of `keys`.
void bind_model(OptionTable& table, ModelKeys& keys);

}  // namespace sps
