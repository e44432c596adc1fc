// What the products on AMX tiles share: blocks of 32 x 32 sums in four tiles, [2][2][16][16], and operands
// laid out in blocks of two tiles (32 steps along k).
#pragma once

#include "ops/amx.h"

#ifdef SPS_AMX

namespace sps::ops::tiles {

constexpr int64_t kSide = 32;                  // rows and columns of a block
constexpr int64_t kBlockSize = kSide * kSide;  // elements of a block, of sums or of an operand
constexpr int64_t kTileSize = 512;             // bf16 elements of a tile
constexpr int64_t kSumTile = 256;              // f32 elements of a tile

// Whether this machine lets us multiply on tiles and nothing forces other instructions.
bool usable();

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Asks for the rows [row, end) of a matrix, a few lines at each call of some().
class RowPrefetch {
 public:
  RowPrefetch(const bf16* base, int64_t stride, int64_t cols, int64_t row, int64_t end)
      : at_(reinterpret_cast<const char*>(base + row * stride)),
        step_(stride * 2),
        bytes_(cols * 2),
        rows_left_(std::max<int64_t>(end - row, 0)) {}
  int64_t lines() const { return rows_left_ * ceil_div(bytes_, 64); }
  void some(int64_t lines) {
    for (; lines > 0 && rows_left_ > 0; --lines) {
      _mm_prefetch(at_ + offset_, _MM_HINT_T1);
      offset_ += 64;
      if (offset_ >= bytes_) {
        offset_ = 0;
        at_ += step_;
        --rows_left_;
      }
    }
  }

 private:
  const char* at_;
  int64_t step_, bytes_, rows_left_, offset_ = 0;
};

// Rows of operand A: the next row, the rows of the second tile, the next 32 columns, all in elements.
struct RowsOfA {
  const bf16* data;
  int64_t stride, second, step;
};

// sum = (or +=, if `add`) A times a panel of B of `steps` blocks. Calls each_step() in between, for small
// work that the core does while the tile unit multiplies.
template <class EachStep>
[[gnu::always_inline]] inline void multiply(RowsOfA a, const bf16* panel, int64_t steps, float* sum, bool add,
                                            EachStep&& each_step) {
  asm volatile("" : : : "memory");  // the tile loads do not tell the compiler that they read memory
  if (add) {
    _tile_loadd(0, sum, 64);
    _tile_loadd(1, sum + kSumTile, 64);
    _tile_loadd(2, sum + 2 * kSumTile, 64);
    _tile_loadd(3, sum + 3 * kSumTile, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s, a.data += a.step, panel += kBlockSize) {
    _tile_loadd(4, a.data, a.stride * 2);
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + kTileSize, 64);
    _tile_loadd(5, a.data + a.second, a.stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    each_step();
  }
  _tile_stored(0, sum, 64);
  _tile_stored(1, sum + kSumTile, 64);
  _tile_stored(2, sum + 2 * kSumTile, 64);
  _tile_stored(3, sum + 3 * kSumTile, 64);
  asm volatile("" : : : "memory");
}

}  // namespace sps::ops::tiles

#endif
