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

typedef uint64_t Line __attribute__((vector_size(64)));

// Several sums, of which none waits for the others; what comes a kilobyte later is asked for early, which the
// hardware alone does not do far enough.
uint64_t sum_of(const Line* p, int64_t lines) {
  constexpr int64_t kSums = 8, kAhead = 16;
  Line sums[kSums] = {};
  for (int64_t i = 0; i < lines; i += kSums)
    for (int64_t s = 0; s < kSums; ++s) {
      __builtin_prefetch(p + i + s + kAhead);
      sums[s] += p[i + s];
    }
  uint64_t sum = 0;
  for (const Line& line : sums)
    for (int n = 0; n < 8; ++n) sum += line[n];
  return sum;
}

constexpr size_t kReadBytes = size_t{1} << 30;

}  // namespace

ReadCeiling::ReadCeiling() : memory_(kReadBytes, Memory::host) {}

double ReadCeiling::bytes_per_second() const {
  constexpr int64_t kPiece = int64_t{1} << 20;
  std::atomic<uint64_t> all{0};  // so that nobody finds the reads useless
  double best = 0;
  for (int pass = 0; pass < 3; ++pass) {
    const double began = monotonic_seconds();
    parallel_chunks(int64_t(kReadBytes), kPiece, [&](int64_t begin, int64_t end) {
      all += sum_of(reinterpret_cast<const Line*>(memory_.data() + begin),
                    (end - begin) / int64_t(sizeof(Line)));
    });
    best = std::max(best, double(kReadBytes) / (monotonic_seconds() - began));
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
