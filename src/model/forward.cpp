// The forward pass, sub-layer by sub-layer, in the order of the papers' formulas (model spec, sections 1-4
// and 9; two-tower spec, section 1).
#include <cmath>

#include "model/model.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/embedding/embedding.h"
#include "ops/fold_gain/fold_gain.h"
#include "ops/gates/gates.h"
#include "ops/linear/linear.h"
#include "ops/linear_rmsnorm/linear_rmsnorm.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rows/rows.h"
#include "ops/swiglu_linear/swiglu_linear.h"

namespace sps {

// What a pass launches depends on how many rows it picks, which differs from batch to batch. So on a GPU it
// is rounded up to sixteenths of all rows: passes come again, and each is a graph.
int64_t Model::rows_to_pick(int64_t scored, int64_t rows) const {
  if (!plan_.eliminate_dead) return rows;
  if (ex_.device == Device::cpu || scored == 0) return scored;
  const int64_t unit = (rows + 15) / 16;
  return std::min(rows, (scored + unit - 1) / unit * unit);
}

void Model::begin(const ModelInput& input, double scale) {
  SPS_CHECK(input.batch > 0 && input.length > 0 && input.rows() <= options_.max_rows);
  SPS_CHECK(input.length <= config().context);
  for (const auto& column : {input.tokens, input.document_start, input.positions})
    SPS_CHECK(int64_t(column.size()) == input.rows());
  if (laid_out_rows_ != input.rows()) {
    const Arena::Scope reuse(memory_);  // the same memory is laid out anew for every number of rows
    lay_out(shapes(), input.rows(), memory_, a_, g_);
    laid_out_rows_ = input.rows();
  }
  input_ = input;

  pass_ = ex_.device == Device::cuda ? 1 - pass_ : 0;
  Pass& pass = passes_[pass_];
  collect(pass);
  // Final norm, head and loss run over the rows that carry a loss, and over as many others as are wanted.
  int32_t* const picked = pass.list(kPicked, options_.max_rows);
  int32_t* const targets = pass.list(kTargets, options_.max_rows);
  const auto rows = int64_t(input.targets.size());
  const int64_t scored = rows - std::ranges::count_if(input.targets, [](int32_t t) { return t < 0; });
  int64_t others = rows_to_pick(scored, rows) - scored;
  picked_count_ = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t target = input.targets[size_t(r)];
    if (target < 0 && --others < 0) continue;
    picked[picked_count_] = int32_t(r);
    targets[picked_count_++] = target;
  }
  *pass.scale(options_.max_rows) = float(scale);
  put_input();
}

// Names the lists of the pass where the operations can read them, and brings them there.
void Model::put_input() {
  Pass& pass = passes_[pass_];
  const int64_t most = options_.max_rows;
  const auto rows = size_t(input_.rows()), n = size_t(picked_count_);
  const auto put = [&](std::span<const int32_t> numbers, List list, size_t from = 0) {
    std::copy(numbers.begin(), numbers.end(), pass.list(list, most) + from);
  };
  put(input_.tokens, kTokens);
  put(input_.document_start, kStarts);
  put(input_.positions, kPositions);
  put(input_.positions, kPositions, rows);  // right behind: one list for the rows of both streams
  pass.picked = {pass.list(kPicked, most), n};
  pass.targets = {pass.list(kTargets, most), n};
  picked_all_ = n == rows;

  const int32_t* there = pass.list(kTokens, most);
  if (ex_.device == Device::cuda) {
    copy_bytes(ex_, indices_.data(), there, size_t(kLists * most) * sizeof(int32_t) + sizeof(float));
    there = reinterpret_cast<const int32_t*>(indices_.data());
  }
  const auto at = [&](List list, size_t count) {
    return std::span<const int32_t>{there + list * most, count};
  };
  input_.tokens = at(kTokens, rows);
  input_.document_start = at(kStarts, rows);
  input_.positions = at(kPositions, rows);
  input_.targets = {};
  positions_of_both_ = at(kPositions, 2 * rows);
  picked_ = at(kPicked, n);
  picked_targets_ = at(kTargets, n);
  scale_ = Tensor{const_cast<int32_t*>(there) + kLists * most, 1, 1, 1, DType::f32, ex_.device};
}

