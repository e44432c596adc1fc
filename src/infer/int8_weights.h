// Weights in 8 bits (ops/int8_linear) for the products of a model.
#pragma once

#include <string_view>
#include <vector>

#include "model/parameters.h"
#include "ops/int8_linear/int8_linear.h"
#include "tensor/memory.h"

namespace sps {

// Every matrix that products read, in host memory; norms, gates and embedding tables are not among them, but
// for one that is the head too.
class Int8Weights {
 public:
  // From the store's master weights, which become what their 8 bits are read as, with their rounded copies:
  // so a decoder says the same with these weights and, from the store, without them. A second time changes
  // nothing.
  Int8Weights(const ModelParameters& parameters, ParameterStore& store);

  // [rows, cols] of the parameter; SPS_CHECKs that it is one of them.
  const ops::Int8Matrix& of(int parameter) const;
  size_t bytes() const { return memory_.size(); }

 private:
  std::vector<ops::Int8Matrix> matrices_;  // by parameter; of the others empty
  Bytes memory_;
};

// Usage error unless products can read weights in 8 bits: in bf16 on the CPU. `option`: as the user gave it.
void check_int8_serves(std::string_view option, DType compute, Device device);

}  // namespace sps
