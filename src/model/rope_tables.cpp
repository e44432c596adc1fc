#include "model/rope_tables.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tensor/device.h"

namespace sps {

RopeTables::RopeTables(const ModelConfig& config, DType dtype, Device device) {
  const auto lay_out = [&](Arena& arena) {
    const auto table = [&](ops::RopeTable& t, int64_t width) {
      t.cos = arena.take(dtype, config.context, width / 2);
      t.sin = arena.take(dtype, config.context, width / 2);
      t.pairs = config.rope_pairs;
    };
    // Without a sliding window every block is a full one and only the first table is used.
    const int64_t full_width =
        std::max<int64_t>(2, int64_t(double(config.head_dim) * config.rope_fraction / 2 + 0.5) * 2);
    table(full_, full_width);
    if (config.sliding_window > 0) table(local_, config.head_dim);
  };
  Arena planning;
  lay_out(planning);
  Arena made(planning.peak(), Device::cpu);
  lay_out(made);
  ops::rope_fill(full_, config.rope_theta);
  if (config.sliding_window > 0) ops::rope_fill(local_, config.rope_theta);
  if (device == Device::cpu) {
    memory_ = std::move(made);
    return;
  }
  memory_ = Arena(planning.peak(), device);
  const std::array from{full_.cos, full_.sin, local_.cos, local_.sin};
  lay_out(memory_);
  const std::array to{full_.cos, full_.sin, local_.cos, local_.sin};
  for (size_t i = 0; i < from.size(); ++i) copy_tensor(from[i], to[i]);
}

}  // namespace sps
