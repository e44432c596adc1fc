#include "cli/bench_memory.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "base/progress.h"
#include "base/threads.h"
#include "tensor/device.h"

namespace sps {

namespace {

// Eight sums at a time: one would wait for itself.
uint64_t sum_of(const uint64_t* p, int64_t n) {
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += p[i];
  return sum;
}

}  // namespace

double read_bytes_per_second() {
  constexpr int64_t kBytes = int64_t{1} << 30, kPiece = int64_t{1} << 20;
  const Bytes memory(size_t(kBytes), Memory::host);
  std::atomic<uint64_t> all{0};  // so that nobody finds the reads useless
  double best = 0;
  for (int pass = 0; pass < 5; ++pass) {
    const double began = monotonic_seconds();
    parallel_chunks(kBytes, kPiece, [&](int64_t begin, int64_t end) {
      all += sum_of(reinterpret_cast<const uint64_t*>(memory.data() + begin), (end - begin) / 8);
    });
    best = std::max(best, double(kBytes) / (monotonic_seconds() - began));
  }
  return best;
}

double gpu_copy_bytes_per_second() {
  const Exec ex = open_gpu();
  const size_t bytes = size_t{4} << 30;
  const Bytes from(bytes, Memory::device), to(bytes, Memory::device);
  std::vector<double> rates;
  for (int i = 0; i < 12; ++i) {
    const double began = monotonic_seconds();
    copy_bytes(ex, to.data(), from.data(), bytes);
    synchronize(ex);
    rates.push_back(2 * double(bytes) / (monotonic_seconds() - began));
  }
  std::sort(rates.begin() + 2, rates.end());  // the first two warm up
  return rates[7];
}

}  // namespace sps
