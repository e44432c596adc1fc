// bf16 products of many rows go to our own kernels on AMX tiles where there are any (row_product.h,
// weight_gradient.h), everything else to oneDNN: here one large product becomes many sequential ones. The
// cuts depend on the shape only:
//   rows of C in chunks, the unit of parallel work;
//   k in spans: beyond about a thousand k the AMX kernels lose a third of their speed.
// oneDNN's fast kernels take dense matrices only. So a chunk of a that is strided, a span of a longer row or
// to be transposed is first copied to the thread's scratch, where it stays in the second-level cache, and a
// strided c is computed there in f32, in blocks of columns, and then written out.
#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "ops/linear/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/row_product.h"
#include "ops/linear/transpose.h"
#include "ops/linear/weight_gradient.h"
#include "ops/vec.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

constexpr int64_t kMostK = 1024;                   // longest span of k
constexpr int64_t kMostCols = 512;                 // widest block of columns computed in scratch
constexpr int64_t kSpanBytes = 3 << 19;            // of b in a span that all chunks read again
constexpr int64_t kFewRowsCols = 128;              // the unit of work when there are few rows
constexpr int64_t kPackFromRows = 32;              // fewer rows than this do not pay for packing b
constexpr int64_t kPieces = 8;                     // pieces of work wanted before chunks are made larger
constexpr size_t kPackedBytes = size_t{64} << 20;  // a longer k is packed in groups of spans

size_t align_up(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}
// oneDNN wants a stride even where there is no second row.
int64_t row_stride(const Tensor& t) {
  return t.rows > 1 ? t.stride : t.cols;
}
int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// [0, n) in pieces of few different sizes; `kind` numbers the size.
struct Cut {
  struct Piece {
    int64_t begin, size;
    int kind;
  };
  std::vector<Piece> pieces;
  std::vector<int64_t> sizes;

