#include "model/flops.h"

#include <algorithm>

namespace sps {

namespace {

// Pairs per token of a band; the square convention charges T keys for an unbounded band and the window's
// width, its edge excluded, for a bounded one (two-tower spec 2.2: the prediction keys of sps(w) add w a
// query).
struct Area {
  bool square;
  int64_t length;
  double operator()(Band band) const {
    if (band.empty()) return 0;
    if (square) return double(std::min(band.hi, length));
    return double(ops::band_area(band, length)) / double(length);
  }
};

struct Dims {
  double d, q, kv;  // width; query columns; key plus value columns
};

Dims dims(const ModelConfig& c, const Tower& t) {
  return {double(t.width), double(t.heads * c.head_dim), 2.0 * double(t.kv_heads * c.head_dim)};
}

void add_attention(Flops& f, const ModelConfig& c, const Tower& t, double pairs) {
  const double q = double(t.heads * c.head_dim);
  f.scores += 2 * q * pairs;
  f.weighted += 2 * q * pairs;
  f.softmax += 3 * double(t.heads) * pairs;
}

Flops count(const ModelConfig& c, Area area, double vocab) {
  Flops f;
  const Dims s = dims(c, c.state), p = dims(c, c.pred);
  for (int64_t j = 0; j < c.state.layers; ++j) {
    f.qkv += 2 * s.d * (s.q + s.kv);
    add_attention(f, c, c.state, area(c.band_xx(j)) + area(c.xp));
    f.out += 2 * s.q * s.d;
    f.ffn += 6 * s.d * double(c.state.ffn[size_t(j)]);
  }
  f.state = f.total();
  for (int64_t i = 0; i < c.pred.layers; ++i) {
    f.qkv += 2 * p.d * (p.q + (c.pred_writes_keys() ? p.kv : 0));
    if (c.read_kv == ReadKv::own && !c.px.empty()) f.read += 2 * s.d * p.kv;
    add_attention(f, c, c.pred, area(c.band_px(i)) + area(c.pp));
    f.out += 2 * p.q * p.d;
    if (c.ffn == FfnMode::separate) f.ffn += 6 * p.d * double(c.pred.ffn[size_t(i)]);
    // 2d -> 1 into the pooled FFN and d -> 1 out of it for each stream.
    if (c.ffn == FfnMode::pooled && !area.square) f.gates += 2 * (2 * p.d + 2 * p.d);
  }
  if (c.has_pred() && make_plan(c).read_head) f.read += 2 * s.d * s.kv;
  f.head = 2 * (c.readout == Readout::pred ? p.d : s.d) * vocab;
  return f;
}

}  // namespace

Flops flops_published(const ModelConfig& c, int64_t length) {
  return count(c, {true, length}, double(c.text_ids()));
}

Flops flops_required(const ModelConfig& c, int64_t length) {
  return count(c, {false, length}, double(c.vocab));
}

namespace {

void add_executed_state(Flops& f, const Plan& plan, int64_t j, Area area) {
  const ModelConfig& c = plan.config;
  const Dims s = dims(c, c.state);
  const Need need = plan.state[size_t(j)];
  if (need == Need::none) return;
  f.qkv += 2 * s.d * s.kv;
  if (need == Need::keys) return;
  f.qkv += 2 * s.d * s.q;
  add_attention(f, c, c.state, area(c.band_xx(j)) + area(c.xp));
  f.out += 2 * s.q * s.d;
  if (c.ffn == FfnMode::separate) f.ffn += 6 * s.d * double(c.state.ffn[size_t(j)]);
  // The pooled FFN and its input gate are counted with the prediction block; a row's own output gate is 2
  // d.
  if (c.ffn == FfnMode::pooled && need == Need::all) f.gates += 2 * s.d;
}

void add_executed_pred(Flops& f, const Plan& plan, int64_t i, Area area) {
  const ModelConfig& c = plan.config;
  const Dims s = dims(c, c.state), p = dims(c, c.pred);
  const Need need = plan.pred[size_t(i)];
  if (need == Need::none) return;
  // Equal rows are projected once, not once a token.
  const double rows = i == 0 && plan.constant_start ? 1.0 / double(area.length) : 1.0;
  if (plan.pred_keys[size_t(i)]) f.qkv += 2 * p.d * p.kv * rows;
  if (need == Need::keys) return;
  f.qkv += 2 * p.d * p.q * rows;
  if (c.read_kv == ReadKv::own && !c.px.empty()) f.read += 2 * s.d * p.kv;
  add_attention(f, c, c.pred, area(c.band_px(i)) + area(c.pp));
  f.out += 2 * p.q * p.d;
  f.ffn += 6 * p.d * double(c.pred.ffn[size_t(i)]);
  if (c.ffn == FfnMode::pooled) f.gates += 2 * 2 * p.d + 2 * p.d;
}

}  // namespace

Flops flops_executed(const Plan& plan, int64_t length) {
  const ModelConfig& c = plan.config;
  const Area area{false, length};
  Flops f;
  const Dims s = dims(c, c.state), p = dims(c, c.pred);
  for (int64_t j = 0; j < c.state.layers; ++j) add_executed_state(f, plan, j, area);
  f.state = f.total();
  for (int64_t i = 0; i < c.pred.layers; ++i) add_executed_pred(f, plan, i, area);
  if (plan.read_head) f.read += 2 * s.d * s.kv;
  f.head = 2 * (c.readout == Readout::pred ? p.d : s.d) * double(c.vocab);
  return f;
}

Flops flops_made_again(const Plan& plan, Recompute mode, Freeze freeze, int64_t length) {
  const ModelConfig& c = plan.config;
  const Area area{false, length};
  const bool pooled = c.has_pred() && c.ffn == FfnMode::pooled;
  const std::vector<Recompute> again = made_again(plan, mode, freeze);
  Flops all;
  for (size_t n = 0; n < again.size(); ++n) {
    const Stage& stage = plan.stages[n];
    if (again[n] == Recompute::none) continue;
    Flops x, p;
    if (stage.state >= 0) add_executed_state(x, plan, stage.state, area);
    if (stage.pred >= 0) add_executed_pred(p, plan, stage.pred, area);
    // Readers' keys are kept and so are the gates of the FFN's output; of a frozen tower only the attention
    // call is repeated.
    p.read = x.gates = 0;
    if (freeze.state) x.out = x.ffn = 0;
    if (p.gates > 0) p.gates = 4 * double(c.pred.width);
    // Of the FFN's products (gate and up, then down) the last is not, unless the gates' backward reads it.
    if (!pooled || again[n] == Recompute::ffn) x.ffn *= 2.0 / 3, p.ffn *= 2.0 / 3;
    if (again[n] == Recompute::block) {
      const double state = x.total();
      all.qkv += x.qkv + p.qkv, all.scores += x.scores + p.scores, all.softmax += x.softmax + p.softmax;
      all.weighted += x.weighted + p.weighted, all.out += x.out + p.out;
      all.state += state;
    } else {
      all.state += x.ffn;
    }
    all.ffn += x.ffn + p.ffn, all.gates += p.gates;
  }
  return all;
}

// With a frozen read head nothing else reads the state through weights: read.kv = state.
double training_flops(const Flops& f, Freeze freeze) {
  return 3 * f.total() - 2 * ((freeze.state ? f.state : 0) + (freeze.read_head ? f.read : 0));
}

int64_t visible_pairs(const ModelConfig& c, int64_t block, int64_t length) {
  int64_t pairs = ops::band_area(c.band_xx(block), length);
  if (c.has_pred())
    pairs += ops::band_area(c.xp, length) + ops::band_area(c.band_px(block), length) +
             ops::band_area(c.pp, length);
  return pairs;
}

}  // namespace sps
