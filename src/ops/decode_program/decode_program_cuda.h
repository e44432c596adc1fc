// The GPU's code behind decode_program.h. (No fmt: CUDA sources include this.)
#pragma once

#include <memory>
#include <vector>

#include "ops/decode_attention/decode_attention_cuda.h"
#include "ops/decode_linear/decode_linear_cuda.h"
#include "ops/decode_program/decode_program.h"

namespace sps::ops::decode_program {

// The stages, on the host and in the GPU's memory, and what is launched.
class GpuList {
 public:
  virtual ~GpuList() = default;
  virtual bool add(const DecodeCall& call) = 0;
  // With rotation; and the rows that it reads and writes.
  virtual bool add(const decode::Problem& attention, std::vector<Tensor> reads,
                   std::vector<Tensor> writes) = 0;
  virtual void launch() = 0;
  virtual void upload() = 0;
  virtual DecodeProgram::Launches launches() const = 0;
};

bool usable_cuda();
std::unique_ptr<GpuList> make_list_cuda(const Exec& ex, int64_t most_stages, bool mail);

}  // namespace sps::ops::decode_program
