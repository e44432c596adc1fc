#include "cli/bench_gemm.h"

#include <omp.h>

#include <algorithm>
#include <dnnl.hpp>
#include <vector>

#include "base/progress.h"
#include "base/rng.h"
#include "base/threads.h"
#include "ops/linear/linear.h"
#include "tensor/device.h"

namespace sps {

double gemm_flops_per_second(DType dtype) {
  const int threads = thread_count();
  omp_set_num_threads(threads);  // the library's own threads, for this measurement alone
  const auto type = dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  double best = 0;
  for (const int64_t n : {1024, 2048, 4096}) {
    const dnnl::memory::desc desc({n, n}, type, dnnl::memory::format_tag::ab);
    dnnl::memory a(desc, engine), b(desc, engine), c(desc, engine);
    const Rng rng(0, "gemm");
    for (dnnl::memory* m : {&a, &b}) {
      // Random numbers: products of constants draw less power and run faster than real ones.
      void* data = m->get_data_handle();
      for (int64_t i = 0; i < n * n; ++i) {
        const auto v = float(rng.uniform(uint64_t(i)) - 0.5);
        if (dtype == DType::bf16)
          static_cast<bf16*>(data)[i] = bf16(v);
        else
          static_cast<float*>(data)[i] = v;
      }
    }
    const dnnl::matmul product(dnnl::matmul::primitive_desc(dnnl::matmul::desc(desc, desc, desc), engine));
    const auto run = [&] {
      const double began = monotonic_seconds();
      product.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
      stream.wait();
      return 2.0 * double(n) * double(n) * double(n) / (monotonic_seconds() - began);
    };
    run();
    for (int i = 0; i < 5; ++i) best = std::max(best, run());
  }
  hold_openmp_to_one_thread();
  return best;
}

GemmRate gpu_gemm_flops_per_second(DType dtype) {
  const Exec ex = open_gpu();
  constexpr int64_t n = 8192;
  const size_t bytes = size_t(n * n) * dtype_size(dtype);
  const Bytes memory(3 * bytes, Memory::device);
  const auto matrix = [&](size_t i) {
    return Tensor{memory.data() + i * bytes, n, n, n, dtype, Device::cuda};
  };
  {
    // Random numbers: products of constants draw less power and run faster than real ones.
    const Bytes host(bytes, Memory::pinned);
    const Rng rng(0, "gemm");
    parallel_chunks(n * n, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto v = float(rng.uniform(uint64_t(i)) - 0.5);
        if (dtype == DType::bf16)
          reinterpret_cast<bf16*>(host.data())[i] = bf16(v);
        else
          reinterpret_cast<float*>(host.data())[i] = v;
      }
    });
    for (const size_t i : {0, 1}) copy_bytes(ex, matrix(i).data, host.data(), bytes);
    synchronize(ex);
  }
  std::vector<double> rates;
  const auto product = [&] { ops::linear_forward(ex, matrix(0), matrix(1), matrix(2)); };
  for (int i = 0; i < 3; ++i) product();
  synchronize(ex);
  const double until = monotonic_seconds() + 0.25;
  while (monotonic_seconds() < until || rates.size() < 5) {
    const double began = monotonic_seconds();
    product();
    synchronize(ex);
    rates.push_back(2.0 * double(n) * double(n) * double(n) / (monotonic_seconds() - began));
  }
  std::sort(rates.begin(), rates.end());
  return {rates[rates.size() / 2], rates.back()};
}

}  // namespace sps
