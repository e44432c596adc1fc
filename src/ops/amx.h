// Intel AMX: eight tile registers of 16 rows by 64 bytes, and products of bf16 tiles summed in f32. SPS_AMX
// is defined where the compiler may use them; whether the machine lets us is amx_permitted()'s answer.
#pragma once

#include <cstdint>

#include "ops/vec.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__) && defined(__linux__)
#define SPS_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace sps::ops {

// Asks the system once per process for the use of tile registers; false if it refuses.
inline bool amx_permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
}

// What the tile registers hold; at first all of them whole tiles.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tile registers for this thread while it works on a piece. oneDNN configures them too, for its own shapes.
class TileSession {
 public:
  explicit TileSession(const TileShapes& shapes = {}) {
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

}  // namespace sps::ops

#endif