template <class SubLayer>
void Model::each_stream(bool x, bool p, bool together, SubLayer&& sub_layer) {
  const auto adjacent = [](const Tensor& a, const Tensor& b) {
    return a.rows == b.rows && a.dense() && b.dense() &&
           static_cast<std::byte*>(a.data) + size_t(a.count()) * dtype_size(a.dtype) == b.data;
  };
  if (x && p && together && adjacent(x_.residual, p_.residual)) {
    // The state's rows come first, so what begins there is both.
    const auto twice = [](Tensor t) {
      t.rows *= 2;
      return t;
    };
    both_.residual = twice(x_.residual), both_.delta = a_.delta_both;
    both_.pending = x_.pending, both_.normed = x_.normed;
    sub_layer(both_);
    const int64_t rows = input_.rows();
    x_.residual = both_.residual.rows_from(0, rows), p_.residual = both_.residual.rows_from(rows, rows);
    x_.pending = p_.pending = both_.pending, x_.normed = p_.normed = both_.normed;
    return;
  }
  if (x) sub_layer(x_);
  if (p) sub_layer(p_);
}

void Model::forward() {
  ops::embedding_forward(ex_, input_.tokens, master(params_.embed), {}, a_.x0);
  x_.delta = a_.delta_x, x_.residual = a_.x0, x_.pending = false, x_.normed = -1;
  if (config().has_pred()) start_prediction();

  const int64_t alive = plan_.state_blocks_alive();
  if (alive == 0) forward_readers(0, a_.x0);
  for (const Stage& stage : plan_.stages) {
    const bool first_of_pred = stage.state < 0 && stage.pred == 0;
    if (first_of_pred && config().pred_input == PredInput::state) p_.residual = a_.top, p_.pending = false;
    const bool x = stage.state >= 0 && plan_.state[size_t(stage.state)] != Need::none;
    const bool p = stage.pred >= 0 && plan_.pred[size_t(stage.pred)] != Need::none;
    const auto block = [&](const Walk& w) { return &w == &p_ ? stage.pred : stage.state; };
    const StreamActivations& both = a_.both[size_t(&stage - plan_.stages.data())];
    each_stream(x, p, !both.n1.empty() && walks_agree(), [&](Walk& w) { forward_norm1(w, block(w)); });
    if (x) forward_readers(stage.state, a_.state[size_t(stage.state)].s1);
    each_stream(x, p, !both.qkv.empty(), [&](Walk& w) { forward_projections(w, block(w)); });

    const bool x_rows = x && plan_.state[size_t(stage.state)] >= Need::pool;
    const bool p_rows = p && plan_.pred[size_t(stage.pred)] >= Need::pool;
    if (x_rows || p_rows) forward_attention(stage);
    const bool tail = !both.o.empty();
    each_stream(x_rows, p_rows, tail, [&](Walk& w) { forward_out(w, block(w)); });
    if (pools()) {
      each_stream(x_rows, p_rows, tail, [&](Walk& w) { forward_norm2(w, block(w)); });
      if (x_rows || p_rows) forward_pooled(stage.state);
    } else {
      each_stream(x_rows, p_rows, tail, [&](Walk& w) { forward_ffn(w, block(w)); });
    }
    if (x && stage.state == alive - 1 && !a_.top.empty()) {
      SPS_CHECK(x_.pending);
      ops::add_rows(ex_, x_.residual, x_.delta, a_.top);
      forward_readers(alive, a_.top);
      if (plan_.read_head) forward_reader(a_.read_head, a_.top);
    }
  }
  forward_readout();
}

