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
        rows_(rows),
        arena_(arena) {}

  void forward(Activations& a) {
    const int64_t ds = c_.state.width, dp = c_.pred.width;
    a = {};
    a.x0 = acc(ds);
    if (c_.has_pred() && !plan_.constant_start && c_.pred_input != PredInput::state) a.p0 = acc(dp);
    a.delta_x = act(ds);
    if (c_.has_pred()) a.delta_p = act(dp);
    a.state.resize(size_t(c_.state.layers));
    a.pred.resize(size_t(c_.pred.layers));
    for (int64_t j = 0; j < c_.state.layers; ++j) {
      const Need need = plan_.state[size_t(j)];
      if (need == Need::none) continue;
      StreamActivations& s = a.state[size_t(j)];
      s.s1 = j == 0 ? a.x0 : acc(ds);
      block(s, params_.state[size_t(j)], c_.state, need, true, false, c_.ffn == FfnMode::separate);
    }
    for (int64_t i = 0; i < c_.pred.layers; ++i) {
      const Need need = plan_.pred[size_t(i)];
      if (need == Need::none) continue;
      StreamActivations& s = a.pred[size_t(i)];
      const bool one = i == 0 && plan_.constant_start;
      if (i > 0) s.s1 = acc(dp);
      block(s, params_.pred[size_t(i)], c_.pred, need, plan_.pred_keys[size_t(i)], one,
            c_.ffn == FfnMode::separate);
    }
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
    stream(g.x, c_.state, true);
    if (c_.has_pred()) stream(g.p, c_.pred, c_.pred_writes_keys());
    if (plan_.constant_start) {
      g.p.one = arena_.take(act_, 1, g.p.qkv.cols);
      g.p.one_sum = arena_.take(acc_, 1, dp);
      g.p.one_v = arena_.take(acc_, 1, std::max<int64_t>(1, c_.pred.kv_heads * c_.head_dim));
    }
    int64_t ffn = 1;
    for (const auto* widths : {&c_.state.ffn, &c_.pred.ffn})
      for (const int64_t w : *widths) ffn = std::max(ffn, w);
    g.h = act(ffn);
    if (c_.ffn == FfnMode::pooled && c_.has_pred()) g.f = act(ds);
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

  void block(StreamActivations& s, const BlockParameters& b, const Tower& t, Need need, bool keys, bool one,
             bool own_ffn) {
    const int64_t rows = one ? 1 : rows_;
    const bool query = need >= Need::pool;
    const int64_t q = query ? t.heads * c_.head_dim : 0, kv = keys ? t.kv_heads * c_.head_dim : 0;
    s.rstd1 = arena_.take(acc_, rows, 1);
    s.n1 = arena_.take(act_, rows, t.width);
    s.qkv = arena_.take(act_, rows, q + 2 * kv);
    // Rotation happens in place, unless the unrotated numbers are needed again or belong to one row for all.
    const bool apart = c_.qk_norm || one;
    if (query) {
      s.q_in = s.qkv.cols_from(0, q);
      s.q = apart ? act(q) : s.q_in;
      if (c_.qk_norm) s.q_rstd = arena_.take(acc_, rows, t.heads);
      s.o = act(q);
      s.lse = acc(t.heads);
    }
    if (keys) {
      s.k_in = s.qkv.cols_from(q, kv);
      s.v_in = s.qkv.cols_from(q + kv, kv);
      s.k = apart ? act(kv) : s.k_in;
      s.v = one ? act(kv) : s.v_in;
      if (c_.qk_norm) s.k_rstd = arena_.take(acc_, rows, t.kv_heads);
    }
    if (query && b.norm2 != kNoParameter) {
      s.s2 = acc(t.width);
      s.rstd2 = acc(1);
      s.n2 = act(t.width);
      if (own_ffn && need == Need::all) ffn(s, ffn_width(b));
    }
  }
  int64_t ffn_width(const BlockParameters& b) const { return params_.list[size_t(b.down)].shape[1]; }
  void ffn(StreamActivations& s, int64_t width) {
    s.gate_up = act(2 * width);
    s.h = act(width);
  }

  void pooled(Activations& a) {
    a.pool.resize(size_t(c_.state.layers));
    for (int64_t j = 0; j < c_.state.layers; ++j) {
      if (plan_.state[size_t(j)] < Need::pool && plan_.pred[size_t(j)] < Need::pool) continue;
      a.pool[size_t(j)] = {act(c_.state.width), acc(1), act(c_.state.width)};
      ffn(a.state[size_t(j)], c_.state.ffn[size_t(j)]);
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

  const Plan& plan_;
  const ModelConfig& c_;
  const ModelParameters& params_;
  const DType act_, acc_;
  const bool train_;
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
