// The tables of angles that a model's blocks rotate by: one for blocks of full attention (where a part of the
// head may be rotated), one for blocks of a sliding window.
#pragma once

#include "model/config.h"
#include "ops/rope/rope.h"
#include "tensor/arena.h"

namespace sps {

class RopeTables {
 public:
  // dtype: f32, or f64 for the reference.
  RopeTables(const ModelConfig& config, DType dtype, Device device);
  RopeTables(const RopeTables&) = delete;  // the tables are views
  RopeTables& operator=(const RopeTables&) = delete;

  // What they take, in memory and to be planned.
  size_t bytes() const { return memory_.peak(); }
  static size_t bytes(const ModelConfig& config, DType dtype);

  const ops::RopeTable& of(const ModelConfig& config, int64_t block) const {
    return config.full_attention(block) ? tables_.full : tables_.local;
  }

 private:
  struct Pair {
    ops::RopeTable full, local;  // local: empty where no window slides
  };
  static Pair lay_out(const ModelConfig& config, DType dtype, Arena& arena);

  Arena memory_;
  Pair tables_;
};

}  // namespace sps
