// Model: the forward and backward pass of any ModelConfig, written out (design, section 4). forward.cpp and
// backward.cpp follow the formulas of the papers sub-layer by sub-layer; activations.h names what passes
// between them.
//
// Ownership: a Model owns its parameters, gradients and activations; memory is planned at construction and
// nothing is allocated by a pass. A Model is used by one thread at a time (its operations use all threads).
// Inputs lie in the CPU's memory, and what a pass returns is there; on a GPU all else is not.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <tuple>

#include "model/activations.h"
#include "model/input.h"
#include "model/memory_plan.h"
#include "model/parameters.h"
#include "model/plan.h"
#include "model/rope_tables.h"
#include "ops/attention/attention.h"
#include "ops/gates/gates.h"
#include "tensor/device.h"
#include "tensor/graph.h"

namespace sps {

struct Loss {
  double nll = 0;      // sum over the counted positions, nats
  int64_t scored = 0;  // number of counted positions
};

class Model {
 public:
  Model(const ModelConfig& config, const ModelOptions& options);
  Model(const Model&) = delete;  // it points into itself
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return plan_.config; }
  const Plan& plan() const { return plan_; }
  const ModelParameters& parameters() const { return params_; }
  ParameterStore& store() { return store_; }
  const ParameterStore& store() const { return store_; }
  ParameterStore take_store() && { return std::move(store_); }  // no pass may follow
  const ModelOptions& options() const { return options_; }

  // Forward and backward for the loss scale * sum of nll; adds to the gradients.
  Loss train(const ModelInput& input, double scale);
  // The same in two halves, so that a GPU need not stand still between the passes of a step: the loss of
  // everything started since the last take_loss. `input` may change once start_train has returned.
  // On a GPU the pass is a graph from the second time on that its shape comes.
  void start_train(const ModelInput& input, double scale);
  Loss take_loss();
  // On a GPU, [1, 1] f32 there: 1 once a loss of what has been started since the last take_loss is not
  // finite.
  Tensor loss_flag() const { return flag_; }
  // Forward only. With `nll` (input.rows() long), every position's loss is written there (0 where none is
  // counted).
  Loss evaluate(const ModelInput& input, std::span<double> nll = {});
  // Logits of the readout stream at the given rows, into `out` [rows.size(), vocab] (f32; f64 in the
  // reference).
  void logits(const ModelInput& input, std::span<const int32_t> rows, Tensor out);

  // After a pass: the state residual entering block `level`, and a prediction block's residual after it. For
  // probes and tests; empty where the plan never made it.
  const Activations& activations() const { return a_; }
  Tensor state_level(int64_t level) const;

  // What has been taken of the memory behind activations and tables: what plan_memory says, once a pass of
  // max_rows has run.
  size_t activation_bytes() const { return memory_.peak(); }
  size_t table_bytes() const {
    return rope_.bytes() + unit_gain_memory_.peak() + list_bytes(options_.max_rows);
  }
  // Of the rotary tables, and of the lists of the pass under way.
  static size_t table_bytes(const ModelConfig& config, DType master);
  static size_t list_bytes(int64_t rows) {
    return size_t(kLists * rows) * sizeof(int32_t) + 2 * sizeof(float);
  }

 private:
  // What forward and backward keep about one stream while they walk its blocks.
  struct Walk {
    const Tower* tower;
    const std::vector<BlockParameters>* params;
    const std::vector<Need>* need;  // null for both streams together
    std::vector<StreamActivations>* acts;
    Tensor delta;          // pending sub-layer output
    Tensor residual;       // current residual
    bool pending = false;  // delta is still to be added
    int64_t normed = -1;   // the block whose first norm came with the end of the block before
    bool keys(int64_t b) const { return !(*acts)[size_t(b)].k.empty(); }
  };

  // Lists of one number a row. Positions stand there twice, for both streams. Behind the lists follow the
  // scale of the loss and, on a GPU, the flag of losses that are not finite.
  enum List : int64_t { kTokens, kStarts, kPositions, kPositionsAgain, kPicked, kTargets, kLists };
  struct Pass {
    Bytes lists;  // max_rows numbers for each of kTokens .. kTargets, and the scale
    Bytes nll;    // of the picked rows
    std::span<const int32_t> picked, targets;
    StreamMark done;
    bool pending = false;  // its loss has not been added up
    int32_t* list(List list, int64_t max_rows) const {
      return reinterpret_cast<int32_t*>(lists.data()) + list * max_rows;
    }
    float* scale(int64_t max_rows) const { return reinterpret_cast<float*>(list(kLists, max_rows)); }
  };

  // One FFN reads what the gates make of both streams' rows.
  bool pools() const { return config().has_pred() && config().ffn == FfnMode::pooled; }

  ActivationShapes shapes() const {
    return {&plan_, &params_, options_.compute, options_.train, options_.recompute, options_.freeze};
  }

