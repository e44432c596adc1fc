// For the tests of the op rooms: random matrices that own their memory, comparison with the double reference,
// and central differences. One case runs in f64, f32 and bf16: inputs are drawn once, rounded to the dtype
// under test, and the reference sees exactly those rounded numbers.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "base/threads.h"
#include "tensor/device.h"
#include "tensor/memory.h"

namespace sps::ops {

// A matrix with memory of its own, padded on the right to `stride` so that strided views are tested too.
class Matrix {
 public:
  Matrix() = default;
  Matrix(DType dtype, int64_t rows, int64_t cols, int64_t stride = 0)
      : bytes_(size_t(rows * (stride ? stride : cols)) * dtype_size(dtype) + 64) {
    t_ = Tensor{bytes_.data(), rows, cols, stride ? stride : cols, dtype, Device::cpu};
  }
  // A copy has memory of its own.
  Matrix(const Matrix& other) : bytes_(other.bytes_), t_(other.t_) { t_.data = bytes_.data(); }
  Matrix(Matrix&&) noexcept = default;
  Matrix& operator=(const Matrix& other) { return *this = Matrix(other); }
  Matrix& operator=(Matrix&&) noexcept = default;
  ~Matrix() = default;

  operator Tensor() const { return t_; }
  const Tensor& operator*() const { return t_; }
  const Tensor* operator->() const { return &t_; }

  double get(int64_t r, int64_t c) const {
    switch (t_.dtype) {
      case DType::f64:
        return t_.row<double>(r)[c];
      case DType::f32:
        return t_.row<float>(r)[c];
      case DType::bf16:
        return t_.row<bf16>(r)[c];
      case DType::i32:
        return t_.row<int32_t>(r)[c];
    }
    return 0;
  }
  void set(int64_t r, int64_t c, double v) const {
    switch (t_.dtype) {
      case DType::f64:
        t_.row<double>(r)[c] = v;
        break;
      case DType::f32:
        t_.row<float>(r)[c] = float(v);
        break;
      case DType::bf16:
        t_.row<bf16>(r)[c] = bf16(v);
        break;
      case DType::i32:
        t_.row<int32_t>(r)[c] = int32_t(v);
        break;
    }
  }
  // N(mean, std) from the named stream, rounded to the dtype.
  Matrix& randomise(uint64_t seed, std::string_view name, double std = 1, double mean = 0) {
    const Rng rng(seed, name);
    for (int64_t r = 0; r < t_.rows; ++r)
      for (int64_t c = 0; c < t_.cols; ++c) set(r, c, mean + std * rng.normal(uint64_t(r * t_.cols + c)));
    return *this;
  }
  Matrix& fill(double v) {
    for (int64_t r = 0; r < t_.rows; ++r)
      for (int64_t c = 0; c < t_.cols; ++c) set(r, c, v);
    return *this;
  }
  std::span<std::byte> whole() const { return {const_cast<std::byte*>(bytes_.data()), bytes_.size()}; }
  // The same numbers in another dtype (dense).
  Matrix to(DType dtype) const {
    Matrix m(dtype, t_.rows, t_.cols);
    for (int64_t r = 0; r < t_.rows; ++r)
      for (int64_t c = 0; c < t_.cols; ++c) m.set(r, c, get(r, c));
    return m;
  }

 private:
  std::vector<std::byte> bytes_;
  Tensor t_;
};

// The devices that this build and this machine can run an operation on.
inline std::vector<Device> test_devices() {
  return gpu_count() > 0 ? std::vector{Device::cpu, Device::cuda} : std::vector{Device::cpu};
}

// Every fast implementation there is.
struct Backend {
  Device device;
  DType dtype;
  std::string name() const {
    return std::string(dtype_name(dtype)) + (device == Device::cuda ? " on a GPU" : "");
  }
};
inline std::vector<Backend> fast_backends() {
  std::vector<Backend> all;
  for (const Device device : test_devices())
    for (const DType dtype : {DType::f32, DType::bf16}) all.push_back({device, dtype});
  return all;
}
// Those and the reference.
inline std::vector<Backend> all_backends() {
  std::vector<Backend> all = fast_backends();
  all.push_back({Device::cpu, DType::f64});
  return all;
}

// One call of an operation on a device, with operands that lie in host memory: `on(matrix)` is the tensor to
// pass. On a GPU it is a copy that goes back into the matrix (padding too) when the call is over, at the end
// of the scope of OnDevice; the same memory named twice is one copy. `on.ids(span)` does so for lists that
// are only read.
//   OnDevice on(device);
//   rmsnorm_forward(on.exec(), on(x), ..., on.ids(pick));
class OnDevice {
 public:
  explicit OnDevice(Device device = Device::cpu) : ex_(device == Device::cuda ? open_gpu() : Exec{}) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    for (const auto& [host, copy] : copies_)
      if (copy.back) copy_bytes(ex_, copy.host, copy.device.data(), copy.device.size());
    synchronize(ex_);
  }

