// Ceilings of memory traffic on this machine.
#pragma once

namespace sps {

// Bytes per second that all threads together read from 1 GiB of host memory in one pass: the fastest of
// several.
double read_bytes_per_second();

// Bytes read and written per second by a copy of 4 GiB within the GPU.
double gpu_copy_bytes_per_second();

}  // namespace sps
