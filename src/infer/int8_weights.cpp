#include "infer/int8_weights.h"

#include <set>
#include <vector>

#include "ops/int8_linear/int8_linear.h"
#include "tensor/device.h"

namespace sps {

void round_to_int8(const ModelParameters& parameters, ParameterStore& store) {
  std::set<int> matrices{parameters.head};
  const auto add = [&](const BlockParameters& b) {
    for (const int tensor : {b.qkv, b.out, b.gate_up, b.down, b.read_kv})
      if (tensor != kNoParameter) matrices.insert(tensor);
  };
  for (const BlockParameters& b : parameters.state) add(b);
  for (const BlockParameters& b : parameters.pred) add(b);
  add(parameters.read_head);
  std::vector<int8_t> values;
  std::vector<bf16> scales;
  for (const int i : matrices) {
    const OnHost host(store.weight(i));
    const Tensor w = host;
    values.resize(ops::Int8Matrix::value_bytes(w.rows, w.cols));
    scales.resize(ops::Int8Matrix::scale_bytes(w.rows, w.cols) / sizeof(bf16));
    const ops::Int8Matrix in_8_bits{values.data(), scales.data(), w.rows, w.cols};
    ops::quantize_int8(w, in_8_bits);
    ops::dequantize_int8(in_8_bits, w);
    if (store.device() == Device::cuda) copy_tensor(w, store.weight(i));
  }
  store.round();
}

}  // namespace sps
