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

  const ops::RopeTable& of(const ModelConfig& config, int64_t block) const {
    return config.full_attention(block) ? full_ : local_;
  }

 private:
  Arena memory_;
  ops::RopeTable full_, local_;
};

}  // namespace sps
