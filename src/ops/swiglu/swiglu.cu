#include "ops/rowwise.cuh"
#include "ops/swiglu/swiglu_kernels.h"

namespace sps::ops {

namespace {

// In f32 to the last bits. For bf16 results the fast exponential and reciprocal are ample, and the exact ones
// would take longer than the memory does.
template <class Act>
__device__ float sigmoid(float z) {
  if constexpr (std::is_same_v<Act, float>)
    return 1 / (1 + expf(-z));
  else
    return __fdividef(1, 1 + __expf(-z));
}

template <class Act>
struct Forward {
  Rows<const Act> gate_up;
  Rows<Act> h;
  int64_t width;

  template <int kWidth>
  struct Loaded {
    float gate[kWidth], up[kWidth];
  };
  template <int kWidth>
  __device__ void read(int64_t r, int64_t c, bool live, Loaded<kWidth>& in) const {
    load_if(live, gate_up[r] + c, in.gate);
    load_if(live, gate_up[r] + width + c, in.up);
  }
  template <int kWidth>
  __device__ void write(int64_t r, int64_t c, Loaded<kWidth>& in) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) in.up[j] *= in.gate[j] * sigmoid<Act>(in.gate[j]);
    store(h[r] + c, in.up);
  }
};

template <class Act>
struct Backward {
  Rows<const Act> gate_up, dh;
  Rows<Act> d_gate_up, h;  // h absent: not wanted
  int64_t width;

  template <int kWidth>
  struct Loaded {
    float gate[kWidth], up[kWidth], dh[kWidth];
  };
  template <int kWidth>
  __device__ void read(int64_t r, int64_t c, bool live, Loaded<kWidth>& in) const {
    load_if(live, gate_up[r] + c, in.gate);
    load_if(live, gate_up[r] + width + c, in.up);
    load_if(live, dh[r] + c, in.dh);
  }
  template <int kWidth>
  __device__ void write(int64_t r, int64_t c, Loaded<kWidth>& in) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float gate = in.gate[j], s = sigmoid<Act>(gate), ds = in.dh[j] * s;
      in.dh[j] = in.up[j] * (gate * s);  // the forward pass's product, in its order
      in.gate[j] = ds * in.up[j] * (1 + gate * (1 - s));
      in.up[j] = ds * gate;
    }
    if (h.data != nullptr) store(h[r] + c, in.dh);
    store(d_gate_up[r] + c, in.gate);
    store(d_gate_up[r] + width + c, in.up);
  }
};

}  // namespace

void swiglu_forward_cuda(const Exec& ex, Tensor gate_up, Tensor h) {
  with_device_type(h.dtype, [&](auto zero) {
    using Act = decltype(zero);
    elementwise(ex, Forward<Act>{rows_of<const Act>(gate_up), rows_of<Act>(h), h.cols}, h.rows, h.cols,
                in_pieces({gate_up, h}));
  });
}

void swiglu_backward_cuda(const Exec& ex, Tensor gate_up, Tensor dh, Tensor d_gate_up, Tensor h) {
  with_device_type(dh.dtype, [&](auto zero) {
    using Act = decltype(zero);
    elementwise(ex,
                Backward<Act>{rows_of<const Act>(gate_up), rows_of<const Act>(dh), rows_of<Act>(d_gate_up),
                              rows_of<Act>(h), dh.cols},
                dh.rows, dh.cols, in_pieces({gate_up, dh, d_gate_up, h}));
  });
}

}  // namespace sps::ops