void Model::start_prediction() {
  p_.delta = a_.delta_p, p_.pending = false, p_.normed = -1;
  switch (config().pred_input) {
    case PredInput::row:
    case PredInput::vector:
      p_.residual = prediction_start();
      if (!plan_.constant_start) {
        ops::copy_rows(ex_, p_.residual, a_.p0);
        p_.residual = a_.p0;
      }
      break;
    case PredInput::token:
      ops::embedding_forward(ex_, input_.tokens, master(params_.embed), master(params_.pred_input), a_.p0);
      p_.residual = a_.p0;
      break;
    case PredInput::table:
      ops::embedding_forward(ex_, input_.tokens, master(params_.pred_embed), {}, a_.p0);
      p_.residual = a_.p0;
      break;
    case PredInput::state:
      break;  // begins when the state tower has finished
  }
}

void Model::forward_norm1(Walk& w, int64_t b) {
  if (w.normed == b) return;
  StreamActivations& s = (*w.acts)[size_t(b)];
  if (!w.pending) s.s1 = w.residual;
  ops::rmsnorm_forward(ex_, w.residual, w.pending ? w.delta : Tensor{}, master((*w.params)[size_t(b)].norm1),
                       float(config().norm_eps), s.s1, s.n1, s.rstd1);
  w.residual = s.s1, w.pending = false;
}

void Model::forward_projections(Walk& w, int64_t b) {
  StreamActivations& s = (*w.acts)[size_t(b)];
  const BlockParameters& p = (*w.params)[size_t(b)];
  const bool query = !s.q.empty(), keys = !s.k.empty();
  ops::linear_forward(ex_, s.n1, qkv_weight(p, query, keys, false), s.qkv);
  if (query)
    ops::rope_forward(ex_, s.q_in, w.tower->heads, rope(b), positions(w), qk_norm(p.q_norm), s.q_rstd, s.q);
  if (keys) {
    ops::rope_forward(ex_, s.k_in, w.tower->kv_heads, rope(b), positions(w), qk_norm(p.k_norm), s.k_rstd,
                      s.k);
    if (s.v.data != s.v_in.data) ops::copy_rows(ex_, s.v_in, s.v);
  }
}

void Model::forward_readers(int64_t level, Tensor residual) {
  for (ReaderActivations& r : a_.readers)
    if (r.level == level) forward_reader(r, residual);
}

void Model::forward_reader(ReaderActivations& r, Tensor residual) {
  const bool head = r.blocks.empty();
  const Tower& tower = head ? config().state : config().pred;
  const auto params = [&](size_t n) -> const BlockParameters& { return reader_parameters(r, n); };
  const int64_t kv = 2 * tower.kv_heads * config().head_dim;
  const size_t readers = r.k.size();
  const bool folded = !r.weight.empty();
  norm_reader(r, residual);
  Tensor w = weight(params(0).read_kv).rows_from(params(0).read_kv_from, kv);
  if (folded) {
    for (size_t n = 0; n < readers; ++n)
      ops::fold_gain_forward(ex_, master(params(n).read_kv).rows_from(params(n).read_kv_from, kv),
                             master(params(n).read_norm), r.weight.rows_from(int64_t(n) * kv, kv));
    w = r.weight;
  }
  ops::linear_forward(ex_, r.n, w, r.kv);
  for (size_t n = 0; n < readers; ++n)
    ops::rope_forward(ex_, r.k_in[n], tower.kv_heads, rope(head ? 0 : r.blocks[n]), input_.positions,
                      qk_norm(params(n).read_k_norm), r.k_rstd[n], r.k[n]);
}

// A level's only reader norms with its own gain; several share rows normed with gain 1 and carry their gains
// in their weights.
void Model::norm_reader(ReaderActivations& r, Tensor residual) {
  const Tensor gain = r.weight.empty() ? master(reader_parameters(r, 0).read_norm) : unit_gain_;
  ops::rmsnorm_forward(ex_, residual, {}, gain, float(config().norm_eps), residual, r.n, r.rstd);
}

