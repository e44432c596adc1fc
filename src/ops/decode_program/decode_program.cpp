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

DecodeProgram::DecodeProgram(const Exec& ex, [[maybe_unused]] int64_t most_stages, [[maybe_unused]] bool mail)
    : list_(std::make_unique<List>()) {
  SPS_CHECK(usable(ex));
  if constexpr (kCudaBuilt) list_->gpu = decode_program::make_list_cuda(ex, most_stages, mail);
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
    std::vector<Tensor> reads, writes;
    const auto list = [](std::vector<Tensor>& to, const Tensor& t) {
      if (t) to.push_back(t);
    };
    for (const DecodeQueries& q : queries) list(reads, q.q), list(writes, q.o);
    // Results of both streams that lie one behind the other are one.
    if (writes.size() == 2 && writes[0].stride == writes[1].stride && writes[0].cols == writes[1].cols &&
        writes[0].dtype == writes[1].dtype &&
        static_cast<const char*>(writes[0].data) +
                writes[0].rows * writes[0].stride * int64_t(dtype_size(writes[0].dtype)) ==
            static_cast<const char*>(writes[1].data)) {
      writes[0].rows += writes[1].rows;
      writes.pop_back();
    }
    for (const DecodeKeys& k : keys) list(reads, k.k), list(reads, k.v);
    for (const DecodeRotation::Set& set : rotation.set) list(writes, set.k);
    return problem && list_->gpu->add(*problem, std::move(reads), std::move(writes));
  }
  return false;
}

void DecodeProgram::launch() {
  list_->gpu->launch();
}

void DecodeProgram::upload() {
  list_->gpu->upload();
}

DecodeProgram::Launches DecodeProgram::launches() const {
  return list_->gpu->launches();
}

}  // namespace sps::ops
