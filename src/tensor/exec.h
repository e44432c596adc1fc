// Exec: where operations run. Every operation takes one first; which code runs follows from it and from the dtype:
// f64 runs the plain reference (`<op>_ref.cpp`), f32 and bf16 the fast code of the device.
#pragma once

#include "tensor/tensor.h"

namespace sps {

struct Exec {
  Device device = Device::cpu;
  void* stream = nullptr;  // cudaStream_t on a GPU
};

}  // namespace sps
