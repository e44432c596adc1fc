// Ceilings of memory traffic on this machine.
#pragma once

#include "tensor/memory.h"

namespace sps {

// What all threads together read from 1 GiB of host memory, which it holds.
class ReadCeiling {
 public:
  ReadCeiling();
  double bytes_per_second() const;  // in the fastest of three passes

 private:
  Bytes memory_;
};

// Bytes read and written per second by a copy of 4 GiB within the GPU.
double gpu_copy_bytes_per_second();

}  // namespace sps