  // forward.cpp
  void begin(const ModelInput& input, double scale);
  int64_t rows_to_pick(int64_t scored, int64_t rows) const;
  void put_input();
  void train_pass();
  void take_nll();
  double nll_at(const Pass& pass, size_t row) const;
  void collect(Pass& pass);
  void forward();
  void start_prediction();
  // Runs a sub-layer of a stage: once for the rows of both streams if they lie together, else for each one
  // that takes part. In the backward pass the prediction stream comes first.
  template <class SubLayer>
  void each_stream(bool x, bool p, bool together, SubLayer&& sub_layer);
  template <class SubLayer>
  void each_stream_backward(bool x, bool p, bool together, SubLayer&& sub_layer);
  bool walks_agree() const { return x_.pending == p_.pending && x_.normed == p_.normed; }

  void forward_norm1(Walk& w, int64_t b);
  void forward_projections(Walk& w, int64_t b);
  void forward_readers(int64_t level, Tensor residual);
  void norm_reader(ReaderActivations& r, Tensor residual);
  void forward_reader(ReaderActivations& r, Tensor residual);
  void forward_attention(const Stage& stage);
  void forward_out(Walk& w, int64_t b);
  void forward_norm2(Walk& w, int64_t b);
  void forward_ffn(Walk& w, int64_t b);
  void forward_end(Walk& w, int64_t b, Tensor x, Tensor weight);
  void forward_pooled(int64_t b);
  ops::GateRows pool_streams(int64_t b);
  void forward_readout();
  std::span<const int32_t> pick() const;
  std::span<const int32_t> positions(const Walk& w) const {
    return &w == &both_ ? positions_of_both_ : input_.positions;
  }

  // backward.cpp
  void backward();
  void backward_stage(const Stage& stage);
  void make_again(const Stage& stage);  // forward.cpp
  void make_pooled_again(int64_t b, bool output);
  void backward_ffn(Walk& w, Gradients::Stream& g, int64_t b);
  void backward_swiglu(const BlockParameters& p, StreamActivations& s, Tensor in, Tensor d_out);
  void backward_norm2(Walk& w, Gradients::Stream& g, int64_t b);
  void backward_pooled(int64_t b);
  void backward_out(Walk& w, Gradients::Stream& g, int64_t b);
  void backward_attention(const Stage& stage);
  void backward_projections(Walk& w, Gradients::Stream& g, int64_t b);
  void backward_constant_start();
  void backward_readers(int64_t level);
  void backward_reader(ReaderActivations& r);
  void backward_read_head();
  void add_level_gradient(int64_t level, Gradients::Stream& g);

  // Both passes describe a stage's attention with the same call.
  struct AttentionCall {
    ops::AttentionShape shape;
    std::array<ops::QueryStream, ops::kMaxQueryStreams> queries;
    std::array<ops::KeySet, ops::kMaxKeySets> keys;
    std::array<ops::QueryGrad, ops::kMaxQueryStreams> query_grads;
    std::array<ops::KeyGrad, ops::kMaxKeySets> key_grads;
  };
  AttentionCall attention_call(const Stage& stage, bool gradients);
  // The reader whose keys a prediction block reads, and its place in it; null where it reads the state's own.
  std::pair<ReaderActivations*, size_t> reader_of(int64_t pred_block);

  // Parameters of a reader's n-th block, or of the read head.
  const BlockParameters& reader_parameters(const ReaderActivations& r, size_t n) const {
    return r.blocks.empty() ? params_.read_head : params_.pred[size_t(r.blocks[n])];
  }

  Tensor weight(int i) const { return store_.rounded(i); }  // for matrix products
  Tensor master(int i) const { return store_.weight(i); }   // for norms, gates, embeddings
  Tensor grad(int i) const { return store_.gradient(i); }
  Tensor prediction_start() const;  // the row or vector of a constant start, f32
  Tensor prediction_start_grad() const;
  const ops::RopeTable& rope(int64_t block) const { return rope_.of(config(), block); }
  ops::QkNorm qk_norm(int gain) const;
  Tensor qkv_weight(const BlockParameters& b, bool query, bool keys, bool gradient) const;

  Exec ex_;
  Plan plan_;
  ModelOptions options_;
  ModelParameters params_;
  std::vector<Recompute> made_again_;  // of each stage
  ParameterStore store_;
  RopeTables rope_;
  Arena memory_, unit_gain_memory_;
  Tensor unit_gain_;
  Activations a_;
  Gradients g_;
  int64_t laid_out_rows_ = -1;
  Walk x_{}, p_{}, both_{};

  // The pass under way. Its lists lie where the operations read them.
  ModelInput input_;
  std::span<const int32_t> positions_of_both_, picked_, picked_targets_;
  Tensor scale_, flag_;
  int64_t picked_count_ = 0;
  bool picked_all_ = true;
  // What a pass brings along from the CPU and leaves there. On a GPU two take turns, so that the next one can
  // be made ready while the last one runs.
  std::array<Pass, 2> passes_;
  size_t pass_ = 0;
  Bytes indices_;         // on a GPU: the lists of the pass under way
  bool started_ = false;  // a pass since the last take_loss
  Loss loss_;             // of the passes that have been collected
  Bytes logits_;          // on a GPU: what logits() copies to the caller
  // Of training passes, by all that their launches depend on: sequences, their length, picked rows.
  StreamGraphs<std::tuple<int64_t, int64_t, int64_t>> graphs_{16};
};

}  // namespace sps
