// As decode_linear on tiles, step by step the same sums: 32 rows of w become bf16 64 numbers at a time, in
// the first-level cache, while the tile unit multiplies the 64 before.
#include "ops/int8_linear/int8_linear_kernels.h"

#ifdef SPS_AMX

#include "ops/decode_linear/few_rows.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

using namespace tiles;

constexpr int64_t kBlock = kSide * kInt8Group;  // weights that are bf16 at the same time
static_assert(kInt8Group == 2 * kSide);

// Asks for rows that come next, a few lines at each call.
class Ahead {
 public:
  explicit Ahead(const Int8Matrix& w) : at_(w.values), end_(w.values + w.rows * w.cols) {}
  void some(int64_t lines) {
    for (; lines > 0 && at_ < end_; --lines, at_ += 64) _mm_prefetch(at_, _MM_HINT_T1);
  }

 private:
  const int8_t *at_, *end_;
};

// Numbers [64 group, 64 group + 64) of the rows, zeros behind the last of a row.
void dequantize_block(const Int8Matrix& w, int64_t group, bf16* to, Ahead& ahead) {
  const int64_t groups = Int8Matrix::groups_of(w.cols), from = group * kInt8Group, count = w.cols - from;
  for (int64_t r = 0; r < w.rows; ++r, to += kInt8Group) {
    const int8_t* values = w.values + r * w.cols + from;
    ahead.some(1);
    const auto scale = float(w.scales[r * groups + group]);
    if (count >= kInt8Group) {
      dequantize_group(values, scale, to);
      continue;
    }
    for (int64_t i = 0; i < kInt8Group; ++i) to[i] = bf16(i < count ? float(values[i]) * scale : 0.0F);
  }
}

}  // namespace

void int8_linear_on_tiles(Tensor x, const Int8Matrix& w, Tensor y) {
  const int64_t steps = ceil_div(x.cols, kSide), groups = Int8Matrix::groups_of(x.cols);
  const int64_t units = ceil_div(w.rows, kSide), group = ceil_div(units, pieces_for(1));
  auto* panel = reinterpret_cast<bf16*>(
      thread_scratch(ScratchSlot::gemm, size_t(steps * kSide * x.rows) * sizeof(bf16)));
  lay_out_few(x, steps, panel);
  parallel_chunks(units, group, [&](int64_t begin, int64_t end) {
    alignas(64) bf16 blocks[2][kBlock] = {};
    alignas(64) float sums[kBlockSize] = {};
    const FewRowsSession session(x.rows);
    const auto rows_of = [&](int64_t unit) {
      const int64_t row = std::min(unit * kSide, w.rows);
      return w.rows_from(row, unit < end ? std::min(kSide, w.rows - row) : 0);
    };
    Ahead(rows_of(begin)).some(INT64_MAX);
    for (int64_t unit = begin; unit < end; ++unit) {
      const Int8Matrix rows = rows_of(unit);
      Ahead ahead(rows_of(unit + 1));
      dequantize_block(rows, 0, blocks[0], ahead);
      start_few();
      for (int64_t g = 0; g < groups; ++g) {
        if (g + 1 < groups) dequantize_block(rows, g + 1, blocks[(g + 1) % 2], ahead);
        tile_barrier();
        for (int64_t s = 2 * g; s < std::min(2 * g + 2, steps); ++s) {
          step_few(blocks[g % 2] + s % 2 * kSide, kInt8Group, 16 * kInt8Group, panel + s * kSide * x.rows,
                   x.rows);
        }
        tile_barrier();
      }
      finish_few(sums);
      tile_barrier();
      if (y.dtype == DType::bf16)
        store<bf16>(sums, y, 0, unit * kSide);
      else
        store<float>(sums, y, 0, unit * kSide);
    }
  });
}

}  // namespace sps::ops

#endif
