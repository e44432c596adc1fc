// For the benchmark programs of the op rooms: bytes per second, and a copy of as many bytes to hold them
// against.
#pragma once

#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "base/threads.h"
#include "tensor/tensor.h"

namespace sps::ops {

// GB/s of an operation that must move at least `bytes` (read and written together) each time.
inline void report_bytes(benchmark::State& state, int64_t bytes) {
  state.counters["GB/s"] =
      benchmark::Counter(double(bytes) * double(state.iterations()) * 1e-9, benchmark::Counter::kIsRate);
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
