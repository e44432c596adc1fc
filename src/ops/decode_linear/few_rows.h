// Products on AMX tiles with the weights as the left operand, where x has few rows: what decode_linear and
// the product of weights in 8 bits share.
#pragma once

#include "ops/amx.h"
#include "tensor/tensor.h"

#ifdef SPS_AMX

#include <algorithm>
#include <cstring>

#include "base/threads.h"
#include "ops/linear/tiles.h"
#include "ops/linear/transpose.h"

namespace sps::ops::tiles {

constexpr int64_t kPieces = 128;  // most pieces of work

// A piece asks for the weights behind those that it multiplies, but knows nothing of the next piece, which
// may be another thread's. A beginning without foresight costs as much as several hundred lines, so where
// each weight is used once there are few pieces. No number depends on the piece that it is made in: here
// threads may be counted.
inline int64_t pieces_for(int64_t panels) {
  return panels > 1 ? kPieces : std::clamp<int64_t>(4 * thread_count(), 8, kPieces);
}

// With up to 16 rows of x, one tile is as wide as there are rows, and x lies in it as [k / 2][rows] pairs:
// next to nothing to lay out, where 32 columns of mostly zeros would be made by one thread and fetched by
// all.
constexpr int64_t kFew = 16;

class FewRowsSession {
 public:
  explicit FewRowsSession(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (const int tile : {0, 2, 4, 5, 6}) {
      config.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? 64 : 4 * rows);
      config.rows[tile] = 16;
    }
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~FewRowsSession() { _tile_release(); }
  FewRowsSession(const FewRowsSession&) = delete;
  FewRowsSession& operator=(const FewRowsSession&) = delete;
};

// to [steps * 16, rows] pairs of neighbours along k, zeros behind the last.
inline void lay_out_few(Tensor x, int64_t steps, bf16* to) {
  const int64_t pairs = x.cols / 2;
  for (int64_t r = 0; r < x.rows; ++r) {
    const bf16* from = x.row<bf16>(r);
    for (int64_t i = 0; i < pairs; ++i)
      std::memcpy(to + 2 * (i * x.rows + r), from + 2 * i, 2 * sizeof(bf16));
    for (int64_t i = 2 * pairs; i < steps * kSide; ++i)
      to[2 * (i / 2 * x.rows + r) + i % 2] = i < x.cols ? from[i] : bf16(0.0F);
  }
}

// 32 rows of w times a panel of lay_out_few, 32 numbers along k in each step: the sums are those of the first
// and the third tile of a block, in rows of 16. The tile loads do not tell the compiler that they read
// memory: what they read must be written before a barrier.
inline void start_few() {
  _tile_zero(0);
  _tile_zero(2);
}
inline void step_few(const bf16* w, int64_t stride, int64_t second, const bf16* panel, int64_t rows) {
  _tile_loadd(4, w, stride * 2);
  _tile_loadd(6, panel, 4 * rows);
  _tile_loadd(5, w + second, stride * 2);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(2, 5, 6);
}
inline void finish_few(float* sum) {
  _tile_stored(0, sum, 64);
  _tile_stored(2, sum + 2 * kSumTile, 64);
}
inline void tile_barrier() {
  asm volatile("" : : : "memory");
}

// The sums of 32 rows of w and up to 32 rows of x: y from `row` and `col` on.
template <class Y>
void store(const float* sums, Tensor y, int64_t row, int64_t col) {
  alignas(64) float turned[kSumTile];
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t cols = std::min<int64_t>(16, y.cols - col - 16 * i);
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t from = row + 16 * j, rows = std::min<int64_t>(16, y.rows - from);
      if (rows <= 0 || cols <= 0) continue;
      transpose_block(sums + (2 * i + j) * kSumTile, 16, turned, 16);
      for (int64_t r = 0; r < rows; ++r)
        store_lanes(y.row<Y>(from + r) + col + 16 * i, load_lanes(turned + 16 * r, AllLanes{}),
                    __mmask16((1U << cols) - 1));
    }
  }
}

}  // namespace sps::ops::tiles

#endif
