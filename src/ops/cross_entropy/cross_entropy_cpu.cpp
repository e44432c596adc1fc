// A chunk of rows is a piece of work. Its logits are made in blocks of the vocabulary; each block updates the
// running maximum and sum of its rows while it is in the second-level cache. Training leaves exp(logit -
// maximum so far) in the place of the logits, scales that block by block to d_logits, adds each block's share
// of dx, and keeps d_logits in memory. When all chunks of a group of rows have done so, dw += d_logits^T x is
// one product. Borders depend on the shape only.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "ops/cross_entropy/cross_entropy_kernels.h"
#include "ops/linear/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "ops/vec.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

constexpr int64_t kBlock = 1024;  // logits of a row that are made at a time
constexpr int64_t kMostGroupRows = 8192;
constexpr size_t kGroupBytes = size_t{64} << 20;  // of d_logits of a group of rows
constexpr int64_t kEvaluationRows = 256;          // rows of a chunk that keeps one block of logits only
constexpr int64_t kPackFromRows = 128;            // fewer rows than this do not pay for packing w

size_t align_up(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

struct RowState {
  float most = -std::numeric_limits<float>::infinity();
  float sum = 0;  // of exp(logit - most)
  float target_logit = 0;
};

// Skips NaN.
float largest(const float* x, int64_t n) {
  float most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// Folds logits [0, n) into the row's maximum and sum, and leaves exp(logit - maximum so far) in their place.
// NaN logits make the sum NaN, whatever the maximum.
void fold(RowState& s, float* logits, int64_t n) {
  const float most = std::max(s.most, largest(logits, n));
  const float sum = sum_lanes(n, [&](int64_t i, auto mask) {
    store_lanes(logits + i, fast_exp(load_lanes(logits + i, mask) - most), mask);
    return load_lanes(logits + i, mask);  // 0 where the mask is
  });
  s.sum = (s.sum == 0 ? 0 : s.sum * fast_exp(s.most - most)) + sum;
  s.most = most;
}

template <class T>
class Head {
 public:
  explicit Head(const HeadLoss& loss);
  void run();

 private:
  int64_t block_begin(int64_t b) const { return b * kBlock; }
  int64_t block_size(int64_t b) const { return std::min(kBlock, vocab_ - block_begin(b)); }
  // Chunks have chunk_ rows except for the last one; blocks have kBlock columns except for the last one.
  const Gemm& logits_gemm(int64_t rows, int64_t b) const { return *logits_[index(rows, b)]; }
  const Gemm& dx_gemm(int64_t rows, int64_t b) const { return *dx_[index(rows, b) * 2 + (b == 0)]; }
  size_t index(int64_t rows, int64_t b) const {
    return size_t(rows == chunk_ ? 0 : 2) + (b + 1 == blocks_ ? 1 : 0);
  }
  void make_gemms(int64_t rows);
  void pack(std::byte* at);
  const void* w_for_logits(int64_t b) const {
    return packed_ ? packed_w_ + size_t(b) * logits_bytes_
                   : static_cast<const void*>(l_.w.row<T>(block_begin(b)));
  }
  const void* w_for_dx(int64_t b) const {
    return packed_ ? packed_w_ + size_t(blocks_) * logits_bytes_ + size_t(b) * dx_bytes_
                   : static_cast<const void*>(l_.w.row<T>(block_begin(b)));
  }
  void chunk(int64_t begin, int64_t rows, T* d_logits, std::byte* scratch) const;
  void d_logits_of(const float* exps, float most, const RowState& s, int64_t row, int64_t b, T* out) const;

  const HeadLoss& l_;
  float scale_ = 0;
  int64_t rows_, vocab_, d_, blocks_, chunk_, group_;
  bool packed_;
  std::shared_ptr<const Gemm> logits_[4], dx_[8];
  size_t logits_bytes_ = 0, dx_bytes_ = 0, gemm_bytes_ = 0;  // of a packed block; of oneDNN's scratch
  bool dx_in_place_;                                         // dx is written by the product itself
  size_t x_copy_, logits_block_, d_block_, dx_sum_, states_, chunk_bytes_;
  const std::byte* packed_w_ = nullptr;
};

template <class T>
Head<T>::Head(const HeadLoss& loss)
    : l_(loss),
      rows_(loss.x.rows),
      vocab_(loss.w.rows),
      d_(loss.x.cols),
      blocks_((vocab_ + kBlock - 1) / kBlock) {
  // oneDNN wants w dense where it is not packed.
  packed_ = rows_ >= kPackFromRows || !l_.w.dense();
  group_ = rows_;
  chunk_ = kEvaluationRows;
  if (l_.train) {
    scale_ = *l_.scale.as<float>();
    // Long chunks read w less often, several chunks of equal size per group keep all threads busy.
    const auto fitting = int64_t(kGroupBytes / (size_t(vocab_) * sizeof(T)));
    const int64_t step = fitting >= 256 ? 256 : 64;
    group_ = std::clamp<int64_t>(fitting / step * step, 64, kMostGroupRows);
    chunk_ = group_ >= 4096 ? 256 : group_ >= 512 ? 128 : 64;
    group_ = std::min(group_, rows_);
  }
  chunk_ = std::min(chunk_, rows_);
  dx_in_place_ = l_.train && blocks_ == 1 && l_.dx.dense();
  make_gemms(chunk_);
  // Every group but the last is a multiple of the chunk, so there is one short chunk at most.
  if (const int64_t rest = rows_ % chunk_; rest != 0) make_gemms(rest);

  const int64_t kept = l_.train ? blocks_ : 1;
  x_copy_ = l_.x.dense() ? 0 : align_up(size_t(chunk_ * d_) * sizeof(T));
  logits_block_ = align_up(size_t(chunk_ * std::min(kBlock, vocab_)) * sizeof(float));
  d_block_ = l_.train && blocks_ > 1 ? align_up(size_t(chunk_ * kBlock) * sizeof(T)) : 0;
  dx_sum_ = l_.train && !dx_in_place_ ? align_up(size_t(chunk_ * d_) * sizeof(float)) : 0;
  states_ = align_up(size_t(chunk_) * sizeof(RowState));
  const size_t maxima = l_.train ? align_up(size_t(chunk_ * blocks_) * sizeof(float)) : 0;
  chunk_bytes_ = x_copy_ + size_t(kept) * logits_block_ + d_block_ + dx_sum_ + states_ + maxima;
}

template <class T>
void Head<T>::make_gemms(int64_t rows) {
  for (const int64_t b : {int64_t{0}, blocks_ - 1}) {
    GemmShape s;
    s.m = rows, s.n = block_size(b), s.k = d_;
    s.lda = d_, s.ldb = l_.w.dense() ? d_ : l_.w.stride, s.ldc = s.n;
    s.act = dtype_of<T>, s.out = DType::f32;
    s.b_transposed = true, s.b_packed = packed_;
    auto logits = find_gemm(s);
    gemm_bytes_ = std::max(gemm_bytes_, logits->scratch_bytes());
    if (packed_) {
      logits_bytes_ = std::max(logits_bytes_, logits->packed_bytes());
      gemm_bytes_ = std::max(gemm_bytes_, logits->pack_scratch_bytes());
    }
    logits_[index(rows, b)] = std::move(logits);
    if (!l_.train) continue;
    s.n = s.ldc = d_, s.k = s.lda = block_size(b);
    s.b_transposed = false;
    if (dx_in_place_) s.out = dtype_of<T>;
    for (const bool first : {false, true}) {
      s.accumulate = !first;
      auto dx = find_gemm(s);
      gemm_bytes_ = std::max(gemm_bytes_, dx->scratch_bytes());
      if (packed_) {
        dx_bytes_ = std::max(dx_bytes_, dx->packed_bytes());
        gemm_bytes_ = std::max(gemm_bytes_, dx->pack_scratch_bytes());
      }
      dx_[index(rows, b) * 2 + first] = std::move(dx);
    }
  }
}

template <class T>
void Head<T>::pack(std::byte* at) {
  packed_w_ = at;
  parallel_for(l_.train ? 2 * blocks_ : blocks_, [&](int64_t i) {
    const int64_t b = i % blocks_;
    const void* from = l_.w.row<T>(block_begin(b));
    std::byte* scratch = thread_scratch(ScratchSlot::gemm, gemm_bytes_);
    if (i < blocks_)
      logits_gemm(chunk_, b).pack(from, const_cast<void*>(w_for_logits(b)), scratch);
    else
      dx_gemm(chunk_, b).pack(from, const_cast<void*>(w_for_dx(b)), scratch);
  });
}

// out[v] = scale * (softmax(logits)[v] - onehot[v]) for one row of one block, given exp(logits[v] - most).
template <class T>
void Head<T>::d_logits_of(const float* exps, float most, const RowState& s, int64_t row, int64_t b,
                          T* out) const {
  const int64_t n = block_size(b), target = l_.targets[size_t(row)];
  if (target < 0) {
    std::fill_n(out, n, T(0.0F));
    return;
  }
  const float to_softmax = fast_exp(most - s.most) / s.sum, factor = scale_ * to_softmax;
  for_lanes(n,
            [&](int64_t i, auto mask) { store_lanes(out + i, load_lanes(exps + i, mask) * factor, mask); });
  if (const int64_t at = target - block_begin(b); at >= 0 && at < n)
    out[at] = T(scale_ * (exps[at] * to_softmax - 1.0F));
}

// d_logits [rows, vocab] of this chunk are kept for dw.
template <class T>
void Head<T>::chunk(int64_t begin, int64_t rows, T* d_logits, std::byte* scratch) const {
  std::byte* gemm_scratch = thread_scratch(ScratchSlot::gemm, gemm_bytes_);
  const auto take = [&](size_t bytes) { return std::exchange(scratch, scratch + bytes); };
  const T* x = l_.x.row<T>(begin);
  if (x_copy_ > 0) {
    T* copy = reinterpret_cast<T*>(take(x_copy_));
    for (int64_t r = 0; r < rows; ++r) std::copy_n(l_.x.row<T>(begin + r), d_, copy + r * d_);
    x = copy;
  }
  std::byte* all_logits = take(size_t(l_.train ? blocks_ : 1) * logits_block_);
  T* d_block = reinterpret_cast<T*>(take(d_block_));
  auto* dx_sum = reinterpret_cast<float*>(take(dx_sum_));
  auto* states = reinterpret_cast<RowState*>(take(states_));
  auto* maxima = reinterpret_cast<float*>(scratch);  // [blocks, rows]: what the block's exps are relative to
  std::uninitialized_fill_n(states, rows, RowState());
  const auto logits_of = [&](int64_t b) {
    return reinterpret_cast<float*>(all_logits + (l_.train ? size_t(b) * logits_block_ : 0));
  };

  for (int64_t b = 0; b < blocks_; ++b) {
    float* logits = logits_of(b);
    const int64_t n = block_size(b);
    logits_gemm(rows, b).run(x, w_for_logits(b), logits, gemm_scratch);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = l_.targets[size_t(begin + r)] - block_begin(b);
      if (at >= 0 && at < n) states[r].target_logit = logits[r * n + at];
      fold(states[r], logits + r * n, n);
      if (l_.train) maxima[b * rows + r] = states[r].most;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const RowState& s = states[r];
    // The difference first: large logits then cost no digits.
    l_.nll.row<float>(begin + r)[0] =
        l_.targets[size_t(begin + r)] < 0 ? 0.0F : std::log(s.sum) + (s.most - s.target_logit);
  }
  if (!l_.train) return;

  void* dx = dx_in_place_ ? static_cast<void*>(l_.dx.row<T>(begin)) : dx_sum;
  for (int64_t b = 0; b < blocks_; ++b) {
    const int64_t n = block_size(b);
    T* block = blocks_ > 1 ? d_block : d_logits;  // dense, for oneDNN
    for (int64_t r = 0; r < rows; ++r) {
      d_logits_of(logits_of(b) + r * n, maxima[b * rows + r], states[r], begin + r, b, block + r * n);
      if (blocks_ > 1) std::copy_n(block + r * n, n, d_logits + r * vocab_ + block_begin(b));
    }
    dx_gemm(rows, b).run(block, w_for_dx(b), dx, gemm_scratch);
  }
  if (dx_in_place_) return;
  for (int64_t r = 0; r < rows; ++r) {
    T* to = l_.dx.row<T>(begin + r);
    const float* from = dx_sum + r * d_;
    for_lanes(d_, [&](int64_t i, auto mask) { store_lanes(to + i, load_lanes(from + i, mask), mask); });
  }
}

template <class T>
void Head<T>::run() {
  const size_t packed_bytes = packed_ ? size_t(blocks_) * (logits_bytes_ + (l_.train ? dx_bytes_ : 0)) : 0;
  const size_t group_bytes = l_.train ? align_up(size_t(group_ * vocab_) * sizeof(T)) : 0;
  // The calling thread keeps what all threads share in front of its own working memory.
  std::byte* shared = thread_scratch(ScratchSlot::kernel, packed_bytes + group_bytes + chunk_bytes_);
  const int caller = thread_index();
  if (packed_) pack(shared);
  T* d_logits = reinterpret_cast<T*>(shared + packed_bytes);

  for (int64_t begin = 0; begin < rows_; begin += group_) {
    const int64_t n = std::min(group_, rows_ - begin);
    parallel_chunks(n, chunk_, [&](int64_t first, int64_t last) {
      std::byte* scratch = thread_index() == caller ? shared + packed_bytes + group_bytes
                                                    : thread_scratch(ScratchSlot::kernel, chunk_bytes_);
      chunk(begin + first, last - first, d_logits + first * vocab_, scratch);
    });
    if (l_.train) weight_gradient_cpu(view(d_logits, n, vocab_), l_.x.rows_from(begin, n), l_.dw);
  }
}

}  // namespace

void head_loss_cpu(const HeadLoss& loss) {
  if (loss.x.dtype == DType::bf16)
    Head<bf16>(loss).run();
  else
    Head<float>(loss).run();
}

}  // namespace sps::ops
