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
        recompute_(s.recompute),
        freeze_(s.freeze),
        stacks_(plan_.joint && c_.state.width == c_.pred.width && c_.state.heads == c_.pred.heads &&
                c_.state.kv_heads == c_.pred.kv_heads),
        rows_(rows),
        arena_(arena) {}

  // Memory of one sub-layer for the next: the FFN's hidden rows and their gradient, and in their place, for
  // they never meet, the gradients of attention.
  void momentary(Gradients& g) {
    g = {};
    int64_t widest = 1;
    for (const auto* widths : {&c_.state.ffn, &c_.pred.ffn})
      for (const int64_t w : *widths) widest = std::max(widest, w);
    size_t end = 0;
    {
      const Arena::Scope again(arena_);
      hidden_ = arena_.take(act_, stacks_ ? 2 * rows_ : rows_, widest);
      end = arena_.used();
    }
    if (train_) attention_gradients(g);
    if (arena_.used() < end) arena_.take(act_, 1, int64_t((end - arena_.used()) / dtype_size(act_)));
  }

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
    if (pools()) a.pool.resize(size_t(c_.state.layers));
    shared_ = false;
    for (size_t i = 0; i < plan_.stages.size(); ++i) stage(a, i);

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

  // Last: every stage takes the same memory.
  void shared(Activations& a) {
    shared_ = true;
    const auto part = [&](size_t i) {
      return shared_part(plan_, plan_.stages[i], recompute_, freeze_, train_);
    };
    bool any = false;
    for (size_t i = 0; i < plan_.stages.size(); ++i) any = any || part(i) != Recompute::none;
    if (!any) return;
    // A block's end makes the norm that begins the next one: these rows do not move from stage to stage.
    if (stacks_) {
      n1_both_ = in_halves(act_, c_.state.width, n1_x_, n1_p_);
    } else {
      n1_x_ = act(c_.state.width);
      if (c_.has_pred()) n1_p_ = act(c_.pred.width);
    }
    for (size_t i = 0; i < plan_.stages.size(); ++i) {
      const Arena::Scope again(arena_);
      if (part(i) != Recompute::none) stage(a, i);
    }
  }

  void backward(const Activations& a, Gradients& g) {
    const int64_t ds = c_.state.width, dp = c_.pred.width;
    if (stacks_) {
      residual_gradients(g);
    } else {
      residual_gradient(g.x, c_.state);
      if (c_.has_pred()) residual_gradient(g.p, c_.pred);
    }
    if (plan_.constant_start) {
      g.p.one = arena_.take(act_, 1, g.p.qkv.cols);
      g.p.one_sum = arena_.take(acc_, 1, dp);
      g.p.one_v = arena_.take(acc_, 1, std::max<int64_t>(1, c_.pred.kv_heads * c_.head_dim));
    }
    if (pools()) g.f = act(ds), g.x.gate = acc(1), g.p.gate = acc(1);
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
  bool pools() const { return c_.has_pred() && c_.ffn == FfnMode::pooled; }
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

  // A tensor that recomputation from `from` on makes again: taken with what is kept, or with what is shared.
  void put(Tensor& t, Recompute from, DType dtype, int64_t rows, int64_t cols) {
    if (lies_here(from)) t = arena_.take(dtype, rows, cols);
  }
  bool lies_here(Recompute from) const { return shared_ == (part_ >= from); }

  // Called twice for a stage with a shared part: first for what is kept.
  void stage(Activations& a, size_t index) {
    const Stage& stage = plan_.stages[index];
    part_ = shared_part(plan_, stage, recompute_, freeze_, train_);
    streams_of_stage(a, stage, a.both[index]);
    if (pools()) pooled(a, stage.state);
  }

  void streams_of_stage(Activations& a, const Stage& stage, StreamActivations& both) {
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
        if (!shared_) x.s1 = j == 0 ? a.x0 : acc(c_.state.width);
        head(x, c_.state, rows_, n1_x_);
        projections(x, c_.state, nx >= Need::pool, true, false, rows_, keys_read_later(j));
        tail(x, params_.state[size_t(j)], c_.state, nx, own_ffn, rows_);
      }
      if (np != Need::none) {
        if (!shared_ && i > 0) p.s1 = acc(c_.pred.width);
        head(p, c_.pred, one ? 1 : rows_, n1_p_);
        projections(p, c_.pred, np >= Need::pool, keys, one, rows_);
        tail(p, params_.pred[size_t(i)], c_.pred, np, own_ffn, rows_);
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
      if (!shared_ && j > 0) {
        both.s1 = in_halves(acc_, c_.state.width, x.s1, p.s1);
      } else if (!shared_) {
        x.s1 = a.x0, p.s1 = a.p0;
        both.s1 = {a.x0.data, 2 * rows_, a.x0.cols, a.x0.stride, a.x0.dtype, a.x0.device};
      }
      head(both, c_.state, 2 * rows_, n1_both_);
      halve(both, x, p, {&S::rstd1, &S::n1});
    } else {
      if (!shared_) {
        x.s1 = j == 0 ? a.x0 : acc(c_.state.width);
        if (i > 0) p.s1 = acc(c_.pred.width);
      }
      head(x, c_.state, rows_, n1_x_);
      head(p, c_.pred, one ? 1 : rows_, n1_p_);
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

  // Whether stages after this state block's own read its keys and values.
  bool keys_read_later(int64_t j) const {
    if (plan_.joint || c_.read_kv != ReadKv::state || c_.px.empty()) return false;
    return std::find(c_.levels.begin(), c_.levels.end(), j) != c_.levels.end();
  }

  // `shared_n1`: where the norm lies if it is shared.
  void head(StreamActivations& s, const Tower& t, int64_t rows, const Tensor& shared_n1) {
    if (!shared_) s.rstd1 = arena_.take(acc_, rows, 1);
    if (!lies_here(Recompute::ffn)) return;
    s.n1 = shared_ ? shared_n1.rows_from(0, rows) : arena_.take(act_, rows, t.width);
  }
  // `one`: the projections of one row that begins every position.
  void projections(StreamActivations& s, const Tower& t, bool query, bool keys, bool one, int64_t rows,
                   bool read_later = false) {
    const int64_t q = query ? t.heads * c_.head_dim : 0, kv = keys ? t.kv_heads * c_.head_dim : 0;
    const int64_t projected = one ? 1 : rows;
    put(s.qkv, Recompute::block, act_, projected, q + 2 * kv);
    // Rotation happens in place, unless the unrotated numbers are needed again or belong to one row for all.
    const bool apart = c_.qk_norm || one;
    // Keys and values that outlive the stage leave the shared memory, in which they were projected.
    const bool leave = read_later && part_ == Recompute::block;
    if (query) {
      if (apart) put(s.q, Recompute::block, act_, rows, q);
      if (c_.qk_norm) put(s.q_rstd, Recompute::block, acc_, projected, t.heads);
    }
    if (keys) {
      if (leave && !shared_) s.k = arena_.take(act_, rows, kv), s.v = arena_.take(act_, rows, kv);
      if (apart && !leave) put(s.k, Recompute::block, act_, rows, kv);
      if (one && !leave) put(s.v, Recompute::block, act_, rows, kv);
      if (c_.qk_norm) put(s.k_rstd, Recompute::block, acc_, projected, t.kv_heads);
    }
    if (!lies_here(Recompute::block)) return;
    if (query) {
      s.q_in = s.qkv.cols_from(0, q);
      if (!apart) s.q = s.q_in;
    }
    if (keys) {
      s.k_in = s.qkv.cols_from(q, kv);
      s.v_in = s.qkv.cols_from(q + kv, kv);
      if (!apart && !leave) s.k = s.k_in;
      if (!one && !leave) s.v = s.v_in;
    }
  }
  void tail(StreamActivations& s, const BlockParameters& b, const Tower& t, Need need, bool own_ffn,
            int64_t rows) {
    if (need < Need::pool) return;
    put(s.o, Recompute::block, act_, rows, t.heads * c_.head_dim);
    put(s.lse, Recompute::block, acc_, rows, t.heads);
    if (b.norm2 == kNoParameter) return;
    put(s.s2, Recompute::block, acc_, rows, t.width);
    put(s.rstd2, Recompute::block, acc_, rows, 1);
    put(s.n2, Recompute::ffn, act_, rows, t.width);
    if (own_ffn && need == Need::all) ffn(s, ffn_width(b), rows);
  }
  int64_t ffn_width(const BlockParameters& b) const { return params_.list[size_t(b.down)].shape[1]; }
  void ffn(StreamActivations& s, int64_t width, int64_t rows) {
    put(s.gate_up, Recompute::ffn, act_, rows, 2 * width);
    s.h = {hidden_.data, rows, width, width, act_, hidden_.device};
  }

  void pooled(Activations& a, int64_t j) {
    if (plan_.state[size_t(j)] < Need::pool && plan_.pred[size_t(j)] < Need::pool) return;
    StreamActivations &x = a.state[size_t(j)], &p = a.pred[size_t(j)];
    Activations::Pool& pool = a.pool[size_t(j)];
    put(pool.m, Recompute::ffn, act_, rows_, c_.state.width);
    put(pool.f, Recompute::block, act_, rows_, c_.state.width);
    ffn(x, c_.state.ffn[size_t(j)], rows_);
    if (!shared_) pool.gate = acc(1), x.gate = acc(1), p.gate = acc(1);
  }

  void reader(ReaderActivations& r, int64_t level, const std::vector<int64_t>& blocks, bool folded,
              const BlockParameters& first, const Tower& t) {
    r.level = level;
    r.blocks = blocks;
    const int64_t n = std::max<int64_t>(1, int64_t(blocks.size())), half = t.kv_heads * c_.head_dim;
    // Normed again from the level, which is kept: one memory for all readers.
    const bool once = recompute_ != Recompute::none || !train_;
    if (!once || reader_n_.empty()) reader_n_ = act(c_.state.width);
    r.n = reader_n_;
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

  void residual_gradient(Gradients::Stream& s, const Tower& t) {
    s.residual = acc(t.width);
    s.residual_act = act_ == acc_ ? s.residual : act(t.width);
    s.n = act(t.width);
  }

  // Both streams' in halves.
  void residual_gradients(Gradients& g) {
    const int64_t d = c_.state.width;
    g.both.residual = in_halves(acc_, d, g.x.residual, g.p.residual);
    if (act_ == acc_)
      g.both.residual_act = g.both.residual, g.x.residual_act = g.x.residual, g.p.residual_act = g.p.residual;
    else
      g.both.residual_act = in_halves(act_, d, g.x.residual_act, g.p.residual_act);
    g.both.n = in_halves(act_, d, g.x.n, g.p.n);
  }

  void attention_gradients(Gradients& g) {
    const auto widths = [&](const Tower& t, bool keys) {
      const int64_t q = t.heads * c_.head_dim;
      return std::pair{q, q + (keys ? 2 * t.kv_heads * c_.head_dim : 0)};
    };
    const auto [q, qkv] = widths(c_.state, true);
    const auto [pq, pqkv] = widths(c_.pred, c_.pred_writes_keys());
    if (stacks_ && pqkv == qkv) {
      g.both.qkv = in_halves(act_, qkv, g.x.qkv, g.p.qkv);
    } else {
      g.x.qkv = act(qkv);
      if (c_.has_pred()) g.p.qkv = act(pqkv);
    }
    if (stacks_) {
      g.both.o = in_halves(act_, q, g.x.o, g.p.o);
    } else {
      g.x.o = act(q);
      if (c_.has_pred()) g.p.o = act(pq);
    }
  }

  const Plan& plan_;
  const ModelConfig& c_;
  const ModelParameters& params_;
  const DType act_, acc_;
  const bool train_;
  const Recompute recompute_;
  const Freeze freeze_;
  const bool stacks_;  // the streams advance together and their rows are equally wide
  const int64_t rows_;
  Arena& arena_;
  bool shared_ = false;               // what is shared is laid out now, not what is kept
  Recompute part_ = Recompute::none;  // what of the stage under way is shared
  Tensor hidden_, reader_n_, n1_x_, n1_p_, n1_both_;
};

}  // namespace

void lay_out(const ActivationShapes& shapes, int64_t rows, Arena& arena, Activations& a, Gradients& g) {
  Layout layout(shapes, rows, arena);
  layout.momentary(g);
  layout.forward(a);
  if (shapes.train) layout.backward(a, g);
  layout.shared(a);
}

size_t activation_bytes(const ActivationShapes& shapes, int64_t rows) {
  Arena planning;
  Activations a;
  Gradients g;
  lay_out(shapes, rows, planning, a, g);
  return planning.peak();
}

}  // namespace sps
