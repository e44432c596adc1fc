// Attention alone, forward and backward, for the bands of a family.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tensor/tensor.h"

namespace sps {

struct AttentionBench {
  Device device = Device::cpu;
  DType dtype = DType::bf16;
  int64_t batch = 4, length = 4096, heads = 16, kv_heads = 16, head_dim = 64;
  int64_t document = 0;  // mean tokens of a document; 0 = one for each sequence
  int64_t window = 64;   // of sps
};

struct AttentionTime {
  std::string family;
  double forward_ms = 0, backward_ms = 0;  // medians
  double forward_tflops = 0,
         backward_tflops = 0;  // 4 and 10 FLOPs for each visible pair and number of a head
};

// standard, sps(window) and free_pause, one after the other in every round, so that all see the same clocks.
std::vector<AttentionTime> time_attention(const AttentionBench& bench);

}  // namespace sps