Model::AttentionCall Model::attention_call(const Stage& stage, bool gradients) {
  const ModelConfig& c = config();
  const Tower& tower = stage.state >= 0 ? c.state : c.pred;
  AttentionCall call;
  call.shape = {input_.batch,          input_.length,      tower.heads,
                tower.kv_heads,        c.head_dim,         float(1.0 / std::sqrt(double(c.head_dim))),
                input_.document_start, options_.skip_tiles};
  constexpr size_t kState = 0, kPred = 1, kRead = 2;  // key sets
  // Backward past a frozen tower: its rows ask for nothing, and nobody wants its keys' gradients.
  const bool frozen = gradients && options_.freeze.state;

  const auto stream = [&](StreamActivations& s, Gradients::Stream& g, size_t q) {
    const int64_t width = s.q.cols;
    call.queries[q].q = s.q, call.queries[q].o = s.o, call.queries[q].lse = s.lse;
    if (gradients) call.query_grads[q] = {g.o, g.qkv.cols_from(0, width)};
  };
  const auto own_keys = [&](StreamActivations& s, Gradients::Stream& g, size_t set) {
    if (s.k.empty()) return;
    const int64_t from = s.q.cols, half = s.k.cols;
    call.keys[set] = {s.k, s.v};
    if (gradients)
      call.key_grads[set] = {g.qkv.cols_from(from, half), g.qkv.cols_from(from + half, half), false};
  };

  if (stage.state >= 0 && plan_.state[size_t(stage.state)] != Need::none) {
    StreamActivations& s = a_.state[size_t(stage.state)];
    own_keys(s, g_.x, kState);
    if (frozen) call.key_grads[kState] = {};
    if (!s.q.empty() && !frozen) {
      stream(s, g_.x, 0);
      call.queries[0].band = {c.band_xx(stage.state), stage.pred >= 0 ? c.xp : Band::none(), Band::none()};
    }
    if (gradients && !frozen && !g_.late_kv[size_t(stage.state)].empty()) {
      const Tensor late = g_.late_kv[size_t(stage.state)];
      call.key_grads[kState] = {late.cols_from(0, late.cols / 2),
                                late.cols_from(late.cols / 2, late.cols / 2), true};
    }
  }
  if (stage.pred >= 0 && plan_.pred[size_t(stage.pred)] != Need::none) {
    StreamActivations& s = a_.pred[size_t(stage.pred)];
    own_keys(s, g_.p, kPred);
    if (!s.q.empty()) {
      stream(s, g_.p, 1);
      const Band px = c.band_px(stage.pred);
      const auto [reader, n] = reader_of(stage.pred);
      const int64_t level = c.levels[size_t(stage.pred)];
      const bool beside = reader == nullptr && stage.state == level;  // the state's keys of this very stage
      call.queries[1].band = {beside ? px : Band::none(), c.pp, beside ? Band::none() : px};
      if (reader != nullptr) {
        call.keys[kRead] = {reader->k[n], reader->v[n]};
        const bool head = reader == &a_.read_head;
        if (gradients && !(head && options_.freeze.read_head)) {
          const int64_t half = reader->k[n].cols, from = int64_t(n) * 2 * half;
          const Tensor d = head ? g_.read_head_kv : reader->dkv;
          call.key_grads[kRead] = {d.cols_from(from, half), d.cols_from(from + half, half), head};
        }
      } else if (!beside && !px.empty()) {
        StreamActivations& k = a_.state[size_t(level)];
        call.keys[kRead] = {k.k, k.v};
        if (gradients && !frozen) {
          const Tensor late = g_.late_kv[size_t(level)];
          call.key_grads[kRead] = {late.cols_from(0, late.cols / 2),
                                   late.cols_from(late.cols / 2, late.cols / 2), true};
        }
      }
    }
  }
  return call;
}

void Model::forward_attention(const Stage& stage) {
  const AttentionCall call = attention_call(stage, false);
  ops::attention_forward(ex_, call.shape, call.queries, call.keys);
}

