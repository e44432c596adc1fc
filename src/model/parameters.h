// Parameters: every tensor of a model by name, in one flat block of memory each for weights, gradients and
// (in bf16 runs) the rounded copy that matrix products read. Names are stable: a tensor that two models share
// has the same name and, from the same seed, the same initial values.
//
//   embed                     [vocab, d]      state.J.norm1, .norm2          [d]
//   head (untied)             [vocab, d]      state.J.qkv                    [(heads + 2 kv_heads) head_dim,
//   d] final_norm                [d]             state.J.q_norm, .k_norm        [head_dim]  (qk_norm)
//   pred_input (row-free)     [1, d]          state.J.out                    [d, heads head_dim]
//   pred_embed (own table)    [vocab, d]      state.J.gate_up, .down         [2 ffn, d], [d, ffn]
//   read_head.norm, .kv       [d], [2 kv, d]  pool.J.in, .state, .pred       [1, 2d], [1, d], [1, d]
//   pred.I.*: as state.I.* for what is not shared; .q instead of .qkv where p has no keys; .read_norm,
//   .read_kv, .read_k_norm
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/freeze.h"
#include "model/plan.h"
#include "tensor/arena.h"
#include "tensor/exec.h"

namespace sps {

struct Parameter {
  std::string name;
  std::vector<int64_t> shape;  // one or two dimensions
  double init_std = 0;         // N(0, std); 0 with init_mean: constant
  double init_mean = 0;
  bool embedding = false;  // counted as embedding in "non-embedding parameters" (two-tower spec, 1.10)
  bool frozen = false;     // read by the forward pass alone: no gradient, no moments, no update
  bool product = false;    // matrix products read it,
  bool elsewhere = false;  // and something else does too

  int64_t rows() const { return shape.size() == 2 ? shape[0] : 1; }
  int64_t cols() const { return shape.back(); }
  int64_t count() const { return rows() * cols(); }
  bool decays() const {
    return shape.size() >= 2;
  }  // weight decay: everything but norms (training spec, section 4)
};

constexpr int kNoParameter = -1;

// Indices into Parameters; kNoParameter where the block has no such tensor.
struct BlockParameters {
  int norm1 = kNoParameter, qkv = kNoParameter, q_norm = kNoParameter, k_norm = kNoParameter,
      out = kNoParameter;
  int norm2 = kNoParameter, gate_up = kNoParameter, down = kNoParameter;
  int read_norm = kNoParameter, read_kv = kNoParameter,
      read_k_norm = kNoParameter;  // read.kv = own, read head
  int pool_in = kNoParameter, pool_state = kNoParameter, pool_pred = kNoParameter;  // ffn = pooled
  int64_t q_rows = 0,
          kv_rows = 0;       // qkv holds q_rows of queries, then kv_rows of keys and values (half each)
  int64_t read_kv_from = 0;  // first key row in read_kv: q_rows where it is a shared qkv
};

struct ModelParameters {
  std::vector<Parameter> list;
  int embed = kNoParameter, head = kNoParameter, final_norm = kNoParameter;
  int pred_input = kNoParameter, pred_embed = kNoParameter;
  BlockParameters read_head;  // read_norm, read_kv, read_k_norm
  std::vector<BlockParameters> state, pred;

  int64_t count() const;
  int64_t non_embedding() const;
  int64_t frozen() const;
};

// Names, shapes and initial distributions of a model: no memory. Usage error if it cannot be frozen like
// that.
ModelParameters describe_parameters(const ModelConfig& config, Freeze freeze = {});

// f32, or f64 in the reference.
inline DType master_of(DType compute) {
  return compute == DType::f64 ? DType::f64 : DType::f32;
}

// Both moments of AdamW, one row each for what is trained; empty for frozen parameters.
void lay_out_moments(const std::vector<Parameter>& list, DType master, Arena& arena,
                     std::vector<Tensor>& first, std::vector<Tensor>& second);

// Which master weights are held. needed: without those that matrix products alone read, where products read a
// rounded copy (bf16) and there are no gradients.
enum class Masters : uint8_t { all, needed };
int64_t held_masters(const std::vector<Parameter>& list, DType compute, bool gradients, Masters masters);

// The memory behind them.
class ParameterStore {
 public:
  // compute: f32 (weights are read as they are), bf16 (a rounded copy is kept) or f64 (the reference: all in
  // double, on the CPU only). Without gradients (evaluation, generation) only the weights are held.
  ParameterStore(const std::vector<Parameter>& list, DType compute, bool gradients = true,
                 Device device = Device::cpu, Masters masters = Masters::all);

  const std::vector<Parameter>& list() const { return list_; }
  DType compute() const { return compute_; }
  Device device() const { return device_; }
  DType master() const { return master_; }
  // Master weights: f32 (f64). Empty where only the rounded copy is held.
  Tensor weight(int i) const { return weights_[size_t(i)]; }
  Tensor gradient(int i) const { return gradients_[size_t(i)]; }
  Tensor rounded(int i) const { return compute_ == DType::bf16 ? rounded_[size_t(i)] : weights_[size_t(i)]; }
  Tensor all_weights() const { return all_weights_; }  // all that are held, as one row
  Tensor all_gradients() const { return all_gradients_; }

  void initialise(uint64_t seed);  // the same bits on every device
  void round();                    // refresh the bf16 copies from the master weights
  void zero_gradients(const Exec& ex);
  uint64_t hash() const;  // of the master weights; all must be held
  size_t bytes() const { return memory_.peak(); }

 private:
  std::vector<Parameter> list_;
  DType compute_, master_;
  Device device_;
  bool all_masters_;
  Arena memory_;
  std::vector<Tensor> weights_, gradients_, rounded_;
  Tensor all_weights_, all_gradients_, all_rounded_;
};

}  // namespace sps