  void add(int64_t size) {
    const auto found = std::find(sizes.begin(), sizes.end(), size);
    const int kind = int(found - sizes.begin());
    if (found == sizes.end()) sizes.push_back(size);
    pieces.push_back({end_, size, kind});
    end_ += size;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

// Near-equal pieces of at most `most`, multiples of 64 except for the last.
Cut cut_evenly(int64_t n, int64_t most) {
  const int64_t size = ceil_div(ceil_div(n, ceil_div(n, most)), 64) * 64;
  Cut cut;
  while (cut.end() < n) cut.add(std::min(size, n - cut.end()));
  return cut;
}

// Chunks of `size`, then powers of two down to 16, then the rest: any number of rows is made of at most
// twenty different sizes, so a server that sees every prompt length does not make kernels for each.
Cut cut_rows(int64_t n, int64_t size) {
  Cut cut;
  while (n - cut.end() >= size) cut.add(size);
  for (int64_t s = size / 2; s >= 16; s /= 2)
    if (n - cut.end() >= s) cut.add(s);
  if (cut.end() < n) cut.add(n - cut.end());
  return cut;
}

struct Product {
  Tensor a, b, c;
  bool a_transposed, b_transposed, accumulate;
  int64_t m, n, k;
  // packed: b is; copied: chunks of a are copied; summed: c is computed in f32 scratch.
  bool packed, copied, summed;
  Cut rows, cols, spans;
  std::vector<std::shared_ptr<const Gemm>> gemms;
  size_t worker_bytes = 0, packed_block_bytes = 0;

  Product(Tensor a_in, Transposed at, Tensor b_in, Transposed bt, Tensor c_in, Accumulate acc);
  void run();

 private:
  const Gemm& gemm(int row_kind, int col_kind, int span_kind, bool first) const {
    return *gemms[index(row_kind, col_kind, span_kind, first)];
  }
  size_t index(int row_kind, int col_kind, int span_kind, bool first) const {
    return ((size_t(row_kind) * cols.sizes.size() + col_kind) * spans.sizes.size() + span_kind) * 2 + first;
  }
  size_t elem() const { return dtype_size(a.dtype); }
  std::byte* block_of_b(int64_t k_begin, int64_t n_begin) const {
    const int64_t r = b_transposed ? n_begin : k_begin, c = b_transposed ? k_begin : n_begin;
    return static_cast<std::byte*>(b.data) + size_t(r * b.stride + c) * elem();
  }
  int64_t longest_chunk() const { return *std::max_element(rows.sizes.begin(), rows.sizes.end()); }
  size_t copy_bytes() const {
    return copied ? align_up(size_t(longest_chunk() * spans.sizes[0]) * elem()) : 0;
  }
  size_t sum_bytes() const {
    return summed ? align_up(size_t(longest_chunk() * cols.sizes[0]) * sizeof(float)) : 0;
  }
  const void* chunk_of_a(const Cut::Piece& row, const Cut::Piece& span, std::byte* scratch) const;
  void write_sum(const float* sum, const Cut::Piece& row, const Cut::Piece& col) const;
  void piece(const Cut::Piece& row, size_t col_begin, size_t col_end, size_t span_begin, size_t span_end,
             const std::byte* packed_b, std::byte* scratch) const;
};

Product::Product(Tensor a_in, Transposed at, Tensor b_in, Transposed bt, Tensor c_in, Accumulate acc)
    : a(a_in),
      b(b_in),
      c(c_in),
      a_transposed(at == Transposed::yes),
      b_transposed(bt == Transposed::yes),
      accumulate(acc == Accumulate::yes),
      m(c.rows),
      n(c.cols),
      k(a_transposed ? a.rows : a.cols) {
  packed = m >= kPackFromRows;
  // Sums that c can hold between spans (weight gradients) take all chunks through one span before the next,
  // so that the span of b stays in the second-level cache.
  int64_t span = kMostK;
  if (packed && c.dtype == DType::f32 && c.dense())
    span = std::clamp<int64_t>(kSpanBytes / (n * int64_t(elem())), 256, kMostK);
  spans = cut_evenly(k, span);
  copied = a_transposed || (packed && (spans.pieces.size() > 1 || !a.dense()));
  summed = packed && (!c.dense() || (c.dtype == DType::bf16 && spans.pieces.size() > 1));
  if (!packed && spans.pieces.size() > 1 && c.dtype == DType::bf16) summed = true;
  cols = cut_evenly(n, !packed ? kFewRowsCols : summed ? kMostCols : n);
  int64_t chunk = 256;
  while (chunk > 64 && ceil_div(m, chunk) < kPieces) chunk /= 2;
  rows = cut_rows(m, chunk);

  gemms.resize(rows.sizes.size() * cols.sizes.size() * spans.sizes.size() * 2);
  for (size_t i = 0; i < rows.sizes.size(); ++i)
    for (size_t j = 0; j < cols.sizes.size(); ++j)
      for (size_t l = 0; l < spans.sizes.size(); ++l)
        for (const bool first : {false, true}) {
          if (!first && spans.pieces.size() == 1) continue;
          GemmShape s;
          s.m = rows.sizes[i], s.n = cols.sizes[j], s.k = spans.sizes[l];
          s.lda = copied ? s.k : row_stride(a);
          s.ldb = row_stride(b);
          s.ldc = summed ? s.n : row_stride(c);
          s.act = a.dtype, s.out = summed ? DType::f32 : c.dtype;
          s.b_transposed = b_transposed, s.b_packed = packed;
          s.accumulate = !first || (accumulate && !summed);
          auto found = find_gemm(s);
          worker_bytes = std::max(worker_bytes, found->scratch_bytes());
          if (packed) {
            worker_bytes = std::max(worker_bytes, found->pack_scratch_bytes());
            packed_block_bytes = std::max(packed_block_bytes, found->packed_bytes());
          }
          gemms[index(int(i), int(j), int(l), first)] = std::move(found);
        }
  worker_bytes += copy_bytes() + sum_bytes();
}

template <class T>
void copy_chunk(const T* from, int64_t stride, bool transposed, T* to, int64_t rows, int64_t k) {
  if (transposed) return transpose(from, stride, to, k, k, rows);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * stride, k, to + r * k);
}

const void* Product::chunk_of_a(const Cut::Piece& row, const Cut::Piece& span, std::byte* scratch) const {
  const int64_t r = a_transposed ? span.begin : row.begin, c = a_transposed ? row.begin : span.begin;
  auto* data = static_cast<std::byte*>(a.data) + size_t(r * a.stride + c) * elem();
  if (!copied) return data;
  if (elem() == 2)
    copy_chunk(reinterpret_cast<const bf16*>(data), a.stride, a_transposed, reinterpret_cast<bf16*>(scratch),
               row.size, span.size);
  else
    copy_chunk(reinterpret_cast<const float*>(data), a.stride, a_transposed,
               reinterpret_cast<float*>(scratch), row.size, span.size);
  return scratch;
}

template <class T>
void write_out(const float* sum, T* to, int64_t to_stride, int64_t rows, int64_t cols, bool accumulate) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = sum + r * cols;
    T* row = to + r * to_stride;
    for_lanes(cols, [&](int64_t i, auto mask) {
      const Lanes v = load_lanes(from + i, mask);
      store_lanes(row + i, accumulate ? load_lanes(row + i, mask) + v : v, mask);
    });
  }
}

void Product::write_sum(const float* sum, const Cut::Piece& row, const Cut::Piece& col) const {
  if (c.dtype == DType::bf16)
    write_out(sum, c.row<bf16>(row.begin) + col.begin, c.stride, row.size, col.size, accumulate);
  else
    write_out(sum, c.row<float>(row.begin) + col.begin, c.stride, row.size, col.size, accumulate);
}