// The product behind attention and, unless the rows of the two streams mix before it, the norm that follows.
void Model::forward_out(Walk& w, int64_t b) {
  StreamActivations& s = (*w.acts)[size_t(b)];
  const BlockParameters& p = (*w.params)[size_t(b)];
  if (pools()) {
    ops::linear_forward(ex_, s.o, weight(p.out), w.delta);
    w.pending = true;
    return;
  }
  if (p.norm2 == kNoParameter) return forward_end(w, b, s.o, weight(p.out));  // a block of attention alone
  ops::linear_rmsnorm_forward(ex_, s.o, weight(p.out), w.residual, master(p.norm2), float(config().norm_eps),
                              w.delta, s.s2, s.n2, s.rstd2);
  w.residual = s.s2, w.pending = false;
}

void Model::forward_norm2(Walk& w, int64_t b) {
  StreamActivations& s = (*w.acts)[size_t(b)];
  ops::rmsnorm_forward(ex_, w.residual, w.delta, master((*w.params)[size_t(b)].norm2),
                       float(config().norm_eps), s.s2, s.n2, s.rstd2);
  w.residual = s.s2, w.pending = false;
}

void Model::forward_ffn(Walk& w, int64_t b) {
  const BlockParameters& p = (*w.params)[size_t(b)];
  if (p.norm2 == kNoParameter) return;
  StreamActivations& s = (*w.acts)[size_t(b)];
  ops::swiglu_linear_forward(ex_, s.n2, weight(p.gate_up), s.gate_up, s.h);
  forward_end(w, b, s.h, weight(p.down));
}

// The block's last product, delta = x weight^T, and the norm that begins the next block if there is one.
void Model::forward_end(Walk& w, int64_t b, Tensor x, Tensor weight) {
  const size_t next = size_t(b + 1);
  const bool both = &w == &both_;
  if (next == w.acts->size() || (both ? a_.both[next].n1.empty() : (*w.need)[next] == Need::none)) {
    ops::linear_forward(ex_, x, weight, w.delta);
    w.pending = true;
    return;
  }
  StreamActivations& s = (*w.acts)[next];
  ops::linear_rmsnorm_forward(ex_, x, weight, w.residual, master((*w.params)[next].norm1),
                              float(config().norm_eps), w.delta, s.s1, s.n1, s.rstd1);
  w.residual = s.s1, w.pending = false, w.normed = b + 1;
}

void Model::forward_pooled(int64_t b) {
  const StreamActivations& x = a_.state[size_t(b)];
  const BlockParameters& w = params_.state[size_t(b)];
  const Activations::Pool& pool = a_.pool[size_t(b)];
  const ops::GateRows gates = pool_streams(b);
  // The FFN's output feeds both residuals; backward of the gates reads it again.
  ops::swiglu_linear_forward(ex_, pool.m, weight(w.gate_up), x.gate_up, x.h);
  ops::linear_forward(ex_, x.h, weight(w.down), pool.f);
  ops::scatter_forward(ex_, pool.f, gates, gates.a ? x_.delta : Tensor{}, p_.delta);
  x_.pending = bool(gates.a), p_.pending = true;
}

// The pooled FFN's input and all gates; the state's output gate where the state takes the output.
ops::GateRows Model::pool_streams(int64_t b) {
  const StreamActivations &x = a_.state[size_t(b)], &p = a_.pred[size_t(b)];
  const BlockParameters& w = params_.state[size_t(b)];
  const Activations::Pool& pool = a_.pool[size_t(b)];
  const bool state_takes = plan_.state[size_t(b)] == Need::all;
  SPS_CHECK(plan_.pred[size_t(b)] == Need::all);
  const ops::GateRows gates{pool.gate, state_takes ? x.gate : Tensor{}, p.gate};
  ops::pool_forward(ex_, x.n2, p.n2,
                    {master(w.pool_in), state_takes ? master(w.pool_state) : Tensor{}, master(w.pool_pred)},
                    gates, pool.m);
  return gates;
}

