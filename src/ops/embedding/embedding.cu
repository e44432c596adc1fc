#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "ops/embedding/embedding_kernels.h"
#include "ops/embedding/embedding_scratch.h"
#include "ops/rowwise.cuh"

namespace sps::ops {

namespace {

// Ids stand in the GPU's memory, where no one has looked at them: one outside the table ends the process at
// the next call of CUDA's.
__device__ int32_t checked(int32_t id, int64_t vocab) {
  if (id < 0 || id >= vocab) __trap();
  return id;
}

struct Forward {
  const int32_t* ids;
  int64_t vocab;
  Rows<const float> table;
  const float* vector;  // null: none
  Rows<float> y;

  template <int kWidth>
  struct Loaded {
    float v[kWidth], vector[kWidth];
  };
  template <int kWidth>
  __device__ void read(int64_t r, int64_t c, bool live, Loaded<kWidth>& in) const {
    load_if(live, table[live ? checked(ids[r], vocab) : 0] + c, in.v);
    load_if(live && vector != nullptr, vector + c, in.vector);
  }
  template <int kWidth>
  __device__ void write(int64_t r, int64_t c, Loaded<kWidth>& in) const {
    if (vector != nullptr) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) in.v[j] += in.vector[j];
    }
    store(y[r] + c, in.v);
  }
};

// Backward: rows sorted by id, equal ids in row order, are cut into lists of 32, however many ids a list has.
// A warp adds up its list's columns and gives every id that lies within the list its sum. What an id has in a
// list that it shares with the list before or after goes to `heads` (it began before) or `tails` (it begins
// here), and is added up list by list afterwards. So a frequent id costs no more than rare ones, and the
// order of additions depends on the ids alone.
constexpr int kList = int(kEmbeddingList);

struct Lists {
  const int32_t *ids, *rows;  // sorted
  int64_t count;
  int64_t d;
  Rows<const float> dy;
  Rows<float> dtable;
  float *heads, *tails;  // [lists, d]
  float* totals;         // [lists, d], of all ids; null: not wanted
};

__global__ void __launch_bounds__(256)
    number_rows_kernel(const int32_t* ids, int64_t count, int64_t vocab, int32_t* rows) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  checked(ids[i], vocab);
  rows[i] = int32_t(i);
}

// A block is one list, a warp 32 * kWidth of its columns.
template <int kWidth>
__global__ void __launch_bounds__(256) add_lists_kernel(const Lists p) {
  constexpr unsigned kAll = 0xFFFFFFFFU;
  constexpr int kAtOnce = 4;
  const int lane = int(threadIdx.x);
  const int64_t list = blockIdx.x, begin = list * kList;
  const int n = int(p.count - begin < kList ? p.count - begin : kList);
  const int64_t c = ((int64_t(blockIdx.y) * blockDim.y + threadIdx.y) * 32 + lane) * kWidth;
  const bool live = c < p.d;
  const int32_t id = lane < n ? p.ids[begin + lane] : -1, row = lane < n ? p.rows[begin + lane] : 0;
  const int32_t before = begin > 0 ? p.ids[begin - 1] : -1,
                after = begin + n < p.count ? p.ids[begin + n] : -1;
  bool began_before = __shfl_sync(kAll, id, 0) == before;
  float sum[kWidth] = {}, total[kWidth] = {};
  for (int first = 0; first < n; first += kAtOnce) {
    float dy[kAtOnce][kWidth], old[kAtOnce][kWidth];
    int32_t ids[kAtOnce];
    bool ends[kAtOnce], whole[kAtOnce];  // the id's last row of all; no other list has any of its rows
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j;
      ids[j] = __shfl_sync(kAll, id, i);
      const int32_t next = __shfl_sync(kAll, id, i + 1);
      ends[j] = i < n && ids[j] != (i + 1 < n ? next : after);
      whole[j] = ends[j] && !began_before;
      began_before = began_before && !ends[j];
      load_if(live && i < n, p.dy[__shfl_sync(kAll, row, i)] + c, dy[j]);
      load_if(live && whole[j], p.dtable[ids[j]] + c, old[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += dy[j][k], total[k] += dy[j][k];
      if (!ends[j]) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) old[j][k] += sum[k];
      if (live) store(whole[j] ? p.dtable[ids[j]] + c : p.heads + list * p.d + c, old[j]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] = 0;
    }
  }
  if (!live) return;
  if (p.totals != nullptr) store(p.totals + list * p.d + c, total);
  if (p.ids[begin + n - 1] == after) store((began_before ? p.heads : p.tails) + list * p.d + c, sum);
}

