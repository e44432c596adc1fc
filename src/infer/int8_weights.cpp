#include "infer/int8_weights.h"

#include <utility>

#include "base/error.h"
#include "tensor/device.h"

namespace sps {

namespace {

std::vector<int> read_by_products(const ModelParameters& parameters) {
  std::vector<int> matrices;
  for (size_t i = 0; i < parameters.list.size(); ++i)
    if (parameters.list[i].product) matrices.push_back(int(i));
  return matrices;
}

// Every matrix begins where a line of a cache does.
size_t whole_lines(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

}  // namespace

Int8Weights::Int8Weights(const ModelParameters& parameters, ParameterStore& store)
    : matrices_(parameters.list.size()) {
  const std::vector<int> matrices = read_by_products(parameters);
  size_t bytes = 0;
  for (const int i : matrices) {
    const Tensor w = store.weight(i);
    SPS_CHECK(w);  // the masters must be held
    bytes += whole_lines(ops::Int8Matrix::value_bytes(w.rows, w.cols)) +
             whole_lines(ops::Int8Matrix::scale_bytes(w.rows, w.cols));
  }
  memory_ = Bytes(bytes, Memory::host);
  std::byte* next = memory_.data();
  const auto take = [&](size_t count) { return std::exchange(next, next + whole_lines(count)); };
  for (const int i : matrices) {
    const OnHost host(store.weight(i));
    const Tensor w = host;
    ops::Int8Matrix& to = matrices_[size_t(i)];
    to.rows = w.rows, to.cols = w.cols;
    to.values = reinterpret_cast<int8_t*>(take(ops::Int8Matrix::value_bytes(w.rows, w.cols)));
    to.scales = reinterpret_cast<bf16*>(take(ops::Int8Matrix::scale_bytes(w.rows, w.cols)));
    ops::quantize_int8(w, to);
    ops::dequantize_int8(to, w);
    if (store.device() == Device::cuda) copy_tensor(w, store.weight(i));
  }
  store.round();
}

const ops::Int8Matrix& Int8Weights::of(int parameter) const {
  const ops::Int8Matrix& matrix = matrices_[size_t(parameter)];
  SPS_CHECK(matrix.values != nullptr);
  return matrix;
}

void check_int8_serves(std::string_view option, DType compute, Device device) {
  if (device != Device::cpu)
    usage_error("{}: products read weights in 8 bits on the CPU alone, expected --device cpu", option);
  if (compute != DType::bf16)
    usage_error("{}: products read weights in 8 bits in bf16 alone, not in {}: expected --dtype bf16", option,
                dtype_name(compute));
}

}  // namespace sps
