// The GPU's code behind decode_program.h. (No fmt: CUDA sources include this.)
#pragma once

#include <memory>

#include "ops/decode_attention/decode_attention_cuda.h"
#include "ops/decode_linear/decode_linear_cuda.h"

namespace sps::ops::decode_program {

// The stages, on the host and in the GPU's memory, and what is launched.
class GpuList {
 public:
  virtual ~GpuList() = default;
  virtual bool add(const DecodeCall& call) = 0;
  virtual bool add(const decode::Problem& attention) = 0;  // with rotation
  virtual void launch() = 0;
  virtual void upload() = 0;
};

bool usable_cuda();
std::unique_ptr<GpuList> make_list_cuda(const Exec& ex, int64_t most_stages);

}  // namespace sps::ops::decode_program
