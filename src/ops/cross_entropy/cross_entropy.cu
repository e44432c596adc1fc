// A chunk's logits are made in f32, one kernel turns them into the loss and d_logits in the act dtype, and dx
// and dw are products over a group of chunks (head_cuts.h).
//
// The kernel reads logits once: 200 KB of a row of 50 thousand wait in shared memory for the row's maximum
// and sum. Blocks stay and take row after row, and while a row's gradients are written, the next row is
// fetched into the places that become free: every place belongs to one thread, so only the sums need a
// barrier. What does not fit in shared memory is read again.
//
// Bytes of a row in bf16: 4 vocab written by the product, 4 + 2 vocab read and written here, 2 + 2 vocab read
// for dx and dw. At 768 columns the products' 6 * 768 operations a logit take about twice the time of those
// 14 bytes on an H200.
#include <algorithm>
#include <cmath>

#include "ops/cross_entropy/cross_entropy_kernels.h"
#include "ops/cross_entropy/head_cuts.h"
#include "ops/cuda.cuh"
#include "ops/linear/linear_kernels.h"

namespace sps::ops {

namespace {

constexpr int kMostThreads = 1024;
constexpr int kParts = 4;  // of a row in shared memory; each may be read while later ones arrive
constexpr int kAhead = 4;  // loads in flight of what does not wait in shared memory
constexpr float kLog2E = 1.4426950408889634F;

// ---- asynchronous copies of 16 bytes; a thread sees its own once it has waited for them

__device__ __forceinline__ void fetch_16(float4* to, const float* from) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void end_of_part() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLatest>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
}

// ---- a row's maximum and its sum of exp(logit - maximum), kept while the maximum grows

__device__ __forceinline__ float exp_of(float difference) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(difference * kLog2E));
  return result;
}

struct Softmax {
  float most = -INFINITY;
  float sum = 0;

  // What exponents are relative to: while nothing finite was seen, infinities must not cancel to NaN.
  __device__ __forceinline__ static float base_of(float most) { return most == -INFINITY ? 0.0F : most; }

  // NaN does not raise the maximum, and makes the sum NaN.
  __device__ __forceinline__ void add(float4 v) {
    const float top = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    if (top > most) {
      sum *= exp_of(most - top);
      most = top;
    }
    const float base = base_of(most);
    sum += (exp_of(v.x - base) + exp_of(v.y - base)) + (exp_of(v.z - base) + exp_of(v.w - base));
  }
  // All lanes get the warp's; the same additions in every lane and every run.
  __device__ __forceinline__ Softmax of_warp() const {
    Softmax all;
    all.most = warp_max(most);
    all.sum = warp_sum(sum * exp_of(most - base_of(all.most)));
    return all;
  }
};

// All threads get the block's. `exchange` holds a value for each warp.
__device__ __forceinline__ Softmax of_block(const Softmax& own, float2* exchange) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
  const Softmax mine = own.of_warp();
  if (lane == 0) exchange[warp] = {mine.most, mine.sum};
  __syncthreads();
  Softmax all;
  if (lane < warps) all = {exchange[lane].x, exchange[lane].y};
  return all.of_warp();
}

// Four gradients in one store that other data outlives in the cache: the products read them much later.
// Written with intrinsics since the compiler cuts an ordinary store of a struct here.
__device__ __forceinline__ void store_4(float* to, const float (&d)[4]) {
  __stcs(reinterpret_cast<float4*>(to), make_float4(d[0], d[1], d[2], d[3]));
}
__device__ __forceinline__ void store_4(bf16* to, const float (&d)[4]) {
  const auto two = [](float low, float high) {
    return unsigned{from_float<bf16>(low).bits} | unsigned{from_float<bf16>(high).bits} << 16;
  };
  __stcs(reinterpret_cast<uint2*>(to), make_uint2(two(d[0], d[1]), two(d[2], d[3])));
}

struct Rows {
  const float* logits;
  int64_t stride;  // of logits and d_logits
  int64_t rows;
  int vocab;
  const int32_t* targets;
  float* nll;
  int64_t nll_stride;
  const float* scale;
  int kept;  // units of 4 logits that wait in shared memory: all, or a multiple of the threads
};

