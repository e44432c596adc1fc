// The ring of shared memory that weights pass through, from the warp that loads to those that multiply.
//
// Pieces of any size lie in it one behind the other, whole: what does not fit before the end begins again at
// the front. Both sides walk through the same pieces and so agree on their places. Of every piece a barrier
// says that its bytes are there, another that all warps have read them; kPieces of each take turns.
#pragma once

#include "ops/cuda.cuh"
#include "ops/hopper.cuh"

namespace sps::ops::decode_program {

constexpr int kPieces = kWarp;  // at most in the ring; a lane of the loading warp for each

struct RingBarriers {
  uint64_t full[kPieces], empty[kPieces];
};

// A wait of seconds is a mistake in this kernel: better a trap than a GPU that hangs. A look at what is
// awaited takes some hundred clocks.
class Watchdog {
 public:
  __device__ void look() {
    if (++looks_ == kMostLooks) __trap();
  }

 private:
  static constexpr unsigned kMostLooks = 1 << 24;
  unsigned looks_ = 0;
};

__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}
__device__ __forceinline__ void wait_for(const uint64_t& barrier, uint32_t parity) {
  const uint32_t address = hopper::smem_address(&barrier);
  while (!barrier_passed(address, parity)) {
  }
}

class RingWalk {
 public:
  __device__ explicit RingWalk(int bytes) : bytes_(bytes) {}
  __device__ int slot() const { return int(steps_ % kPieces); }
  __device__ uint32_t parity() const { return steps_ / kPieces % 2; }
  __device__ uint32_t steps() const { return steps_; }
  // Where the next piece begins. It is at most half the ring, see RingRoom.
  __device__ int place(int size) const { return end_ + size <= bytes_ ? end_ : 0; }
  // Bytes that it takes, with what it leaves free at the end of the ring.
  __device__ int taken(int size) const { return place(size) == end_ ? size : size + bytes_ - end_; }
  __device__ void pass(int size) { end_ = place(size) + size, ++steps_; }

 private:
  int bytes_, end_ = 0;
  uint32_t steps_ = 0;
};

// What the loading warp knows of the pieces that it has asked for. Lane i keeps what it has to remember of
// the piece in slot i.
//
// Free places: a piece of at most half the ring takes at most all of it, so that its turn comes. Bytes under
// way: as many as memory needs to be busy, and no more, for what others ask memory for waits behind them.
class RingRoom {
 public:
  __device__ RingRoom(int bytes, int most_under_way) : free_(bytes), quiet_(most_under_way) {}
  // By all lanes: until there is room for the walk's next piece, and its bytes may be asked for.
  __device__ void make(const RingWalk& walk, int size, int bytes, const RingBarriers& barriers) {
    const int taken = walk.taken(size), lane = int(threadIdx.x) % kWarp;
    while (free_ < taken || walk.steps() - freed_ == kPieces) {
      const int oldest = int(freed_ % kPieces);
      wait_for(barriers.empty[oldest], freed_ / kPieces % 2);
      free_ += __shfl_sync(~0U, taken_, oldest);
      if (landed_ == freed_) land(oldest);
      ++freed_;
    }
    while (quiet_ < bytes && landed_ != walk.steps()) {
      const int oldest = int(landed_ % kPieces);
      wait_for(barriers.full[oldest], landed_ / kPieces % 2);
      land(oldest);
    }
    free_ -= taken, quiet_ -= bytes;
    if (lane == walk.slot()) taken_ = taken, asked_ = bytes;
  }

 private:
  __device__ void land(int slot) {
    quiet_ += __shfl_sync(~0U, asked_, slot);
    ++landed_;
  }
  int free_, quiet_, taken_ = 0, asked_ = 0;
  uint32_t freed_ = 0, landed_ = 0;  // pieces that all have read; that are there
};

}  // namespace sps::ops::decode_program
