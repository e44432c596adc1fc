// FLOPs per token, counted three ways (analysis spec, section 6; two-tower spec, section 2). A multiply-add
// is two.
//   published  the square convention of the two-tower paper: T keys for every query, softmax 3 a head and
//   key, output
//              logits over the tokenizer's ids (eot + 1), nothing for norms, gates, embeddings
//   required   the same terms over the pairs that the bands show (one document of T tokens) and all
//   vocabulary rows,
//              and the gates of pooled layers
//   executed   what this program computes: required minus dead work
// Training is three times forward; a frozen tower counts once, and what the backward pass makes again comes
// on top.
#pragma once

#include <string>
#include <vector>

#include "model/freeze.h"
#include "model/plan.h"
#include "model/recompute.h"

namespace sps {

struct Flops {
  double qkv = 0, read = 0, scores = 0, softmax = 0, weighted = 0, out = 0, ffn = 0, gates = 0, head = 0;
  double state = 0;  // of all these, the state tower's blocks
  double total() const { return qkv + read + scores + softmax + weighted + out + ffn + gates + head; }
};

Flops flops_published(const ModelConfig& config, int64_t length);
Flops flops_required(const ModelConfig& config, int64_t length);
Flops flops_executed(const Plan& plan, int64_t length);
// Of a training step's backward pass on top of three times the forward pass: what it makes again.
Flops flops_made_again(const Plan& plan, Recompute mode, Freeze freeze, int64_t length);
double training_flops(const Flops& forward, Freeze freeze);

// Visible pairs of all bands of one block (or of the whole model) over one document of `length` tokens.
int64_t visible_pairs(const ModelConfig& config, int64_t block, int64_t length);

}  // namespace sps