template <class T, bool kTrain>
__global__ void __launch_bounds__(kMostThreads, 1) loss_of_rows(Rows r, T* d_logits) {
  extern __shared__ float4 kept[];
  __shared__ float2 exchange[2][kMostThreads / kWarp];  // by turns: a warp may be a row ahead of another
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  const int units = (r.vocab + 3) / 4;
  const int part = (r.kept + kParts * threads - 1) / (kParts * threads) * threads;

  // A target that is not of the vocabulary makes the loss NaN: that ends a run, where its value cannot be
  // checked.
  const auto target_of = [&](int64_t row) { return row < r.rows ? r.targets[row] : -1; };
  const auto scored = [&](int target) { return unsigned(target) < unsigned(r.vocab); };
  const auto for_part = [&](int p, auto&& body) {
    const int end = min(r.kept, (p + 1) * part);
    for (int u = p * part + thread; u < end; u += threads) body(u);
  };
  const auto for_parts = [&](auto&& body) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) body(p);
  };
  // The last unit may reach past the vocabulary.
  const auto within = [&](float4 v, int u) {
    const int over = 4 * u + 4 - r.vocab;
    if (over > 0) {
      v.w = -INFINITY;
      if (over > 1) v.z = -INFINITY;
      if (over > 2) v.y = -INFINITY;
    }
    return v;
  };
  const auto load_unit = [&](const float* row, int u) {
    return within(reinterpret_cast<const float4*>(row)[u], u);
  };

  int64_t row = blockIdx.x;
  int target = target_of(row), turn = 0;
  for_parts([&](int p) {
    if (scored(target)) for_part(p, [&](int u) { fetch_16(kept + u, r.logits + row * r.stride + 4 * u); });
    end_of_part();
  });
  while (row < r.rows) {
    const float* logits = r.logits + row * r.stride;
    T* gradient = kTrain ? d_logits + row * r.stride : nullptr;
    const int64_t next = row + gridDim.x;
    const int next_target = target_of(next);
    const float* next_logits = r.logits + next * r.stride;
    const bool fetch = scored(next_target);

    if (!scored(target)) {
      if (thread == 0) r.nll[row * r.nll_stride] = target < 0 ? 0.0F : NAN;
      if (kTrain)
        for (int u = thread; u < units; u += threads) store_4(gradient + 4 * u, {0.0F, 0.0F, 0.0F, 0.0F});
      for_parts([&](int p) {
        if (fetch) for_part(p, [&](int u) { fetch_16(kept + u, next_logits + 4 * u); });
        end_of_part();
      });
    } else {
      const float target_logit = thread == 0 ? logits[target] : 0.0F;
      Softmax own;
      const auto add_part = [&](int p) { for_part(p, [&](int u) { own.add(within(kept[u], u)); }); };
      wait_for_all_but<3>(), add_part(0);
      wait_for_all_but<2>(), add_part(1);
      wait_for_all_but<1>(), add_part(2);
      wait_for_all_but<0>(), add_part(3);
      int u = r.kept + thread;
      for (; u + (kAhead - 1) * threads < units; u += kAhead * threads) {
        float4 v[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) v[i] = load_unit(logits, u + i * threads);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) own.add(v[i]);
      }
      for (; u < units; u += threads) own.add(load_unit(logits, u));
      const Softmax all = of_block(own, exchange[turn]);
      turn ^= 1;
      // The difference first: large logits then cost no digits.
      if (thread == 0) r.nll[row * r.nll_stride] = logf(all.sum) + (all.most - target_logit);

      if (kTrain) {
        const float scale = *r.scale, base = Softmax::base_of(all.most), factor = scale / all.sum;
        const auto write = [&](int unit, float4 v) {
          float d[4] = {factor * exp_of(v.x - base), factor * exp_of(v.y - base), factor * exp_of(v.z - base),
                        factor * exp_of(v.w - base)};
#pragma unroll
          for (int i = 0; i < 4; ++i) d[i] -= 4 * unit + i == target ? scale : 0.0F;
          store_4(gradient + 4 * unit, d);
        };
        for_parts([&](int p) {
          for_part(p, [&](int unit) {
            write(unit, within(kept[unit], unit));
            if (fetch) fetch_16(kept + unit, next_logits + 4 * unit);
          });
          end_of_part();
        });
        for (int unit = r.kept + thread; unit < units; unit += threads) write(unit, load_unit(logits, unit));
      }
    }
    row = next, target = next_target;
  }
}

