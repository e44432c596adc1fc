#include "ops/linear/cublas.h"

#ifdef SPS_HAS_CUDA

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "ops/linear/cublas_workspace.h"
#include "tensor/cuda.h"
#include "tensor/memory.h"

namespace sps::ops {

namespace {

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail("cuBLASLt failed to {}: {}", what, cublasLtGetStatusString(status));
}

constexpr size_t kCacheLimit = 4096;  // as on the CPU: a model uses some dozens of shapes
constexpr int kMostProposals = 8;
constexpr int kTimedRuns = 5;
constexpr float kWorthwhile = 0.98F;  // share of the time below which a later proposal is taken

bool tuning = false;

cublasLtHandle_t handle() {
  static const cublasLtHandle_t one = [] {
    cublasLtHandle_t made = nullptr;
    check(cublasLtCreate(&made), "start");
    return made;
  }();
  return one;
}

cudaDataType_t cuda_type(DType type) {
  return type == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

template <auto destroy>
struct Destroy {
  template <class T>
  void operator()(T* p) const {
    destroy(p);
  }
};
using Product = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreferenceDestroy>>;
using Event = std::unique_ptr<CUevent_st, Destroy<cudaEventDestroy>>;

Layout make_layout(DType type, int64_t rows, int64_t cols, int64_t ld) {
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, cuda_type(type), uint64_t(rows), uint64_t(cols), ld),
        "describe a matrix");
  return Layout(made);
}

template <class T>
void set_preference(const Preference& preference, cublasLtMatmulPreferenceAttributes_t which, T value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), which, &value, sizeof(value)),
        "take a preference");
}

Event make_event() {
  cudaEvent_t made = nullptr;
  SPS_CUDA(cudaEventCreate(&made));
  return Event(made);
}

class Plan {
 public:
  explicit Plan(const CublasShape& shape);

  bool possible() const { return !proposals_.empty(); }
  void run(const CublasCall& call, void* workspace, cudaStream_t stream) const {
    launch(call, proposals_[taken_], call.result, workspace, stream);
  }
  void tune(const CublasCall& call, void* workspace, cudaStream_t stream);
  std::string line() const;

 private:
  void launch(const CublasCall& call, const cublasLtMatmulHeuristicResult_t& proposal, void* result,
              void* workspace, cudaStream_t stream) const;

  CublasShape shape_;
  Product product_;
  Layout first_, second_, result_;
  std::vector<cublasLtMatmulHeuristicResult_t> proposals_;
  std::vector<float> milliseconds_;  // of the proposals, where they were timed
  size_t taken_ = 0;
};

Plan::Plan(const CublasShape& s) : shape_(s) {
  cublasLtMatmulDesc_t product = nullptr;
  // Plain f32 arithmetic for f32 operands; products of bf16 are summed in f32.
  check(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe a product");
  product_.reset(product);
  const auto transpose = [&](cublasLtMatmulDescAttributes_t which, bool transposed) {
    const cublasOperation_t op = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(product, which, &op, sizeof(op)), "transpose");
  };
  transpose(CUBLASLT_MATMUL_DESC_TRANSA, s.first_transposed);
  transpose(CUBLASLT_MATMUL_DESC_TRANSB, s.second_transposed);
  first_ = s.first_transposed ? make_layout(s.act, s.k, s.m, s.first_ld)
                              : make_layout(s.act, s.m, s.k, s.first_ld);
  second_ = s.second_transposed ? make_layout(s.act, s.n, s.k, s.second_ld)
                                : make_layout(s.act, s.k, s.n, s.second_ld);
  result_ = make_layout(s.out, s.m, s.n, s.result_ld);

  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), "take preferences");
  const Preference preference(made);
  set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(kCublasWorkspaceBytes));
  // Partial sums, if any, in f32 and added by a kernel of their own: the same order every time.
  set_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                 uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(s.first_alignment));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(s.second_alignment));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(s.result_alignment));
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(s.result_alignment));
  proposals_.resize(kMostProposals);
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle(), product_.get(), first_.get(), second_.get(), result_.get(), result_.get(), preference.get(),
      kMostProposals, proposals_.data(), &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED)
    found = 0;
  else
    check(status, "propose algorithms");
  proposals_.resize(size_t(found));
  std::erase_if(proposals_, [](const auto& p) { return p.state != CUBLAS_STATUS_SUCCESS; });
}

