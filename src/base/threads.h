// Threads: OpenMP behind one function. Work is cut into pieces whose number and borders depend on the problem and
// never on the number of threads, so every result has the same bits with 1 and with N threads.
#pragma once

#include <omp.h>

#include <cstdint>

namespace sps {

// Number of threads that parallel_for uses. Initially what OpenMP offers (cores, or OMP_NUM_THREADS).
inline int thread_count() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }
inline void set_thread_count(int threads) { omp_set_num_threads(threads); }
// 0 .. thread_count()-1 inside parallel_for; 0 outside.
inline int thread_index() { return omp_get_thread_num(); }

// Calls body(i) for each i in [0, pieces), in any order, on all threads. The body must not throw and must not let
// its result depend on thread_index(). Nested calls run on the calling thread.
template <class Body>
void parallel_for(int64_t pieces, Body&& body) {
  if (pieces <= 0) return;
  if (pieces == 1 || thread_count() == 1) {
    for (int64_t i = 0; i < pieces; ++i) body(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < pieces; ++i) body(i);
}

// Cuts [0, n) into pieces of `size` (the last may be short) and calls body(begin, end) for each.
template <class Body>
void parallel_chunks(int64_t n, int64_t size, Body&& body) {
  parallel_for((n + size - 1) / size, [&](int64_t i) { body(i * size, (i + 1) * size < n ? (i + 1) * size : n); });
}

}  // namespace sps