void Product::piece(const Cut::Piece& row, size_t col_begin, size_t col_end, size_t span_begin,
                    size_t span_end, const std::byte* packed_b, std::byte* scratch) const {
  std::byte* sum = scratch + copy_bytes();
  std::byte* gemm_scratch = sum + sum_bytes();
  const auto multiply = [&](const Cut::Piece& col, size_t j, size_t l, const void* a_chunk) {
    const Cut::Piece& span = spans.pieces[l];
    const void* from = packed ? packed_b + ((l - span_begin) * cols.pieces.size() + j) * packed_block_bytes
                              : block_of_b(span.begin, col.begin);
    void* to = sum;
    if (!summed)
      to = static_cast<std::byte*>(c.data) + size_t(row.begin * c.stride + col.begin) * dtype_size(c.dtype);
    gemm(row.kind, col.kind, span.kind, l == 0).run(a_chunk, from, to, gemm_scratch);
  };
  if (summed) {
    for (size_t j = col_begin; j < col_end; ++j) {
      for (size_t l = span_begin; l < span_end; ++l)
        multiply(cols.pieces[j], j, l, chunk_of_a(row, spans.pieces[l], scratch));
      write_sum(reinterpret_cast<const float*>(sum), row, cols.pieces[j]);
    }
  } else {
    for (size_t l = span_begin; l < span_end; ++l) {
      const void* a_chunk = chunk_of_a(row, spans.pieces[l], scratch);
      for (size_t j = col_begin; j < col_end; ++j) multiply(cols.pieces[j], j, l, a_chunk);
    }
  }
}

void Product::run() {
  const size_t n_cols = cols.pieces.size(), n_spans = spans.pieces.size();
  // What is computed in scratch needs all of k at once.
  size_t group = n_spans;
  if (packed && !summed)
    group = std::clamp<size_t>(kPackedBytes / std::max<size_t>(n_cols * packed_block_bytes, 1), 1, n_spans);
  const size_t packed_bytes = packed ? group * n_cols * packed_block_bytes : 0;
  // The calling thread keeps the packed b in front of its own working memory.
  std::byte* packed_b = thread_scratch(ScratchSlot::gemm, packed_bytes + worker_bytes);
  const int caller = thread_index();
  const auto worker_scratch = [&] {
    return thread_index() == caller ? packed_b + packed_bytes
                                    : thread_scratch(ScratchSlot::gemm, worker_bytes);
  };
  // Few row chunks: every block of columns is a piece of its own.
  const size_t cols_per_piece = rows.pieces.size() >= size_t(kPieces) ? n_cols : 1;
  const size_t per_row = size_t(ceil_div(int64_t(n_cols), int64_t(cols_per_piece)));

  for (size_t begin = 0; begin < n_spans; begin += group) {
    const size_t end = std::min(begin + group, n_spans);
    if (packed)
      parallel_for(int64_t((end - begin) * n_cols), [&](int64_t i) {
        const Cut::Piece& span = spans.pieces[begin + size_t(i) / n_cols];
        const Cut::Piece& col = cols.pieces[size_t(i) % n_cols];
        gemm(0, col.kind, span.kind, true)
            .pack(block_of_b(span.begin, col.begin), packed_b + size_t(i) * packed_block_bytes,
                  worker_scratch());
      });
    const size_t step = summed ? end - begin : 1;
    for (size_t span = begin; span < end; span += step) {
      const std::byte* span_b = packed_b + (span - begin) * n_cols * packed_block_bytes;
      parallel_for(int64_t(rows.pieces.size() * per_row), [&](int64_t i) {
        const size_t j = size_t(i) % per_row * cols_per_piece;
        piece(rows.pieces[size_t(i) / per_row], j, std::min(j + cols_per_piece, n_cols), span, span + step,
              span_b, worker_scratch());
      });
    }
  }
}

}  // namespace

void product_cpu(Tensor a, Transposed a_transposed, Tensor b, Transposed b_transposed, Tensor c,
                 Accumulate acc) {
  if (c.empty()) return;
  const int64_t k = a_transposed == Transposed::yes ? a.rows : a.cols;
  if (k == 0) {
    if (acc == Accumulate::no)
      for (int64_t r = 0; r < c.rows; ++r) {
        std::byte* row = static_cast<std::byte*>(c.data) + size_t(r * c.stride) * dtype_size(c.dtype);
        std::fill_n(row, size_t(c.cols) * dtype_size(c.dtype), std::byte{0});
      }
    return;
  }
#ifdef SPS_AMX
  if (a_transposed == Transposed::no && row_product_is_fast(a))
    return row_product_on_tiles(a, b, b_transposed == Transposed::yes, c, acc == Accumulate::yes);
#endif
  Product(a, a_transposed, b, b_transposed, c, acc).run();
}

void weight_gradient_cpu(Tensor dy, Tensor x, Tensor dw) {
#ifdef SPS_AMX
  if (dy.dtype == DType::bf16 && !dw.empty() && dy.rows > 0 && tiles::usable())
    return weight_gradient_on_tiles(dy, x, dw);
#endif
  product_cpu(dy, Transposed::yes, x, Transposed::no, dw, Accumulate::yes);
}

}  // namespace sps::ops
