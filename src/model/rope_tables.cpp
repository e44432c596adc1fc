#include "model/rope_tables.h"

#include <algorithm>
#include <utility>

#include "tensor/device.h"

namespace sps {

RopeTables::Pair RopeTables::lay_out(const ModelConfig& config, DType dtype, Arena& arena) {
  const auto table = [&](int64_t width) {
    ops::RopeTable t;
    t.cos = arena.take(dtype, config.context, width / 2);
    t.sin = arena.take(dtype, config.context, width / 2);
    t.pairs = config.rope_pairs;
    return t;
  };
  // Without a sliding window every block is a full one and only the first table is used.
  const int64_t full_width =
      std::max<int64_t>(2, int64_t(double(config.head_dim) * config.rope_fraction / 2 + 0.5) * 2);
  Pair tables;
  tables.full = table(full_width);
  if (config.sliding_window > 0) tables.local = table(config.head_dim);
  return tables;
}

size_t RopeTables::bytes(const ModelConfig& config, DType dtype) {
  Arena planning;
  lay_out(config, dtype, planning);
  return planning.peak();
}

RopeTables::RopeTables(const ModelConfig& config, DType dtype, Device device) {
  Arena made(bytes(config, dtype), Device::cpu);
  tables_ = lay_out(config, dtype, made);
  ops::rope_fill(tables_.full, config.rope_theta);
  if (config.sliding_window > 0) ops::rope_fill(tables_.local, config.rope_theta);
  if (device == Device::cpu) {
    memory_ = std::move(made);
    return;
  }
  memory_ = Arena(bytes(config, dtype), device);
  const Pair there = lay_out(config, dtype, memory_);
  copy_tensor(tables_.full.cos, there.full.cos), copy_tensor(tables_.full.sin, there.full.sin);
  copy_tensor(tables_.local.cos, there.local.cos), copy_tensor(tables_.local.sin, there.local.sin);
  tables_ = there;
}

}  // namespace sps