void Plan::launch(const CublasCall& call, const cublasLtMatmulHeuristicResult_t& proposal, void* result,
                  void* workspace, cudaStream_t stream) const {
  const float alpha = 1, beta = shape_.accumulate ? 1 : 0;
  check(cublasLtMatmul(handle(), product_.get(), &alpha, call.first, first_.get(), call.second, second_.get(),
                       &beta, result, result_.get(), result, result_.get(), &proposal.algo, workspace,
                       proposal.workspaceSize, stream),
        "multiply");
}

void Plan::tune(const CublasCall& call, void* workspace, cudaStream_t stream) {
  const size_t bytes = size_t((shape_.n - 1) * shape_.result_ld + shape_.m) * dtype_size(shape_.out);
  const Bytes result(bytes, Memory::device);
  const Event begin = make_event(), end = make_event();
  milliseconds_.clear();
  for (const auto& proposal : proposals_) {
    launch(call, proposal, result.data(), workspace, stream);
    SPS_CUDA(cudaEventRecord(begin.get(), stream));
    for (int i = 0; i < kTimedRuns; ++i) launch(call, proposal, result.data(), workspace, stream);
    SPS_CUDA(cudaEventRecord(end.get(), stream));
    SPS_CUDA(cudaEventSynchronize(end.get()));
    float all = 0;
    SPS_CUDA(cudaEventElapsedTime(&all, begin.get(), end.get()));
    milliseconds_.push_back(all / float(kTimedRuns));
  }
  for (size_t i = 1; i < proposals_.size(); ++i)
    if (milliseconds_[i] < kWorthwhile * milliseconds_[taken_]) taken_ = i;
}

template <class T>
std::string config(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t which) {
  T value = 0;
  size_t written = 0;
  const auto status = cublasLtMatmulAlgoConfigGetAttribute(&algo, which, &value, sizeof(value), &written);
  return status == CUBLAS_STATUS_SUCCESS ? std::to_string(value)
                                         : "?";  // not every algorithm has all of them
}

std::string Plan::line() const {
  const CublasShape& s = shape_;
  std::string text = fmt::format(
      "{}x{}x{} {}{} {}->{} {} ld {},{},{} align {},{},{}", s.m, s.n, s.k, s.first_transposed ? 'T' : 'N',
      s.second_transposed ? 'T' : 'N', dtype_name(s.act), dtype_name(s.out), s.accumulate ? "+=" : "=",
      s.first_ld, s.second_ld, s.result_ld, s.first_alignment, s.second_alignment, s.result_alignment);
  if (!possible()) return text + ": none";
  const cublasLtMatmulHeuristicResult_t& taken = proposals_[taken_];
  text += fmt::format(
      ": proposal {} of {}, algorithm {} tile {} stages {} cluster {} split {} reduction {} workspace {}",
      taken_, proposals_.size(), config<int32_t>(taken.algo, CUBLASLT_ALGO_CONFIG_ID),
      config<uint32_t>(taken.algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
      config<uint32_t>(taken.algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
      config<uint16_t>(taken.algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
      config<int32_t>(taken.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
      config<uint32_t>(taken.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME), taken.workspaceSize);
  for (const float ms : milliseconds_) text += fmt::format(" {:.4f} ms", ms);
  return text;
}

// Never destroyed: at exit the driver may be gone before it.
struct Plans {
  std::mutex mutex;
  std::map<CublasShape, std::unique_ptr<Plan>> of;
};
Plans& plans() {
  static auto* const all = new Plans;
  return *all;
}

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  SPS_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

bool run_cublas(const Exec& ex, const CublasCall& call) {
  const cudaStream_t stream = stream_of(ex);
  void* workspace = device_scratch(ex, DeviceSlot::workspace, kCublasWorkspaceBytes);
  Plans& all = plans();
  const std::lock_guard lock(all.mutex);  // held during the launch too: the workspace is one
  // A plan that was made again could be tuned to something else.
  if (all.of.size() >= kCacheLimit && !tuning && !all.of.contains(call.shape)) all.of.clear();
  std::unique_ptr<Plan>& plan = all.of[call.shape];
  if (!plan) {
    plan = std::make_unique<Plan>(call.shape);
    if (tuning && !capturing(stream)) plan->tune(call, workspace, stream);
  }
  if (!plan->possible()) return false;
  plan->run(call, workspace, stream);
  return true;
}

void tune_cublas(bool on) {
  const std::lock_guard lock(plans().mutex);
  tuning = on;
}

std::vector<std::string> cublas_plans() {
  Plans& all = plans();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> lines;
  for (const auto& [shape, plan] : all.of)
    if (plan) lines.push_back(plan->line());
  return lines;
}

}  // namespace sps::ops

#endif
