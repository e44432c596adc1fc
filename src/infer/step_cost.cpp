#include "infer/step_cost.h"

#include <algorithm>
#include <set>
#include <utility>

#include "infer/cache.h"
#include "ops/int8_linear/int8_linear.h"

namespace sps {

namespace {

Need need_of(const std::vector<Need>& needs, int64_t block) {
  return block < 0 ? Need::none : needs[size_t(block)];
}

// The pair that a prediction block reads the state through, where that is not the state block beside it.
bool reads_beside(const ModelConfig& c, const Stage& stage) {
  const int64_t level = c.levels[size_t(stage.pred)];
  return c.read_kv == ReadKv::state && level < c.state.layers && level == stage.state;
}

}  // namespace

StepTraffic::StepTraffic(const Plan& plan, DType dtype, bool int8) {
  add_weights(plan, dtype, int8);
  add_keys(plan, dtype);
  logits_ = 2.0 * double(plan.config.vocab) * double(sizeof(float));
}

void StepTraffic::add_weights(const Plan& plan, DType dtype, bool int8) {
  const ModelConfig& c = plan.config;
  const ModelParameters params = describe_parameters(c);
  const auto act = double(dtype_size(dtype)), master = double(dtype_size(master_of(dtype)));
  // A tensor that both streams use counts once; of qkv the queries' rows and the others apart.
  std::set<std::pair<int, int64_t>> counted;
  const auto rows = [&](int tensor, int64_t from, int64_t count) {
    if (tensor == kNoParameter || !counted.emplace(tensor, from).second) return;
    const int64_t cols = params.list[size_t(tensor)].cols();
    weights_ +=
        int8 ? double(ops::Int8Matrix::value_bytes(count, cols) + ops::Int8Matrix::scale_bytes(count, cols))
             : act * double(count * cols);
  };
  const auto matrix = [&](int tensor) {
    if (tensor != kNoParameter) rows(tensor, 0, params.list[size_t(tensor)].rows());
  };
  const auto vector = [&](int tensor) {
    if (tensor == kNoParameter || !counted.emplace(tensor, 0).second) return;
    weights_ += master * double(params.list[size_t(tensor)].count());
  };
  const auto block = [&](const BlockParameters& b, Need need, bool keys, bool state) {
    if (need == Need::none) return;
    vector(b.norm1);
    if (keys) rows(b.qkv, b.q_rows, b.kv_rows), vector(b.k_norm);
    if (need < Need::pool) return;
    rows(b.qkv, 0, b.q_rows);
    for (const int v : {b.q_norm, b.norm2, b.pool_in, b.pool_pred}) vector(v);
    for (const int m : {b.out, b.gate_up, b.down}) matrix(m);
    if (state && need == Need::all) vector(b.pool_state);
  };
  for (size_t j = 0; j < plan.state.size(); ++j) block(params.state[j], plan.state[j], true, true);
  for (size_t i = 0; i < plan.pred.size(); ++i) block(params.pred[i], plan.pred[i], plan.pred_keys[i], false);
  const auto read = [&](const BlockParameters& b, int64_t heads) {
    rows(b.read_kv, b.read_kv_from, 2 * heads * c.head_dim);
    vector(b.read_norm), vector(b.read_k_norm);
  };
  for (const Plan::LevelReaders& r : plan.own_readers)
    for (const int64_t i : r.blocks) read(params.pred[size_t(i)], c.pred.kv_heads);
  if (plan.read_head) read(params.read_head, c.state.kv_heads);
  vector(params.final_norm);
  matrix(params.head);

  rows_ = master * double(c.state.width);
  if (!c.has_pred()) return;
  const double start = master * double(c.pred.width);
  switch (c.pred_input) {
    case PredInput::row:
    case PredInput::vector:
      weights_ += start;
      break;
    case PredInput::token:
      weights_ += start, rows_ += start;
      break;
    case PredInput::table:
      rows_ += start;
      break;
    case PredInput::state:
      break;
  }
}

void StepTraffic::add_keys(const Plan& plan, DType dtype) {
  const ModelConfig& c = plan.config;
  const auto bytes = [&](int64_t kv_heads) { return 2 * kv_heads * c.head_dim * int64_t(dtype_size(dtype)); };
  for (const KeyPair& pair : key_pairs(plan))
    if (pair.horizon.kind == Horizon::persistent || pair.horizon.steps > 0)
      kept_ += double(bytes(pair.kv_heads));
  // One attention call a stage, as Decoder::attention has it.
  const auto reads = [&](const std::vector<Band>& bands, int64_t kv_heads) {
    const Horizon h = horizon(bands);
    if (h.kind != Horizon::nothing) reads_.push_back({h, bytes(kv_heads)});
  };
  for (const Stage& stage : plan.stages) {
    const bool x = need_of(plan.state, stage.state) >= Need::pool,
               p = need_of(plan.pred, stage.pred) >= Need::pool;
    std::vector<Band> state, pred;
    if (x) state.push_back(c.band_xx(stage.state));
    if (x && stage.pred >= 0) pred.push_back(c.xp);
    if (p) {
      pred.push_back(c.pp);
      if (reads_beside(c, stage))
        state.push_back(c.band_px(stage.pred));
      else
        reads({c.band_px(stage.pred)}, c.read_kv == ReadKv::own ? c.pred.kv_heads : c.state.kv_heads);
    }
    reads(state, c.state.kv_heads);
    reads(pred, c.pred.kv_heads);
  }
}

StepBytes StepTraffic::of(std::span<const int64_t> positions) const {
  const auto texts = double(positions.size());
  StepBytes b{weights_ + rows_ * texts, kept_ * texts, logits_ * texts};
  for (const int64_t before : positions)
    for (const Reads& r : reads_) {
      const int64_t seen = r.horizon.kind == Horizon::ring ? std::min(before, r.horizon.steps) : before;
      b.keys += double(seen * r.bytes);
    }
  return b;
}

Flops decoder_prefill_flops(const Plan& plan, int64_t length) {
  const ModelConfig& c = plan.config;
  const auto n = double(length);
  const int64_t pred_rows = std::min(needed_pred_rows(plan), length);
  const auto p_n = double(pred_rows);
  const auto width = [](const Tower& t) { return double(t.width); };
  const auto q = [&](const Tower& t) { return double(t.heads * c.head_dim); };
  const auto kv = [&](const Tower& t) { return 2.0 * double(t.kv_heads * c.head_dim); };
  // Pairs of the last `rows` positions of the prompt.
  const auto pairs = [&](Band band, int64_t rows) {
    return band.empty() ? 0 : double(ops::band_area(band, length) - ops::band_area(band, length - rows));
  };
  Flops f;
  const auto attention = [&](const Tower& t, double rows, double visible) {
    f.qkv += 2 * width(t) * q(t) * rows;
    f.scores += 2 * q(t) * visible;
    f.weighted += 2 * q(t) * visible;
    f.softmax += 3 * double(t.heads) * visible;
    f.out += 2 * q(t) * width(t) * rows;
  };
  const bool pooled = c.has_pred() && c.ffn == FfnMode::pooled;
  for (int64_t j = 0; j < c.state.layers; ++j) {
    const Need need = plan.state[size_t(j)];
    if (need == Need::none) continue;
    f.qkv += 2 * width(c.state) * kv(c.state) * n;
    if (need == Need::keys) continue;
    attention(c.state, n, pairs(c.band_xx(j), length) + pairs(c.xp, length));
    if (!pooled) f.ffn += 6 * width(c.state) * double(c.state.ffn[size_t(j)]) * n;
    // The pooled FFN and its input gate are counted with the prediction block.
    if (pooled && need == Need::all) f.gates += 2 * width(c.state) * n;
  }
  f.state = f.total();
  for (int64_t i = 0; i < c.pred.layers; ++i) {
    const Need need = plan.pred[size_t(i)];
    if (need == Need::none) continue;
    if (plan.pred_keys[size_t(i)]) f.qkv += 2 * width(c.pred) * kv(c.pred) * p_n;
    if (need == Need::keys) continue;
    // Of predictions before the first row that is made there are no keys.
    const double own = c.pp.empty() ? 0 : double(ops::band_area(c.pp, pred_rows));
    attention(c.pred, p_n, pairs(c.band_px(i), pred_rows) + own);
    f.ffn += 6 * width(c.pred) * double(c.pred.ffn[size_t(i)]) * p_n;
    if (pooled) f.gates += 6 * width(c.pred) * p_n;
  }
  for (const Plan::LevelReaders& r : plan.own_readers)
    f.read += 2 * width(c.state) * kv(c.pred) * double(r.blocks.size()) * n;
  if (plan.read_head) f.read += 2 * width(c.state) * kv(c.state) * n;
  f.head = 2 * (c.readout == Readout::pred ? width(c.pred) : width(c.state)) * double(c.vocab);
  return f;
}

}  // namespace sps
