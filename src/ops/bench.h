// For the benchmark programs of the op rooms: bytes per second, and a copy of as many bytes to hold them
// against.
#pragma once

#include <benchmark/benchmark.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/threads.h"
#include "tensor/tensor.h"

namespace sps::ops {

// GB/s of an operation that must move at least `bytes` (read and written together) each time.
inline void report_bytes(benchmark::State& state, int64_t bytes) {
  state.counters["GB/s"] =
      benchmark::Counter(double(bytes) * double(state.iterations()) * 1e-9, benchmark::Counter::kIsRate);
}

// Models of about 0.4 and 1.6 billion parameters.
struct ModelWidth {
  const char* name;
  int64_t d, ffn;
};
inline constexpr ModelWidth kModelWidths[] = {{"M", 1024, 3072}, {"XL", 1600, 4800}};

// cuda/WIDTH/NAME, by the wall's clock; run(state) works on that width. Arguments are the caller's to add.
template <class Run>
benchmark::internal::Benchmark* register_on_gpu(const ModelWidth& width, const std::string& name, Run run) {
  return benchmark::RegisterBenchmark(("cuda/" + (width.name + ("/" + name))).c_str(), run)
      ->UseRealTime()
      ->MinTime(0.05)
      ->Unit(benchmark::kMicrosecond);
}

// The yardstick: memcpy that moves range(0) bytes, on all threads.
inline void bench_memcpy(benchmark::State& state) {
  const int64_t n = state.range(0) / 2, piece = 1 << 18;
  std::vector<char> from(size_t(n), 1), to(size_t(n), 2);
  for (auto _ : state) {
    parallel_chunks(n, piece, [&](int64_t b, int64_t e) {
      std::memcpy(&to[size_t(b)], &from[size_t(b)], size_t(e - b));
    });
    benchmark::ClobberMemory();
  }
  report_bytes(state, 2 * n);
}

}  // namespace sps::ops
