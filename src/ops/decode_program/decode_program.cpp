#include "ops/decode_program/decode_program.h"

#include "ops/decode_program/decode_program_cuda.h"
#include "tensor/device.h"

namespace sps::ops {

struct DecodeProgram::List {
  std::unique_ptr<decode_program::GpuList> gpu;
};

bool DecodeProgram::usable([[maybe_unused]] const Exec& ex) {
  if constexpr (kCudaBuilt) return ex.device == Device::cuda && decode_program::usable_cuda();
  return false;
}

DecodeProgram::DecodeProgram(const Exec& ex, [[maybe_unused]] int64_t most_stages)
    : list_(std::make_unique<List>()) {
  SPS_CHECK(usable(ex));
  if constexpr (kCudaBuilt) list_->gpu = decode_program::make_list_cuda(ex, most_stages);
}
DecodeProgram::~DecodeProgram() = default;
DecodeProgram::DecodeProgram(DecodeProgram&&) noexcept = default;
DecodeProgram& DecodeProgram::operator=(DecodeProgram&&) noexcept = default;

bool DecodeProgram::linear(const DecodeRows& x, Tensor w, Tensor y, Tensor rest) {
  SPS_CHECK(x.x.cols == w.cols && y.rows == x.rows() && y.cols + rest.cols == w.rows);
  return list_->gpu->add({x, w, y, rest});
}

bool DecodeProgram::linear_swiglu(const DecodeRows& x, Tensor w, Tensor h) {
  SPS_CHECK(x.x.cols == w.cols && h.rows == x.rows() && 2 * h.cols == w.rows);
  return list_->gpu->add({x, w, h, {}, DecodeEnd::swiglu});
}

bool DecodeProgram::linear_add(Tensor x, Tensor w, Tensor s) {
  SPS_CHECK(x.cols == w.cols && s.rows == x.rows && s.cols == w.rows && s.dtype == DType::f32);
  return list_->gpu->add({x, w, s, {}, DecodeEnd::add});
}

bool DecodeProgram::attention(const DecodeShape& shape, const DecodeStep& step,
                              const std::array<DecodeQueries, kMaxQueryStreams>& queries,
                              const std::array<DecodeKeys, kMaxKeySets>& keys,
                              const DecodeRotation& rotation) {
  if constexpr (kCudaBuilt) {
    const auto problem = decode::rotated_problem(shape, step, queries, keys, rotation);
    return problem && list_->gpu->add(*problem);
  }
  return false;
}

void DecodeProgram::launch() {
  list_->gpu->launch();
}

void DecodeProgram::upload() {
  list_->gpu->upload();
}

}  // namespace sps::ops
