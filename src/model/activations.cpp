#include "model/activations.h"

#include <algorithm>

namespace sps {

namespace {

class Layout {
 public:
  Layout(const ActivationShapes& s, int64_t rows, Arena& arena)
      : plan_(*s.plan),
        c_(s.plan->config),
        params_(*s.parameters),
        act_(s.compute),
        acc_(s.compute == DType::f64 ? DType::f64 : DType::f32),
        train_(s.train),
        stacks_(plan_.joint && c_.state.width == c_.pred.width && c_.state.heads == c_.pred.heads &&
                c_.state.kv_heads == c_.pred.kv_heads),
        rows_(rows),
        arena_(arena) {}

  void forward(Activations& a) {
    const int64_t ds = c_.state.width, dp = c_.pred.width;
    a = {};
    const bool p0 = c_.has_pred() && !plan_.constant_start && c_.pred_input != PredInput::state;
    if (stacks_ && p0) {
      in_halves(acc_, ds, a.x0, a.p0);
    } else {
      a.x0 = acc(ds);
      if (p0) a.p0 = acc(dp);
    }
    if (stacks_) {
      a.delta_both = in_halves(act_, ds, a.delta_x, a.delta_p);
    } else {
      a.delta_x = act(ds);
      if (c_.has_pred()) a.delta_p = act(dp);
    }
    a.state.resize(size_t(c_.state.layers));
    a.pred.resize(size_t(c_.pred.layers));
    a.both.resize(plan_.stages.size());
    for (size_t i = 0; i < plan_.stages.size(); ++i) stage(a, plan_.stages[i], a.both[i]);
    if (c_.has_pred() && c_.ffn == FfnMode::pooled) pooled(a);

    const int64_t alive = plan_.state_blocks_alive();
    if (plan_.level_needed(alive)) a.top = alive == 0 ? a.x0 : acc(ds);
    for (const Plan::LevelReaders& r : plan_.own_readers) {
      a.readers.emplace_back();
      reader(a.readers.back(), r.level, r.blocks, r.folded, params_.pred[size_t(r.blocks[0])], c_.pred);
    }
    if (plan_.read_head) reader(a.read_head, c_.state.layers, {}, false, params_.read_head, c_.state);

    const int64_t dr = c_.readout == Readout::pred ? dp : ds;
    a.final_s = acc(dr);
    a.final_n = act(dr);
    a.final_rstd = acc(1);
    a.nll = acc(1);
  }

  void backward(const Activations& a, Gradients& g) {
    g = {};
    const int64_t ds = c_.state.width, dp = c_.pred.width;
    if (stacks_) {
      streams(g);
    } else {
      stream(g.x, c_.state, true);
      if (c_.has_pred()) stream(g.p, c_.pred, c_.pred_writes_keys());
    }
    if (plan_.constant_start) {
      g.p.one = arena_.take(act_, 1, g.p.qkv.cols);
      g.p.one_sum = arena_.take(acc_, 1, dp);
      g.p.one_v = arena_.take(acc_, 1, std::max<int64_t>(1, c_.pred.kv_heads * c_.head_dim));
    }
    int64_t ffn = 1;
    for (const auto* widths : {&c_.state.ffn, &c_.pred.ffn})
      for (const int64_t w : *widths) ffn = std::max(ffn, w);
    g.h = arena_.take(act_, stacks_ ? 2 * rows_ : rows_, ffn);
    if (c_.ffn == FfnMode::pooled && c_.has_pred()) g.f = act(ds), g.x.gate = acc(1), g.p.gate = acc(1);
    g.final_n = act(c_.readout == Readout::pred ? dp : ds);

    g.level.resize(size_t(c_.state.layers) + 1);
    g.level_live.assign(g.level.size(), false);
    for (int64_t level = 0; level <= c_.state.layers; ++level)
      if (plan_.level_needed(level)) g.level[size_t(level)] = acc(ds);
    int64_t widest = 0;
    for (const ReaderActivations& r : a.readers) widest = std::max(widest, r.weight.rows);
    if (!a.readers.empty() || plan_.read_head) g.reader_n = act(ds);
    if (widest > 0) {
      g.fold = arena_.take(acc_, widest, ds);
      g.unit_gain = arena_.take(acc_, 1, ds);
    }
    g.late_kv.resize(size_t(c_.state.layers));
    if (c_.has_pred() && !plan_.joint && c_.read_kv == ReadKv::state && !c_.px.empty()) {
      const int64_t kv = 2 * c_.state.kv_heads * c_.head_dim;
      for (const int64_t level : c_.levels)
        if (level < c_.state.layers && g.late_kv[size_t(level)].empty()) g.late_kv[size_t(level)] = acc(kv);
      if (plan_.read_head) g.read_head_kv = acc(kv);
    }
  }

