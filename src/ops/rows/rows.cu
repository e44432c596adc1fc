// Rows on the GPU. All of it moves bytes once: a thread takes V numbers of a row at a time.
#include "ops/cuda.cuh"
#include "ops/rows/rows_kernels.h"

namespace sps::ops {

namespace {

constexpr int kThreads = 256;

// Numbers of one access: 8 where every row of every operand allows it (16 bytes of bf16, twice 16 of f32),
// else 1.
template <class... Tensors>
int vector_width(const Tensors&... tensors) {
  const bool wide = (rows_aligned(16, tensors) && ...) && ((tensors.cols % 8 == 0) && ...);
  return wide ? 8 : 1;
}

template <class F>
void with_width(int width, F&& f) {
  if (width == 8)
    f(std::integral_constant<int, 8>());
  else
    f(std::integral_constant<int, 1>());
}

// body(r, c): numbers c .. c + V - 1 of row r.
template <int V, class Body>
__global__ void __launch_bounds__(kThreads) each_element(int64_t rows, int64_t cols, Body body) {
  const int64_t per_row = cols / V, n = rows * per_row;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n; i += int64_t{gridDim.x} * kThreads)
    body(i / per_row, i % per_row * V);
}

template <int V, class Body>
void launch(const Exec& ex, const Tensor& y, Body body) {
  const int64_t blocks = ceil_div(y.rows * (y.cols / V), kThreads);
  each_element<V><<<grid_for(blocks, 16), kThreads, 0, stream_of(ex)>>>(y.rows, y.cols, body);
  SPS_LAUNCHED();
}

template <int V, class X, class Y>
struct Copy {
  const X* x;
  Y* y;
  int64_t x_step, y_step;
  __device__ void operator()(int64_t r, int64_t c) const {
    float v[V];
    load(x + r * x_step + c, v);
    store(y + r * y_step + c, v);
  }
};

template <int V, class A, class B, class Y>
struct Add {
  const A* a;
  const B* b;
  Y* y;
  int64_t a_step, b_step, y_step;
  __device__ void operator()(int64_t r, int64_t c) const {
    float v[V], w[V];
    load(a + r * a_step + c, v);
    load(b + r * b_step + c, w);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] += w[i];
    store(y + r * y_step + c, v);
  }
};

template <int V, class Y>
struct Fill {
  Y* y;
  int64_t y_step;
  float value;
  __device__ void operator()(int64_t r, int64_t c) const {
    float v[V];
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = value;
    store(y + r * y_step + c, v);
  }
};

int64_t row_step(const Tensor& t) {
  return t.rows == 1 ? 0 : t.stride;
}

// The sums of a strip of columns over one piece of the rows: lane c of a row of threads owns a column, the
// rows of threads take every kDeep-th row and are added in order.
constexpr int kDeep = 8, kPieceRows = 256;

template <class T>
__global__ void __launch_bounds__(kWarp* kDeep)
    sum_piece(const T* x, int64_t rows, int64_t cols, int64_t stride, float* partial) {
  const int64_t c = blockIdx.x * int64_t{kWarp} + threadIdx.x;
  const int64_t begin = blockIdx.y * int64_t{kPieceRows};
  const int64_t end = begin + kPieceRows < rows ? begin + kPieceRows : rows;
  float sum = 0;
  if (c < cols)
    for (int64_t r = begin + threadIdx.y; r < end; r += kDeep) sum += to_float(x[r * stride + c]);
  __shared__ float parts[kDeep][kWarp];
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || c >= cols) return;
  for (int i = 1; i < kDeep; ++i) sum += parts[i][threadIdx.x];
  partial[blockIdx.y * cols + c] = sum;
}

template <class T>
__global__ void add_pieces(const float* partial, int64_t pieces, int64_t cols, T* y) {
  const int64_t c = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (c >= cols) return;
  float sum = 0;
  for (int64_t i = 0; i < pieces; ++i) sum += partial[i * cols + c];
  y[c] = from_float<T>(to_float(y[c]) + sum);
}

}  // namespace

void copy_rows_cuda(const Exec& ex, Tensor x, Tensor y) {
  with_device_type(x.dtype, [&](auto tx) {
    with_device_type(y.dtype, [&](auto ty) {
      using X = decltype(tx);
      using Y = decltype(ty);
      with_width(vector_width(x, y), [&](auto width) {
        constexpr int V = decltype(width)::value;
        launch<V>(ex, y, Copy<V, X, Y>{x.as<X>(), y.as<Y>(), row_step(x), y.stride});
      });
    });
  });
}

void add_rows_cuda(const Exec& ex, Tensor a, Tensor b, Tensor y) {
  with_device_type(a.dtype, [&](auto ta) {
    with_device_type(b.dtype, [&](auto tb) {
      with_device_type(y.dtype, [&](auto ty) {
        using A = decltype(ta);
        using B = decltype(tb);
        using Y = decltype(ty);
        with_width(vector_width(a, b, y), [&](auto width) {
          constexpr int V = decltype(width)::value;
          launch<V>(ex, y, Add<V, A, B, Y>{a.as<A>(), b.as<B>(), y.as<Y>(), row_step(a), b.stride, y.stride});
        });
      });
    });
  });
}

void sum_rows_cuda(const Exec& ex, Tensor x, Tensor y) {
  const int64_t pieces = ceil_div(x.rows, kPieceRows);
  auto* partial = reinterpret_cast<float*>(
      device_scratch(ex, DeviceSlot::partial, size_t(pieces * x.cols) * sizeof(float)));
  with_device_type(x.dtype, [&](auto tx) {
    using X = decltype(tx);
    const dim3 grid(unsigned(ceil_div(x.cols, kWarp)), unsigned(pieces));
    sum_piece<<<grid, dim3(kWarp, kDeep), 0, stream_of(ex)>>>(x.as<X>(), x.rows, x.cols, x.stride, partial);
  });
  SPS_LAUNCHED();
  with_device_type(y.dtype, [&](auto ty) {
    using Y = decltype(ty);
    add_pieces<<<unsigned(ceil_div(x.cols, kThreads)), kThreads, 0, stream_of(ex)>>>(partial, pieces, x.cols,
                                                                                     y.as<Y>());
  });
  SPS_LAUNCHED();
}

void fill_cuda(const Exec& ex, Tensor y, float value) {
  if (value == 0 && y.dense()) {  // all bits zero in every dtype
    SPS_CUDA(cudaMemsetAsync(y.data, 0, size_t(y.count()) * dtype_size(y.dtype), stream_of(ex)));
    return;
  }
  with_device_type(y.dtype, [&](auto ty) {
    using Y = decltype(ty);
    with_width(vector_width(y), [&](auto width) {
      constexpr int V = decltype(width)::value;
      launch<V>(ex, y, Fill<V, Y>{y.as<Y>(), y.stride, value});
    });
  });
}

}  // namespace sps::ops