// ---- launching it

template <class T, bool kTrain>
void launch(const Exec& ex, Rows r, T* d_logits) {
  const auto kernel = loss_of_rows<T, kTrain>;
  int device = 0, most_shared = 0, blocks = 0;
  SPS_CUDA(cudaGetDevice(&device));
  SPS_CUDA(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int units = (r.vocab + 3) / 4;
  // Where nothing waits in shared memory, two blocks on a multiprocessor hide each other's barriers.
  const int threads =
      std::clamp(int(ceil_div(units / 8, kWarp)) * kWarp, 64, kTrain ? kMostThreads : kMostThreads / 2);
  size_t shared = 0;
  r.kept = 0;
  if (kTrain) {
    cudaFuncAttributes attributes;
    SPS_CUDA(cudaFuncGetAttributes(&attributes, kernel));
    const int fitting = (most_shared - int(attributes.sharedSizeBytes)) / int(sizeof(float4));
    r.kept = units <= fitting ? units : fitting / threads * threads;
    shared = size_t(r.kept) * sizeof(float4);
    SPS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  }
  SPS_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared));
  const int64_t grid = std::min<int64_t>(r.rows, int64_t(blocks) * gpu_info().multiprocessors);
  kernel<<<unsigned(grid), threads, shared, stream_of(ex)>>>(r, d_logits);
  SPS_LAUNCHED();
}

template <class T>
void head_loss_of(const Exec& ex, const HeadLoss& l) {
  const int64_t rows = l.x.rows, vocab = l.w.rows;
  const HeadCuts cuts = head_cuts(rows, vocab, l.x.dtype, l.train);
  const float* scale = l.train ? l.scale.as<float>() : nullptr;
  std::byte* scratch = device_scratch(ex, DeviceSlot::rows, head_scratch_bytes(cuts, l.x.dtype, l.train));
  auto* logits = reinterpret_cast<float*>(scratch);
  auto* d_logits = l.train ? reinterpret_cast<T*>(scratch + head_logits_bytes(cuts)) : nullptr;
  const auto matrix = [&](auto* data, int64_t n) {
    return Tensor{data, n, vocab, cuts.stride, dtype_of<std::remove_pointer_t<decltype(data)>>, Device::cuda};
  };

  for (int64_t begin = 0; begin < rows; begin += cuts.group) {
    const int64_t in_group = std::min(cuts.group, rows - begin);
    for (int64_t first = 0; first < in_group; first += cuts.chunk) {
      const int64_t n = std::min(cuts.chunk, in_group - first), row = begin + first;
      product_cuda(ex, l.x.rows_from(row, n), Transposed::no, l.w, Transposed::yes, matrix(logits, n),
                   Accumulate::no);
      const Rows r{logits,       cuts.stride, n, int(vocab), l.targets.data() + row, l.nll.row<float>(row),
                   l.nll.stride, scale,       0};
      if (l.train)
        launch<T, true>(ex, r, d_logits + first * cuts.stride);
      else
        launch<T, false>(ex, r, static_cast<T*>(nullptr));
    }
    if (!l.train) continue;
    const Tensor d = matrix(d_logits, in_group);
    product_cuda(ex, d, Transposed::no, l.w, Transposed::no, l.dx.rows_from(begin, in_group), Accumulate::no);
    product_cuda(ex, d, Transposed::yes, l.x.rows_from(begin, in_group), Transposed::no, l.dw,
                 Accumulate::yes);
  }
}

}  // namespace

void head_loss_cuda(const Exec& ex, const HeadLoss& loss) {
  if (loss.x.dtype == DType::bf16)
    head_loss_of<bf16>(ex, loss);
  else
    head_loss_of<float>(ex, loss);
}

}  // namespace sps::ops