  const Exec& exec() const { return ex_; }
  Tensor operator()(const Matrix& m) { return (*this)(*m, m.whole()); }
  // A view of a matrix's memory.
  Tensor operator()(Tensor view, std::span<std::byte> memory) {
    if (ex_.device == Device::cpu) return view;
    const auto* data = static_cast<const std::byte*>(view.data);
    SPS_CHECK(data >= memory.data() && data <= memory.data() + memory.size());
    view.data = copy(memory, true) + (data - memory.data());
    view.device = Device::cuda;
    return view;
  }
  std::span<const int32_t> ids(std::span<const int32_t> ids) {
    if (ex_.device == Device::cpu || ids.empty()) return ids;
    const std::span<const std::byte> bytes = std::as_bytes(ids);
    std::byte* on_device = copy({const_cast<std::byte*>(bytes.data()), bytes.size()}, false);
    return {reinterpret_cast<const int32_t*>(on_device), ids.size()};
  }

 private:
  struct Copy {
    std::byte* host;
    Bytes device;
    bool back;
  };
  std::byte* copy(std::span<std::byte> memory, bool back) {
    const auto [at, fresh] = copies_.try_emplace(memory.data());
    if (fresh) {
      at->second = {memory.data(), Bytes(memory.size(), Memory::device), back};
      copy_bytes(ex_, at->second.device.data(), memory.data(), memory.size());
    }
    return at->second.device.data();
  }

  Exec ex_;
  std::map<const std::byte*, Copy> copies_;
};

// Largest |got - want| over largest |want|; infinite if got is not finite where want is.
inline double relative_error(const Matrix& got, const Matrix& want) {
  EXPECT_EQ(got->rows, want->rows);
  EXPECT_EQ(got->cols, want->cols);
  double diff = 0, scale = 0;
  for (int64_t r = 0; r < want->rows; ++r)
    for (int64_t c = 0; c < want->cols; ++c) {
      const double g = got.get(r, c), w = want.get(r, c);
      if (g == w) continue;  // covers equal infinities
      if (!std::isfinite(g) || !std::isfinite(w)) return INFINITY;
      diff = std::max(diff, std::abs(g - w));
      scale = std::max(scale, std::abs(w));
    }
  for (int64_t r = 0; r < want->rows; ++r)
    for (int64_t c = 0; c < want->cols; ++c)
      if (std::isfinite(want.get(r, c))) scale = std::max(scale, std::abs(want.get(r, c)));
  return diff == 0 ? 0 : diff / std::max(scale, 1e-30);
}

// The larger of two differences; a NaN stays.
inline double worse(double most, double d) {
  return d > most || std::isnan(d) ? d : most;
}

// The stated tolerances: f32 keeps 2e-5 of the largest value after a few thousand additions; bf16 results are
// rounded once to 8 bits (half a unit is 2^-9 of the value) from f32 sums, with one more rounding for each
// bf16 intermediate.
inline double tolerance(DType dtype, double bf16_roundings = 1) {
  switch (dtype) {
    case DType::f64:
      return 1e-12;
    case DType::f32:
      return 2e-5;
    default:
      return 2e-5 + bf16_roundings * 0x1p-8;
  }
}

#define SPS_EXPECT_CLOSE(got, want, tol) \
  EXPECT_LE(::sps::ops::relative_error(got, want), tol) << "comparing " #got " with " #want

// Checks an analytic gradient (f64) of the scalar loss() with respect to x (f64) by central differences:
// every element up to `most`, then evenly spread ones. Error relative to the largest gradient entry must be
// within tol.
inline void expect_gradient(const std::function<double()>& loss, const Matrix& x, const Matrix& analytic,
                            const std::string& name, double tol = 1e-6, int64_t most = 200, double h = 1e-5) {
  ASSERT_EQ(x->dtype, DType::f64);
  double scale = 1e-8;
  for (int64_t r = 0; r < x->rows; ++r)
    for (int64_t c = 0; c < x->cols; ++c) scale = std::max(scale, std::abs(analytic.get(r, c)));
  const int64_t n = x->count(), step = std::max<int64_t>(1, n / most);
  for (int64_t i = 0; i < n; i += step) {
    const int64_t r = i / x->cols, c = i % x->cols;
    const double keep = x.get(r, c);
    x.set(r, c, keep + h);
    const double up = loss();
    x.set(r, c, keep - h);
    const double down = loss();
    x.set(r, c, keep);
    const double numeric = (up - down) / (2 * h);
    ASSERT_NEAR(analytic.get(r, c) / scale, numeric / scale, tol) << name << " [" << r << ", " << c << "]";
  }
}

// The bytes of a matrix without its padding, to compare results bit by bit.
inline std::string bits(const Matrix& m) {
  const size_t size = dtype_size(m->dtype);
  std::string all;
  for (int64_t r = 0; r < m->rows; ++r)
    all.append(static_cast<const char*>(m->data) + size_t(r * m->stride) * size, size_t(m->cols) * size);
  return all;
}

// run() computes something from scratch and returns its bits().
inline void expect_same_bits_for_any_threads(const std::function<std::string()>& run) {
  const int before = thread_count();
  set_thread_count(1);
  const std::string one = run();
  for (const int threads : {2, 3}) {
    set_thread_count(threads);
    EXPECT_TRUE(one == run()) << threads << " threads differ from one";
  }
  set_thread_count(before);
}

}  // namespace sps::ops