// The ids that go on from list to list: who finds that one begins in its list adds up what it has in all.
template <int kWidth>
__global__ void __launch_bounds__(256) join_lists_kernel(const Lists p) {
  const int64_t list = blockIdx.x, end = (list + 1) * kList;
  const int64_t c = ((int64_t(blockIdx.y) * blockDim.y + threadIdx.y) * 32 + threadIdx.x) * kWidth;
  if (end >= p.count || c >= p.d) return;
  const int32_t id = p.ids[end - 1];
  if (p.ids[end] != id || (list > 0 && p.ids[end - kList - 1] == id)) return;
  int64_t low = end + 1, high = p.count;  // where the next id begins
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (p.ids[middle] == id)
      low = middle + 1;
    else
      high = middle;
  }
  const int64_t last = (low - 1) / kList;
  float sum[kWidth];
  load(p.tails + list * p.d + c, sum);
#pragma unroll 8
  for (int64_t i = list + 1; i <= last; ++i) {
    float head[kWidth];
    load(p.heads + i * p.d + c, head);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] += head[k];
  }
  float old[kWidth];
  load(p.dtable[id] + c, old);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) old[k] += sum[k];
  store(p.dtable[id] + c, old);
}

// Pieces of one allocation, each aligned as the first; the same calls give sizes (from null) and places.
class Places {
 public:
  explicit Places(std::byte* from) : from_(from) {}
  template <class T>
  T* take(int64_t n) {
    const size_t at = used_;
    used_ += (size_t(n) * sizeof(T) + 255) / 256 * 256;
    return from_ == nullptr ? nullptr : reinterpret_cast<T*>(from_ + at);
  }
  size_t used() const { return used_; }

 private:
  std::byte* from_;
  size_t used_ = 0;
};

}  // namespace

void embedding_forward_cuda(const Exec& ex, std::span<const int32_t> ids, Tensor table, Tensor vector,
                            Tensor y) {
  elementwise(ex,
              Forward{ids.data(), table.rows, rows_of<const float>(table),
                      vector ? vector.as<float>() : nullptr, rows_of<float>(y)},
              y.rows, y.cols, in_pieces({table, vector, y}));
}

void embedding_backward_cuda(const Exec& ex, std::span<const int32_t> ids, Tensor dy, Tensor dtable,
                             Tensor dvector) {
  if (dy.empty()) return;
  const int64_t count = dy.rows, d = dy.cols, lists = (count + kList - 1) / kList;
  SPS_CHECK(count <= INT32_MAX);
  const int bits = std::max(1, int(std::bit_width(uint64_t(dtable.rows - 1))));
  const auto* keys = reinterpret_cast<const uint32_t*>(ids.data());
  size_t sort_bytes = 0;
  SPS_CUDA(cub::DeviceRadixSort::SortPairs(
      nullptr, sort_bytes, keys, static_cast<uint32_t*>(nullptr), static_cast<const int32_t*>(nullptr),
      static_cast<int32_t*>(nullptr), int(count), 0, bits, stream_of(ex)));
  int32_t *numbers, *rows;
  uint32_t* sorted;
  std::byte* sort_space;
  Lists lists_of{nullptr, nullptr, count,  d, rows_of<const float>(dy), rows_of<float>(dtable),
                 nullptr, nullptr, nullptr};
  const auto lay_out = [&](Places places) {
    numbers = places.take<int32_t>(count);
    rows = places.take<int32_t>(count);
    sorted = places.take<uint32_t>(count);
    sort_space = places.take<std::byte>(int64_t(sort_bytes));
    lists_of.heads = places.take<float>(lists * d);
    lists_of.tails = places.take<float>(lists * d);
    if (dvector) lists_of.totals = places.take<float>(lists * d);
    return places.used();
  };
  lay_out(Places(device_scratch(ex, DeviceSlot::partial, lay_out(Places(nullptr)))));
  lists_of.rows = rows;
  lists_of.ids = reinterpret_cast<const int32_t*>(sorted);

  number_rows_kernel<<<unsigned((count + 255) / 256), 256, 0, stream_of(ex)>>>(ids.data(), count, dtable.rows,
                                                                               numbers);
  SPS_LAUNCHED();
  SPS_CUDA(cub::DeviceRadixSort::SortPairs(sort_space, sort_bytes, keys, sorted, numbers, rows, int(count), 0,
                                           bits, stream_of(ex)));
  const bool pieces = in_pieces({dy, dtable});
  const auto run = [&]<int kWidth>() {
    const auto warps = unsigned((d + 32 * kWidth - 1) / (32 * kWidth));
    const dim3 block(32, std::min(warps, 8U)), grid(unsigned(lists), (warps + 7) / 8);
    add_lists_kernel<kWidth><<<grid, block, 0, stream_of(ex)>>>(lists_of);
    SPS_LAUNCHED();
    join_lists_kernel<kWidth><<<grid, block, 0, stream_of(ex)>>>(lists_of);
    SPS_LAUNCHED();
  };
  pieces ? run.template operator()<4>() : run.template operator()<1>();
  if (dvector) add_partials(ex, lists_of.totals, lists, d, dvector.as<float>());
}

}  // namespace sps::ops
