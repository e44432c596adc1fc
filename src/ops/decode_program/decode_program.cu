// The list of stages, and the launch.
#include <algorithm>
#include <vector>

#include "ops/decode_program/decode_program_cuda.h"
#include "ops/decode_program/decode_program_kernel.cuh"
#include "tensor/memory.h"

namespace sps::ops::decode_program {

namespace {

template <int D>
__global__ void __launch_bounds__(kThreads, 1) program_kernel(const __grid_constant__ Program program) {
  extern __shared__ __align__(128) unsigned char memory[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  run_program<D>(program, memory);
#endif
}

constexpr int kMostWork = 96 << 10,
              kMostAttention = 80 << 10;  // bytes of a block that rows, and attention, may take

// Bytes, in whole lines.
int rounded_up(int bytes) {
  return (bytes + 127) / 128 * 128;
}

// Calls f with the widest heads of the kernel that serves these, 0 for none.
template <class F>
void with_head_dim(int head_dim, F&& f) {
  if (head_dim == 0) return f.template operator()<0>();
  if (head_dim <= 64) return f.template operator()<64>();
  if (head_dim <= 96) return f.template operator()<96>();
  f.template operator()<128>();
}

class List final : public GpuList {
 public:
  List(const Exec& ex, int64_t most_stages)
      : ex_(ex),
        most_(size_t(most_stages)),
        records_(most_ * sizeof(Record), Memory::device),
        // A launch has a counter more than stages, and at least one stage.
        counters_(2 * most_ * kCounterStep * sizeof(unsigned), Memory::device) {}

  bool add(const DecodeCall& call) override {
    const DecodeRows& x = call.x;
    if (list_.size() == most_ || call.w.dtype != DType::bf16 || x.rows() > kMostRows) return false;
    if (!rows_aligned(16, x.x, call.w) || (x.gain && !rows_aligned(16, x.gain))) return false;
    if (call.w.rows == 0 || call.w.rows > INT32_MAX / 2 || call.w.cols > INT32_MAX / 64) return false;
    Stage s;
    s.product = decode_product::make_product<bf16>(call);
    Product<bf16>& p = s.product;
    s.parts = decode_product::parts_of(p.k), s.chunks = int(ceil_div(p.k, kChunk));
    s.pieces = int(ceil_div(s.chunks, kPieceChunks)), s.piece_chunks = int(ceil_div(s.chunks, s.pieces));
    s.pieces = int(ceil_div(s.chunks, s.piece_chunks));
    const int tile_sums = s.parts * p.rows * kFeatures * int(sizeof(float)),
              halves = p.end == DecodeEnd::swiglu ? 2 : 1;
    s.batch = kSumsBytes / (tile_sums * halves);
    p.tiles = int(ceil_div(p.outputs, kFeatures));
    const int64_t floats = p.gain != nullptr ? int64_t{4} * p.k : 0,
                  work = p.rows * (row_step(s.chunks) + floats),
                  piece = std::max<int64_t>(kFeatures * row_step(s.piece_chunks), floats);
    if (work > kMostWork || ring_beside(kMostWork + kMostAttention) < 2 * piece) return false;
    work_ = std::max(work_, rounded_up(int(work)));

    const int blocks = gpu_info().multiprocessors;
    s.first_block = next_block_, s.awaited = arrivals_;
    next_block_ = (next_block_ + p.tiles) % blocks, arrivals_ = std::min(p.tiles, blocks);
    list_.push_back({s, {}, {}});
    return true;
  }

  bool add(const decode::Problem& p) override {
    if (list_.size() == most_ || p.runs == 0) return false;
    const decode::Partials partials = decode::partials_of(ex_, p);
    const int64_t items = int64_t{partials.count} * p.most_items;
    if (items > INT32_MAX) return false;
    int dim = 0, warps = 0;
    with_head_dim(p.head_dim, [&]<int D>() {
      const int most = std::min(kWorkers, kMostAttention / std::max(attention_bytes<D>(1), 1));
      dim = D, warps = int(std::clamp<int64_t>(ceil_div(items, gpu_info().multiprocessors), 1, most));
    });
    if (head_dim_ != 0 && head_dim_ != dim) launch();
    head_dim_ = dim, attention_warps_ = std::max(attention_warps_, warps);
    Stage s;
    s.attends = true, s.awaited = arrivals_;
    arrivals_ = partials.count;
    list_.push_back({s, p, partials});
    return true;
  }

  void launch() override {
    const size_t stages = list_.size() - launched_;
    if (stages == 0) return;
    Program program;
    program.records = reinterpret_cast<const Record*>(records_.data()) + launched_;
    // Each launch before has a counter of its own behind those of its stages.
    program.counters = reinterpret_cast<unsigned*>(counters_.data()) + (launched_ + launches_) * kCounterStep;
    program.stages = int32_t(stages);
    program.work_bytes = work_, program.attention_warps = attention_warps_;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(gpu_info().multiprocessors)), config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = size_t(decode_product::most_shared()), config.stream = stream_of(ex_);
    cudaLaunchAttribute together{};
    together.id = cudaLaunchAttributeCooperative, together.val.cooperative = 1;
    config.attrs = &together, config.numAttrs = 1;
    with_head_dim(head_dim_, [&]<int D>() {
      program.ring_bytes = ring_beside(work_ + attention_bytes<D>(attention_warps_));
      SPS_CUDA(cudaFuncSetAttribute(program_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    decode_product::most_shared()));
      SPS_CUDA(cudaLaunchKernelEx(&config, program_kernel<D>, program));
    });
    launched_ = list_.size(), ++launches_;
    work_ = arrivals_ = head_dim_ = attention_warps_ = 0;
  }

  void upload() override {
    SPS_CHECK(launched_ == list_.size());
    copy_bytes(ex_, records_.data(), list_.data(), list_.size() * sizeof(Record));
    synchronize(ex_);
  }

 private:
  static int ring_beside(int bytes) {
    return (decode_product::most_shared() - rounded_up(int(sizeof(Rest))) - bytes) / 128 * 128;
  }

  Exec ex_;
  size_t most_;
  std::vector<Record> list_;
  size_t launched_ = 0, launches_ = 0;  // stages; kernels
  int work_ = 0;                        // bytes, of the stages that wait for their launch
  int next_block_ = 0, arrivals_ = 0;
  int head_dim_ = 0, attention_warps_ = 0;
  Bytes records_, counters_;
};

}  // namespace

bool usable_cuda() {
#ifdef SPS_HAS_HOPPER
  return gpu_info().major == 9;
#else
  return false;
#endif
}

std::unique_ptr<GpuList> make_list_cuda(const Exec& ex, int64_t most_stages) {
  return std::make_unique<List>(ex, most_stages);
}

}  // namespace sps::ops::decode_program