 private:
  Tensor act(int64_t cols) { return arena_.take(act_, rows_, cols); }
  Tensor acc(int64_t cols) { return arena_.take(acc_, rows_, cols); }

  // Both streams' rows of one tensor, the state's first.
  Tensor in_halves(DType dtype, int64_t cols, Tensor& x, Tensor& p) {
    const Tensor both = arena_.take(dtype, 2 * rows_, cols);
    x = both.rows_from(0, rows_), p = both.rows_from(rows_, rows_);
    return both;
  }
  // The halves of what has been laid out for both streams together.
  void halve(const StreamActivations& both, StreamActivations& x, StreamActivations& p,
             std::initializer_list<Tensor StreamActivations::*> tensors) const {
    for (const auto tensor : tensors) {
      if ((both.*tensor).empty()) continue;
      x.*tensor = (both.*tensor).rows_from(0, rows_);
      p.*tensor = (both.*tensor).rows_from(rows_, rows_);
    }
  }

  void stage(Activations& a, const Stage& stage, StreamActivations& both) {
    using S = StreamActivations;
    const auto need_of = [](const std::vector<Need>& needs, int64_t b) {
      return b < 0 ? Need::none : needs[size_t(b)];
    };
    const int64_t j = stage.state, i = stage.pred;
    const Need nx = need_of(plan_.state, j), np = need_of(plan_.pred, i);
    S none;
    S &x = nx == Need::none ? none : a.state[size_t(j)], &p = np == Need::none ? none : a.pred[size_t(i)];
    const bool one = i == 0 && plan_.constant_start, keys = np != Need::none && plan_.pred_keys[size_t(i)];
    const bool own_ffn = c_.ffn == FfnMode::separate;
    if (nx == Need::none || np == Need::none) {
      if (nx != Need::none) {
        x.s1 = j == 0 ? a.x0 : acc(c_.state.width);
        block(x, params_.state[size_t(j)], c_.state, nx, true, false, own_ffn);
      }
      if (np != Need::none) {
        if (i > 0) p.s1 = acc(c_.pred.width);
        block(p, params_.pred[size_t(i)], c_.pred, np, keys, one, own_ffn);
      }
      return;
    }

    const BlockParameters &wx = params_.state[size_t(j)], &wp = params_.pred[size_t(i)];
    const bool alike_head = stacks_ && wx.norm1 == wp.norm1 && !one && (j > 0 || !a.p0.empty());
    const bool alike_qkv = alike_head && wx.qkv == wp.qkv && wx.q_norm == wp.q_norm &&
                           wx.k_norm == wp.k_norm && keys && (nx >= Need::pool) == (np >= Need::pool);
    const Need full = own_ffn ? Need::all : Need::pool;
    const bool alike_tail = stacks_ && nx >= full && np >= full && wx.out == wp.out && wx.norm2 == wp.norm2 &&
                            (!own_ffn || (wx.gate_up == wp.gate_up && wx.down == wp.down));

    if (alike_head) {
      if (j > 0)
        both.s1 = in_halves(acc_, c_.state.width, x.s1, p.s1);
      else
        x.s1 = a.x0, p.s1 = a.p0,
        both.s1 = {a.x0.data, 2 * rows_, a.x0.cols, a.x0.stride, a.x0.dtype, a.x0.device};
      head(both, c_.state, 2 * rows_);
      halve(both, x, p, {&S::rstd1, &S::n1});
    } else {
      x.s1 = j == 0 ? a.x0 : acc(c_.state.width);
      if (i > 0) p.s1 = acc(c_.pred.width);
      head(x, c_.state, rows_);
      head(p, c_.pred, one ? 1 : rows_);
    }
    if (alike_qkv) {
      projections(both, c_.state, nx >= Need::pool, true, false, 2 * rows_);
      halve(both, x, p, {&S::qkv, &S::q_in, &S::k_in, &S::v_in, &S::q, &S::k, &S::v, &S::q_rstd, &S::k_rstd});
    } else {
      projections(x, c_.state, nx >= Need::pool, true, false, rows_);
      projections(p, c_.pred, np >= Need::pool, keys, one, rows_);
    }
    if (alike_tail) {
      tail(both, wx, c_.state, nx, own_ffn, 2 * rows_);
      halve(both, x, p, {&S::o, &S::lse, &S::s2, &S::rstd2, &S::n2, &S::gate_up, &S::h});
    } else {
      tail(x, wx, c_.state, nx, own_ffn, rows_);
      tail(p, wp, c_.pred, np, own_ffn, rows_);
    }
  }