// What the backward pass of a stage reads and nobody has kept, by the operations that made it and for the
// same rows at once. Readers' keys and values are kept.
void Model::make_again(const Stage& stage) {
  const auto index = size_t(&stage - plan_.stages.data());
  const Recompute part = made_again_[index];
  if (part == Recompute::none) return;
  const StreamActivations& both = a_.both[index];
  const auto block = [&](const Walk& w) { return &w == &p_ ? stage.pred : stage.state; };
  const auto need = [](const std::vector<Need>& needs, int64_t b) {
    return b < 0 ? Need::none : needs[size_t(b)];
  };
  const Need nx = need(plan_.state, stage.state), np = need(plan_.pred, stage.pred);
  // Of a frozen tower only the keys that prediction rows read have a use; they are an attention call's.
  const bool frozen = options_.freeze.state, whole = part == Recompute::block;
  const bool x = nx != Need::none && (!frozen || whole), p = np != Need::none;
  const bool tail_x = nx >= Need::pool && !frozen, tail_p = np >= Need::pool;
  if (x) x_.residual = a_.state[size_t(stage.state)].s1;
  if (p) p_.residual = a_.pred[size_t(stage.pred)].s1;
  x_.delta = a_.delta_x, p_.delta = a_.delta_p;
  x_.pending = p_.pending = false;

  const auto norm = [&](Walk& w, Tensor s, int gain, Tensor n, Tensor rstd) {
    ops::rmsnorm_forward(ex_, s, {}, master(gain), float(config().norm_eps), s, n, rstd);
    w.residual = s;
  };
  const auto norm1 = [&](Walk& w) {
    const StreamActivations& s = (*w.acts)[size_t(block(w))];
    norm(w, s.s1, (*w.params)[size_t(block(w))].norm1, s.n1, s.rstd1);
  };
  each_stream(x, p, !both.n1.empty(), norm1);
  const bool tail = !both.o.empty();
  if (whole) {
    each_stream(x, p, !both.qkv.empty(), [&](Walk& w) { forward_projections(w, block(w)); });
    if (nx >= Need::pool || tail_p) forward_attention(stage);
    each_stream(tail_x, tail_p, tail, [&](Walk& w) {
      // Behind the attention of a block without an FFN comes nothing that its backward pass reads.
      if ((*w.params)[size_t(block(w))].norm2 != kNoParameter) forward_out(w, block(w));
    });
    if (pools()) each_stream(tail_x, tail_p, tail, [&](Walk& w) { forward_norm2(w, block(w)); });
  } else {
    each_stream(tail_x, tail_p, tail, [&](Walk& w) {
      const StreamActivations& s = (*w.acts)[size_t(block(w))];
      const int norm2 = (*w.params)[size_t(block(w))].norm2;
      if (norm2 != kNoParameter) norm(w, s.s2, norm2, s.n2, s.rstd2);
    });
  }
  if (pools()) {
    if (tail_x || tail_p) make_pooled_again(stage.state, whole);
    return;
  }
  each_stream(tail_x, tail_p, tail, [&](Walk& w) {
    const BlockParameters& b = (*w.params)[size_t(block(w))];
    const StreamActivations& s = (*w.acts)[size_t(block(w))];
    if (b.norm2 != kNoParameter) ops::linear_forward(ex_, s.n2, weight(b.gate_up), s.gate_up);
  });
}

void Model::make_pooled_again(int64_t b, bool output) {
  const StreamActivations& x = a_.state[size_t(b)];
  const BlockParameters& w = params_.state[size_t(b)];
  const Activations::Pool& pool = a_.pool[size_t(b)];
  pool_streams(b);
  if (!output) return ops::linear_forward(ex_, pool.m, weight(w.gate_up), x.gate_up);
  ops::swiglu_linear_forward(ex_, pool.m, weight(w.gate_up), x.gate_up, x.h);
  ops::linear_forward(ex_, x.h, weight(w.down), pool.f);
}

void Model::forward_readout() {
  Walk& w = config().readout == Readout::pred ? p_ : x_;
  const std::span<const int32_t> rows = pick();
  Tensor residual = w.residual;
  ops::rmsnorm_forward(ex_, residual, w.pending ? w.delta : Tensor{}, master(params_.final_norm),
                       float(config().norm_eps), a_.final_s.rows_from(0, picked_count_),
                       a_.final_n.rows_from(0, picked_count_), a_.final_rstd.rows_from(0, picked_count_),
                       rows);
}

}  // namespace sps
