#include "base/threads.h"

#include <omp.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sps {

namespace {

constexpr int kSpins = 2000;  // pauses before a waiting thread sleeps: some 50 to 100 microseconds

thread_local int index_of_this_thread = 0;
thread_local bool inside_piece = false;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Returns once `value` differs from `old`.
void wait_while_equal(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  value.wait(old, std::memory_order_acquire);
}

class Pool {
 public:
  Pool() : count_(omp_get_max_threads()) { omp_set_num_threads(1); }

  int count() const { return count_; }
  void resize(int threads) {
    SPS_CHECK(!inside_piece);
    const std::lock_guard lock(user_);
    stop();
    count_ = threads < 1 ? 1 : threads;
  }

  void run(int64_t pieces, void (*piece)(void*, int64_t), void* body) {
    const auto alone = [&] {
      for (int64_t i = 0; i < pieces; ++i) piece(body, i);
    };
    if (pieces <= 1 || count_ == 1 || inside_piece) return alone();
    const std::unique_lock lock(user_, std::try_to_lock);
    if (!lock) return alone();
    if (workers_.empty()) start();
    pieces_ = pieces, piece_ = piece, body_ = body;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(uint32_t(workers_.size()), std::memory_order_relaxed);
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
    work();
    for (uint32_t left; (left = busy_.load(std::memory_order_acquire)) != 0;) wait_while_equal(busy_, left);
  }

 private:
  void work() {
    inside_piece = true;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < pieces_;) piece_(body_, i);
    inside_piece = false;
  }
  void start() {
    stopping_ = false;
    for (int t = 1; t < count_; ++t) workers_.emplace_back([this, t, seen = job_.load()] { live(t, seen); });
  }
  void stop() {
    if (workers_.empty()) return;
    stopping_ = true;
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
    for (std::thread& w : workers_) w.join();
    workers_.clear();
  }
  void live(int index, uint32_t seen) {
    omp_set_num_threads(1);
    index_of_this_thread = index;
    while (true) {
      wait_while_equal(job_, seen);
      seen = job_.load(std::memory_order_acquire);
      if (stopping_) return;
      work();
      if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
    }
  }

  std::atomic<int> count_;
  std::mutex user_;
  std::vector<std::thread> workers_;
  std::atomic<bool> stopping_{false};
  // One job at a time; written before `job_` changes, read after.
  int64_t pieces_ = 0;
  void (*piece_)(void*, int64_t) = nullptr;
  void* body_ = nullptr;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<uint32_t> busy_{0};  // workers that have not finished the job
};

// Never destroyed: a process that exits does not wait for sleeping threads.
Pool& pool() {
  static Pool* const the_pool = new Pool;
  return *the_pool;
}

}  // namespace

int thread_count() { return inside_piece ? 1 : pool().count(); }
void set_thread_count(int threads) { pool().resize(threads); }
int thread_index() { return index_of_this_thread; }
void hold_openmp_to_one_thread() {
  pool();  // first, for it asks OpenMP how many threads there are
  if (omp_get_max_threads() != 1) omp_set_num_threads(1);
}

void threads_detail::run(int64_t pieces, void (*piece)(void*, int64_t), void* body) { pool().run(pieces, piece, body); }

}  // namespace sps