  void block(StreamActivations& s, const BlockParameters& b, const Tower& t, Need need, bool keys, bool one,
             bool own_ffn) {
    head(s, t, one ? 1 : rows_);
    projections(s, t, need >= Need::pool, keys, one, rows_);
    tail(s, b, t, need, own_ffn, rows_);
  }
  void head(StreamActivations& s, const Tower& t, int64_t rows) {
    s.rstd1 = arena_.take(acc_, rows, 1);
    s.n1 = arena_.take(act_, rows, t.width);
  }
  // `one`: the projections of one row that begins every position.
  void projections(StreamActivations& s, const Tower& t, bool query, bool keys, bool one, int64_t rows) {
    const int64_t q = query ? t.heads * c_.head_dim : 0, kv = keys ? t.kv_heads * c_.head_dim : 0;
    const int64_t projected = one ? 1 : rows;
    s.qkv = arena_.take(act_, projected, q + 2 * kv);
    // Rotation happens in place, unless the unrotated numbers are needed again or belong to one row for all.
    const bool apart = c_.qk_norm || one;
    if (query) {
      s.q_in = s.qkv.cols_from(0, q);
      s.q = apart ? arena_.take(act_, rows, q) : s.q_in;
      if (c_.qk_norm) s.q_rstd = arena_.take(acc_, projected, t.heads);
    }
    if (keys) {
      s.k_in = s.qkv.cols_from(q, kv);
      s.v_in = s.qkv.cols_from(q + kv, kv);
      s.k = apart ? arena_.take(act_, rows, kv) : s.k_in;
      s.v = one ? arena_.take(act_, rows, kv) : s.v_in;
      if (c_.qk_norm) s.k_rstd = arena_.take(acc_, projected, t.kv_heads);
    }
  }
  void tail(StreamActivations& s, const BlockParameters& b, const Tower& t, Need need, bool own_ffn,
            int64_t rows) {
    if (need < Need::pool) return;
    s.o = arena_.take(act_, rows, t.heads * c_.head_dim);
    s.lse = arena_.take(acc_, rows, t.heads);
    if (b.norm2 == kNoParameter) return;
    s.s2 = arena_.take(acc_, rows, t.width);
    s.rstd2 = arena_.take(acc_, rows, 1);
    s.n2 = arena_.take(act_, rows, t.width);
    if (own_ffn && need == Need::all) ffn(s, ffn_width(b), rows);
  }
  int64_t ffn_width(const BlockParameters& b) const { return params_.list[size_t(b.down)].shape[1]; }
  void ffn(StreamActivations& s, int64_t width, int64_t rows) {
    s.gate_up = arena_.take(act_, rows, 2 * width);
    s.h = arena_.take(act_, rows, width);
  }

