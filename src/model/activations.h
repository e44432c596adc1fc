// The tensors that one pass leaves for its backward, by name. Residuals and statistics are kept in f32 (f64
// in the reference), what matrix products read and write in the compute dtype. Everything is laid out in one
// arena. What recomputation makes again, and what a forward-only pass has no further use for, lies in memory
// that the stages share: it holds what the stage that ran last has made.
#pragma once

#include <vector>

#include "model/parameters.h"
#include "model/recompute.h"

namespace sps {

// One stream (x or p) in one block. A tensor that the plan does not need stays empty.
struct StreamActivations {
  Tensor s1, rstd1,
      n1;          // residual entering the block [R, d], its statistics, its norm (the constant start: 1 row)
  Tensor qkv;      // projections of n1: queries, keys, values side by side; only what is needed
  Tensor q, k, v;  // what attention reads: rotated (columns of qkv, or memory of their own)
  Tensor q_rstd, k_rstd;  // QK-norm statistics [R, heads]
  Tensor o, lse;          // attention output [R, heads head_dim], log-sum-exp [R, heads]
  Tensor s2, rstd2, n2;   // residual entering the FFN
  Tensor gate_up;         // FFN; in a pooled block the state stream holds it, and h
  Tensor h;               // the FFN's hidden rows, for a moment: one memory for all blocks and both passes
  Tensor gate;            // pooled: this stream's output gate [R, 1]

  Tensor q_in, k_in, v_in;  // the unrotated columns of qkv
};

// Keys and values projected from a state level: by one prediction block, by several at once, or by the read
// head.
struct ReaderActivations {
  int64_t level = 0;
  std::vector<int64_t> blocks;  // prediction blocks served; for the read head: empty
  Tensor n, rstd;               // normalised level
  Tensor weight;                // a level of several readers: weights side by side, gains folded in
  Tensor kv;                    // [R, readers * kv]: keys then values of each reader
  std::vector<Tensor> k, v, k_in, k_rstd;  // per reader
  Tensor dkv;                              // gradient of kv
};

struct Activations {
  Tensor x0, p0;  // embedding output of the streams (p0 empty where p starts elsewhere)
  std::vector<StreamActivations> state, pred;
  // Where a stage treats the rows of both streams alike and with the same weights, they lie one after the
  // other: here as 2R rows, for one product instead of two, while `state` and `pred` hold the halves. What a
  // stage does not treat alike stays empty here.
  std::vector<StreamActivations> both;
  Tensor top;  // state residual above the last block that ran, if anything reads it
  std::vector<ReaderActivations> readers;
  ReaderActivations read_head;
  struct Pool {
    Tensor m, gate, f;  // pooled rows [R, d], their input gate [R, 1], the FFN's output [R, d]
  };
  std::vector<Pool> pool;
  Tensor delta_x, delta_p;  // sub-layer output on its way to the next residual addition
  Tensor delta_both;
  Tensor final_s, final_n, final_rstd;  // rows that carry a loss
  Tensor nll;                           // [R, 1] f32
};

// What backward needs for a moment, and gradients on their way down.
struct Gradients {
  struct Stream {
    Tensor residual, residual_act;  // [R, d] f32 and its copy in the compute dtype (the same tensor in f32)
    Tensor qkv;                     // of the projections, side by side [R, q + kv]
    Tensor one;                     // constant start: [1, q + kv]
    Tensor one_sum;                 // constant start: [1, d] f32, and value sums
    Tensor one_v;
    Tensor o, n;        // [R, heads head_dim], [R, d]
    Tensor gate;        // pooled FFN: of the sum in this stream's output gate [R, 1]
    bool live = false;  // residual holds a gradient
  };
  Stream x, p;
  Stream both;  // as in Activations; `live` is not looked at
  Tensor f;     // of the pooled FFN's output, then of its input
  Tensor reader_n, fold,
      unit_gain;              // readers: d of n, d of the folded weight, gradient sink of the unit gain
  std::vector<Tensor> level;  // [R, d] f32 per state level that something reads, else empty
  std::vector<bool> level_live;
  std::vector<Tensor> late_kv;  // [R, kv] f32 per state block whose keys other stages read
  Tensor read_head_kv;          // the same for the read head
  Tensor final_n;
};

struct ActivationShapes {
  const Plan* plan;
  const ModelParameters* parameters;
  DType compute;
  bool train;
  Recompute recompute = Recompute::none;
  Freeze freeze = {};
};

// Takes all tensors for `rows` rows from the arena (which may be planning).
void lay_out(const ActivationShapes& shapes, int64_t rows, Arena& arena, Activations& a, Gradients& g);
size_t activation_bytes(const ActivationShapes& shapes, int64_t rows);  // that lay_out takes

}  // namespace sps
