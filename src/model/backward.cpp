// The backward pass: forward.cpp's sub-layers in reverse. A stream's gradient travels down its residual
// (`Gradients::Stream::residual`, with a copy in the compute dtype for the matrix products); whatever else
// reads a residual or a key adds to it on the way.
#include "model/model.h"
#include "ops/embedding/embedding.h"
#include "ops/fold_gain/fold_gain.h"
#include "ops/gates/gates.h"
#include "ops/linear/linear.h"
#include "ops/linear_rmsnorm/linear_rmsnorm.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rows/rows.h"
#include "ops/swiglu_linear/swiglu_linear.h"

namespace sps {

namespace {

// Where rmsnorm_backward puts the compute-dtype copy: nowhere if the residual is that dtype itself.
Tensor copy_target(const Gradients::Stream& g) {
  return g.residual.data == g.residual_act.data ? Tensor{} : g.residual_act;
}
Tensor if_live(const Gradients::Stream& g) {
  return g.live ? g.residual : Tensor{};
}

}  // namespace

void Model::backward() {
  const bool frozen = options_.freeze.state;  // then no gradient enters the state stream: x is never live
  g_.x.live = g_.p.live = false;
  std::fill(g_.level_live.begin(), g_.level_live.end(), false);
  for (const Tensor& late : g_.late_kv)
    if (late && !frozen) ops::fill(ex_, late, 0);
  if (g_.read_head_kv && !options_.freeze.read_head) ops::fill(ex_, g_.read_head_kv, 0);

  Gradients::Stream& out = config().readout == Readout::pred ? g_.p : g_.x;
  ops::rmsnorm_backward(ex_, g_.final_n.rows_from(0, picked_count_), a_.final_s.rows_from(0, picked_count_),
                        master(params_.final_norm), a_.final_rstd.rows_from(0, picked_count_), {},
                        out.residual, copy_target(out), grad(params_.final_norm), pick());
  out.live = true;
  if (!plan_.eliminate_dead && !frozen) {
    // The other stream's rows run through every block although nothing reads their end: its gradient is zero
    // there.
    Gradients::Stream& other = &out == &g_.p ? g_.x : g_.p;
    if (other.residual) {
      ops::fill(ex_, other.residual, 0);
      if (copy_target(other)) ops::fill(ex_, other.residual_act, 0);
      other.live = true;
    }
  }

  const int64_t alive = plan_.state_blocks_alive();
  bool top_done = false;
  // The level above the state tower collects its gradient from every reader before the tower's own backward.
  const auto finish_top = [&] {
    if (top_done || a_.top.empty()) return;
    top_done = true;
    backward_readers(alive);
    if (plan_.read_head && !options_.freeze.read_head) backward_read_head();
    if (!frozen) add_level_gradient(alive, g_.x);
  };
  for (auto stage = plan_.stages.rbegin(); stage != plan_.stages.rend(); ++stage) {
    if (stage->state >= 0 && stage->state < alive && !plan_.joint) finish_top();
    backward_stage(*stage);
    if (stage->state < 0 && stage->pred == 0 && config().pred_input == PredInput::state) {
      if (!frozen) {
        ops::copy_rows(ex_, g_.p.residual, g_.level[size_t(alive)]);
        g_.level_live[size_t(alive)] = true;
      }
      g_.p.live = false;
    }
  }
  finish_top();

  if (g_.x.live) ops::embedding_backward(ex_, input_.tokens, g_.x.residual, grad(params_.embed), {});
  if (!g_.p.live) return;
  switch (config().pred_input) {
    case PredInput::token:
      if (frozen)
        ops::sum_rows(ex_, g_.p.residual, grad(params_.pred_input));
      else
        ops::embedding_backward(ex_, input_.tokens, g_.p.residual, grad(params_.embed),
                                grad(params_.pred_input));
      break;
    case PredInput::table:
      ops::embedding_backward(ex_, input_.tokens, g_.p.residual, grad(params_.pred_embed), {});
      break;
    case PredInput::row:
    case PredInput::vector:
      ops::sum_rows(ex_, g_.p.residual, prediction_start_grad());
      break;
    case PredInput::state:
      break;  // went on into the state tower
  }
}

void Model::backward_stage(const Stage& stage) {
  make_again(stage);
  const bool level = stage.state >= 0 && plan_.state[size_t(stage.state)] != Need::none;
  const bool x = level && !options_.freeze.state;
  const bool p = stage.pred >= 0 && plan_.pred[size_t(stage.pred)] != Need::none;
  const bool x_rows = x && plan_.state[size_t(stage.state)] >= Need::pool;
  const bool p_rows = p && plan_.pred[size_t(stage.pred)] >= Need::pool;
  const StreamActivations& both = a_.both[size_t(&stage - plan_.stages.data())];
  // Together only where both carry a gradient.
  const bool tail = !both.o.empty() && g_.x.live && g_.p.live;
  const auto block = [&](const Walk& w) { return &w == &p_ ? stage.pred : stage.state; };
  if (pools()) {
    if (x_rows || p_rows) backward_pooled(stage.state);
    each_stream_backward(x_rows, p_rows, tail,
                         [&](Walk& w, Gradients::Stream& g) { backward_norm2(w, g, block(w)); });
  } else {
    each_stream_backward(x_rows, p_rows, tail,
                         [&](Walk& w, Gradients::Stream& g) { backward_ffn(w, g, block(w)); });
  }
  each_stream_backward(x_rows, p_rows, tail,
                       [&](Walk& w, Gradients::Stream& g) { backward_out(w, g, block(w)); });
  if (x_rows || p_rows) backward_attention(stage);
  if (level) backward_readers(stage.state);
  if (x && p && !both.qkv.empty() && g_.x.live && g_.p.live && !g_.level_live[size_t(stage.state)] &&
      g_.late_kv[size_t(stage.state)].empty()) {
    backward_projections(both_, g_.both, stage.state);
    return;
  }
  if (p) {
    if (stage.pred == 0 && plan_.constant_start)
      backward_constant_start();
    else
      backward_projections(p_, g_.p, stage.pred);
  }
  if (x) {
    add_level_gradient(stage.state, g_.x);
    backward_projections(x_, g_.x, stage.state);
  }
}

template <class SubLayer>
void Model::each_stream_backward(bool x, bool p, bool together, SubLayer&& sub_layer) {
  if (x && p && together) {
    g_.both.live = true;
    sub_layer(both_, g_.both);
    return;
  }
  if (p) sub_layer(p_, g_.p);
  if (x) sub_layer(x_, g_.x);
}

// Puts a level's collected gradient onto the stream's residual.
void Model::add_level_gradient(int64_t level, Gradients::Stream& g) {
  if (!g_.level_live[size_t(level)]) return;
  const Tensor d = g_.level[size_t(level)];
  if (g.live)
    ops::add_rows(ex_, g.residual, d, g.residual);
  else
    ops::copy_rows(ex_, d, g.residual);
  g.live = true;
  if (copy_target(g)) ops::copy_rows(ex_, g.residual, g.residual_act);
}

void Model::backward_ffn(Walk& w, Gradients::Stream& g, int64_t b) {
  const BlockParameters& p = (*w.params)[size_t(b)];
  if (p.norm2 == kNoParameter) return;
  SPS_CHECK(g.live);
  StreamActivations& s = (*w.acts)[size_t(b)];
  backward_swiglu(p, s, s.n2, g.residual_act);
  ops::linear_rmsnorm_backward(ex_, s.gate_up, weight(p.gate_up), g.n, s.s2, master(p.norm2), s.rstd2,
                               if_live(g), g.residual, copy_target(g), grad(p.norm2));
  g.live = true;
}

// All but the gradient of `in`, what the FFN read. gate_up is overwritten by its gradient; h holds its own
// gradient and then itself, made again on the way.
void Model::backward_swiglu(const BlockParameters& p, StreamActivations& s, Tensor in, Tensor d_out) {
  ops::swiglu_linear_backward(ex_, d_out, weight(p.down), s.gate_up, s.h, s.gate_up, s.h);
  ops::linear_backward_weight(ex_, d_out, s.h, grad(p.down));
  ops::linear_backward_weight(ex_, s.gate_up, in, grad(p.gate_up));
}

void Model::backward_norm2(Walk& w, Gradients::Stream& g, int64_t b) {
  StreamActivations& s = (*w.acts)[size_t(b)];
  const int norm2 = (*w.params)[size_t(b)].norm2;
  ops::rmsnorm_backward(ex_, g.n, s.s2, master(norm2), s.rstd2, if_live(g), g.residual, copy_target(g),
                        grad(norm2));
  g.live = true;
}

void Model::backward_pooled(int64_t b) {
  StreamActivations &x = a_.state[size_t(b)], &p = a_.pred[size_t(b)];
  const BlockParameters& w = params_.state[size_t(b)];
  const Activations::Pool& pool = a_.pool[size_t(b)];
  // The state's output gate is dead where nothing above reads the state (its residual carries no gradient
  // there).
  const bool both = plan_.state[size_t(b)] == Need::all && g_.x.live;
  const auto of_state = [&](Tensor t) { return both ? t : Tensor{}; };
  const ops::GateRows gates{pool.gate, of_state(x.gate), p.gate}, t{{}, of_state(g_.x.gate), g_.p.gate};
  ops::scatter_backward(ex_, of_state(g_.x.residual_act), g_.p.residual_act, pool.f, gates, g_.f, t);
  backward_swiglu(w, x, pool.m, g_.f);
  ops::linear_backward_input(ex_, x.gate_up, weight(w.gate_up), g_.f);
  ops::pool_backward(ex_, g_.f, x.n2, p.n2,
                     {master(w.pool_in), of_state(master(w.pool_state)), master(w.pool_pred)}, gates, t,
                     g_.x.n, g_.p.n, {grad(w.pool_in), of_state(grad(w.pool_state)), grad(w.pool_pred)});
}

void Model::backward_out(Walk& w, Gradients::Stream& g, int64_t b) {
  StreamActivations& s = (*w.acts)[size_t(b)];
  const int out = (*w.params)[size_t(b)].out;
  SPS_CHECK(g.live);
  ops::linear_backward_input(ex_, g.residual_act, weight(out), g.o);
  ops::linear_backward_weight(ex_, g.residual_act, s.o, grad(out));
}

void Model::backward_attention(const Stage& stage) {
  const AttentionCall call = attention_call(stage, true);
  ops::attention_backward(ex_, call.shape, call.queries, call.keys, call.query_grads, call.key_grads);
}

void Model::backward_projections(Walk& w, Gradients::Stream& g, int64_t b) {
  StreamActivations& s = (*w.acts)[size_t(b)];
  const BlockParameters& p = (*w.params)[size_t(b)];
  const bool query = !s.q.empty(), keys = !s.k.empty();
  const auto head_gain_grad = [&](int gain) { return gain == kNoParameter ? Tensor{} : grad(gain); };
  const Tensor dqkv = g.qkv.cols_from(0, s.qkv.cols);
  if (query) {
    const Tensor dq = dqkv.cols_from(0, s.q.cols);
    ops::rope_backward(ex_, dq, w.tower->heads, rope(b), positions(w), qk_norm(p.q_norm), s.q_in, s.q_rstd,
                       dq, head_gain_grad(p.q_norm));
  }
  if (keys) {
    const int64_t from = s.q.cols, half = s.k.cols;
    const Tensor dk = dqkv.cols_from(from, half), dv = dqkv.cols_from(from + half, half);
    Tensor from_k = dk;
    if (&w == &x_ && !g_.late_kv[size_t(b)].empty()) {
      // Several stages read these keys: their gradients were added up in f32.
      const Tensor late = g_.late_kv[size_t(b)];
      from_k = late.cols_from(0, half);
      ops::copy_rows(ex_, late.cols_from(half, half), dv);
    }
    ops::rope_backward(ex_, from_k, w.tower->kv_heads, rope(b), positions(w), qk_norm(p.k_norm), s.k_in,
                       s.k_rstd, dk, head_gain_grad(p.k_norm));
  }
  ops::linear_backward_weight(ex_, dqkv, s.n1, qkv_weight(p, query, keys, true));
  ops::linear_rmsnorm_backward(ex_, dqkv, qkv_weight(p, query, keys, false), g.n, s.s1, master(p.norm1),
                               s.rstd1, if_live(g), g.residual, copy_target(g), grad(p.norm1));
  g.live = true;
}

// Every prediction row began as the same vector: the rows' gradients are summed before the products, which
// then run on one row.
void Model::backward_constant_start() {
  StreamActivations& s = a_.pred[0];
  const BlockParameters& p = params_.pred[0];
  Gradients::Stream& g = g_.p;
  const bool query = !s.q.empty(), keys = !s.k.empty();
  const auto head_gain_grad = [&](int gain) { return gain == kNoParameter ? Tensor{} : grad(gain); };
  const Tensor one = g.one.cols_from(0, s.qkv.cols);
  if (query)
    ops::rope_backward(ex_, g.qkv.cols_from(0, s.q.cols), p_.tower->heads, rope(0), input_.positions,
                       qk_norm(p.q_norm), s.q_in, s.q_rstd, one.cols_from(0, s.q.cols),
                       head_gain_grad(p.q_norm));
  if (keys) {
    const int64_t from = s.q.cols, half = s.k.cols;
    ops::rope_backward(ex_, g.qkv.cols_from(from, half), p_.tower->kv_heads, rope(0), input_.positions,
                       qk_norm(p.k_norm), s.k_in, s.k_rstd, one.cols_from(from, half),
                       head_gain_grad(p.k_norm));
    ops::fill(ex_, g.one_v, 0);
    ops::sum_rows(ex_, g.qkv.cols_from(from + half, half), g.one_v);
    ops::copy_rows(ex_, g.one_v, one.cols_from(from + half, half));
  }
  const Tensor dn = g.n.rows_from(0, 1);
  ops::linear_backward_input(ex_, one, qkv_weight(p, query, keys, false), dn);
  ops::linear_backward_weight(ex_, one, s.n1, qkv_weight(p, query, keys, true));
  ops::fill(ex_, g.one_sum, 0);
  if (g.live) ops::sum_rows(ex_, g.residual, g.one_sum);
  ops::rmsnorm_backward(ex_, dn, s.s1, master(p.norm1), s.rstd1, g.one_sum, g.one_sum, {}, grad(p.norm1));
  const Tensor start = prediction_start_grad();
  ops::add_rows(ex_, start, g.one_sum, start);
  g.live = false;
}

void Model::backward_readers(int64_t level) {
  for (ReaderActivations& r : a_.readers)
    if (r.level == level) backward_reader(r);
}

void Model::backward_read_head() {
  ops::copy_rows(ex_, g_.read_head_kv, a_.read_head.dkv);
  backward_reader(a_.read_head);
}

void Model::backward_reader(ReaderActivations& r) {
  const bool head = r.blocks.empty();
  const Tower& tower = head ? config().state : config().pred;
  const auto params = [&](size_t n) -> const BlockParameters& { return reader_parameters(r, n); };
  const int64_t kv = 2 * tower.kv_heads * config().head_dim;
  const size_t readers = r.k.size();
  for (size_t n = 0; n < readers; ++n) {
    const int gain = params(n).read_k_norm;
    const Tensor dk = r.dkv.cols_from(int64_t(n) * kv, kv / 2);
    ops::rope_backward(ex_, dk, tower.kv_heads, rope(head ? 0 : r.blocks[n]), input_.positions, qk_norm(gain),
                       r.k_in[n], r.k_rstd[n], dk, gain == kNoParameter ? Tensor{} : grad(gain));
  }
  const auto rows = [&](Tensor w, size_t n) { return w.rows_from(params(n).read_kv_from, kv); };
  if (options_.recompute != Recompute::none) norm_reader(r, state_level(r.level));
  const Tensor level = state_level(r.level), dlevel = g_.level[size_t(r.level)];
  const bool frozen = options_.freeze.state;
  const Tensor before = g_.level_live[size_t(r.level)] ? dlevel : Tensor{};
  Tensor gain = master(params(0).read_norm), gain_grad = grad(params(0).read_norm);
  if (r.weight.empty()) {
    ops::linear_backward_input(ex_, r.dkv, rows(weight(params(0).read_kv), 0), g_.reader_n);
    ops::linear_backward_weight(ex_, r.dkv, r.n, rows(grad(params(0).read_kv), 0));
  } else {
    const Tensor fold = g_.fold.rows_from(0, r.weight.rows);
    ops::fill(ex_, fold, 0);
    if (!frozen) ops::linear_backward_input(ex_, r.dkv, r.weight, g_.reader_n);
    ops::linear_backward_weight(ex_, r.dkv, r.n, fold);
    for (size_t n = 0; n < readers; ++n)
      ops::fold_gain_backward(ex_, fold.rows_from(int64_t(n) * kv, kv), rows(master(params(n).read_kv), n),
                              master(params(n).read_norm), rows(grad(params(n).read_kv), n),
                              grad(params(n).read_norm));
    if (frozen) return;
    gain = unit_gain_, gain_grad = g_.unit_gain;  // the unit gain is no parameter: its gradient is dropped
  }
  // Of a frozen level only the gain's gradient is wanted; what lands in dlevel goes no further.
  ops::rmsnorm_backward(ex_, g_.reader_n, level, gain, r.rstd, before, dlevel, {}, gain_grad);
  g_.level_live[size_t(r.level)] = !frozen;
}

}  // namespace sps
