// Threads: one pool behind one function. Work is cut into pieces whose number and borders depend on the problem and
// never on the number of threads, so every result has the same bits with 1 and with N threads.
//
// Why not OpenMP's teams: a training step opens a few hundred short parallel regions, and between them a team either
// spins (and starves whatever else runs on the machine, including its own late threads) or sleeps at once. These
// threads spin for some 50 microseconds and then sleep. OpenMP itself is held to one thread, for oneDNN's sake: a library
// call inside a piece runs on the thread that made it.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace sps {

// Number of threads that parallel_for uses from here; 1 inside a piece. Initially the cores this process may use, or
// OMP_NUM_THREADS. The pool is shared by the whole process and used by one thread at a time: a second thread that
// calls parallel_for meanwhile runs its pieces itself.
int thread_count();
void set_thread_count(int threads);
// 0 .. thread_count()-1 inside parallel_for; 0 outside.
int thread_index();
// Holds OpenMP to one thread on the calling thread, for libraries that use it themselves.
void hold_openmp_to_one_thread();

namespace threads_detail {
void run(int64_t pieces, void (*piece)(void* body, int64_t i), void* body);
}

// Calls body(i) for each i in [0, pieces), in any order, on all threads. The body must not throw and must not let
// its result depend on thread_index(). Nested calls run on the calling thread.
template <class Body>
void parallel_for(int64_t pieces, Body&& body) {
  using Bare = std::remove_reference_t<Body>;
  threads_detail::run(
      pieces, [](void* b, int64_t i) { (*static_cast<Bare*>(b))(i); },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

// Cuts [0, n) into pieces of `size` (the last may be short) and calls body(begin, end) for each.
template <class Body>
void parallel_chunks(int64_t n, int64_t size, Body&& body) {
  parallel_for((n + size - 1) / size, [&](int64_t i) { body(i * size, (i + 1) * size < n ? (i + 1) * size : n); });
}

}  // namespace sps