  void pooled(Activations& a) {
    a.pool.resize(size_t(c_.state.layers));
    for (int64_t j = 0; j < c_.state.layers; ++j) {
      if (plan_.state[size_t(j)] < Need::pool && plan_.pred[size_t(j)] < Need::pool) continue;
      a.pool[size_t(j)] = {act(c_.state.width), acc(1), act(c_.state.width)};
      ffn(a.state[size_t(j)], c_.state.ffn[size_t(j)], rows_);
      a.state[size_t(j)].gate = acc(1);
      a.pred[size_t(j)].gate = acc(1);
    }
  }

  void reader(ReaderActivations& r, int64_t level, const std::vector<int64_t>& blocks, bool folded,
              const BlockParameters& first, const Tower& t) {
    r.level = level;
    r.blocks = blocks;
    const int64_t n = std::max<int64_t>(1, int64_t(blocks.size())), half = t.kv_heads * c_.head_dim;
    r.n = act(c_.state.width);
    r.rstd = acc(1);
    if (folded) r.weight = arena_.take(act_, n * 2 * half, c_.state.width);
    r.kv = act(n * 2 * half);
    if (train_) r.dkv = act(n * 2 * half);
    for (int64_t i = 0; i < n; ++i) {
      r.k_in.push_back(r.kv.cols_from(i * 2 * half, half));
      r.v.push_back(r.kv.cols_from(i * 2 * half + half, half));
      r.k.push_back(c_.qk_norm ? act(half) : r.k_in.back());
      r.k_rstd.push_back(first.read_k_norm != kNoParameter ? acc(t.kv_heads) : Tensor{});
    }
  }

  void stream(Gradients::Stream& s, const Tower& t, bool keys) {
    const int64_t q = t.heads * c_.head_dim, kv = t.kv_heads * c_.head_dim;
    s.residual = acc(t.width);
    s.residual_act = act_ == acc_ ? s.residual : act(t.width);
    s.qkv = act(q + (keys ? 2 * kv : 0));
    s.o = act(q);
    s.n = act(t.width);
  }

  // Both streams' in halves.
  void streams(Gradients& g) {
    const Tower& t = c_.state;
    const int64_t q = t.heads * c_.head_dim, kv = t.kv_heads * c_.head_dim;
    g.both.residual = in_halves(acc_, t.width, g.x.residual, g.p.residual);
    if (act_ == acc_)
      g.both.residual_act = g.both.residual, g.x.residual_act = g.x.residual, g.p.residual_act = g.p.residual;
    else
      g.both.residual_act = in_halves(act_, t.width, g.x.residual_act, g.p.residual_act);
    if (c_.pred_writes_keys()) {
      g.both.qkv = in_halves(act_, q + 2 * kv, g.x.qkv, g.p.qkv);
    } else {
      g.x.qkv = act(q + 2 * kv);
      g.p.qkv = act(q);
    }
    g.both.o = in_halves(act_, q, g.x.o, g.p.o);
    g.both.n = in_halves(act_, t.width, g.x.n, g.p.n);
  }

  const Plan& plan_;
  const ModelConfig& c_;
  const ModelParameters& params_;
  const DType act_, acc_;
  const bool train_;
  const bool stacks_;  // the streams advance together and their rows are equally wide
  const int64_t rows_;
  Arena& arena_;
};

}  // namespace

void lay_out(const ActivationShapes& shapes, int64_t rows, Arena& arena, Activations& a, Gradients& g) {
  Layout layout(shapes, rows, arena);
  layout.forward(a);
  if (shapes.train) layout.backward(a, g);
}

}  // namespace sps
