// What a model is made of and what it costs, derived from its configuration alone: the substance of `sps
// info`.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "model/flops.h"
#include "model/key_pairs.h"
#include "model/model.h"

namespace sps {

// Keys and values that decoding keeps: of `blocks` blocks, `numbers` a block and token, over one horizon.
struct CacheLine {
  KeyPair::Source kind = KeyPair::state;
  int64_t blocks = 0, numbers = 0;
  Horizon horizon;
};
struct DecodeCache {
  std::vector<CacheLine> lines;
  int64_t persistent_numbers() const;  // kept for every token of the context
  // A sequence of so many tokens holds these on top of that; by default its rings are full.
  int64_t ring_numbers(int64_t tokens = Band::kInf) const;
};
DecodeCache decode_cache(const Plan& plan);

// Rows of each prediction block that a prompt of `length` tokens needs before its first new token: the last
// ones.
std::vector<int64_t> prefill_rows(const Plan& plan, int64_t length);
// Forward FLOPs of such a prompt divided by `length`; the head runs over the last row alone.
double prefill_flops(const Plan& plan, int64_t length);
// Blocks that must run one after the other for one token: the streams of one stage count once.
int64_t serial_blocks(const Plan& plan);
// One phrase for each piece of work that is left out because nothing reads it, or done once instead of for
// every row.
std::vector<std::string> dead_work(const Plan& plan);

struct DescribeOptions {
  std::string name;
  int64_t length = 0;  // tokens of the document that FLOPs, pairs and prompts are counted for; 0: the context
  DType dtype = DType::f32;  // memory while training
  int64_t micro_batch = 1;   // windows of the context in one pass
  Device device = Device::cpu;
  Recompute recompute = Recompute::none;
  Freeze freeze;         // what training leaves as it is
  int64_t picture = 16;  // positions in the picture of the mask, at most kMaxPicture; 0: no picture
};
constexpr int64_t kMaxPicture = 48;

struct Description {
  DescribeOptions options;  // length filled in
  Plan plan;
  int64_t total = 0, non_embedding = 0, no_decay = 0, frozen = 0;  // parameters
  MemoryPlan memory;
  DecodeCache cache;
  std::vector<int64_t> prefill_rows;
  double prefill_flops = 0;
  int64_t serial_blocks = 0;
  std::vector<std::string> dead;
  Flops published, required, executed;
  Flops made_again;  // by the backward pass of training

  const ModelConfig& config() const { return plan.config; }
};
// Usage error for a length or picture out of range.
Description describe(const ModelConfig& config, DescribeOptions options);

nlohmann::ordered_json to_json(const Description& description);
std::string to_text(const Description& description);  // at most 110 columns wide

// The bands of one block as characters: rows are queries, columns keys, '#' is visible. Ends in a newline.
std::string mask_picture(const ModelConfig& config, int64_t block, int64_t length);

std::string grouped(int64_t n);  // 1234567 -> "1,234,567"

}  // namespace sps
