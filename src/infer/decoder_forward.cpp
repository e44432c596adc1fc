// The forward pass of a step, sub-layer by sub-layer, in the order of model/forward.cpp.
#include <algorithm>
#include <cmath>

#include "infer/decoder.h"
#include "ops/embedding/embedding.h"
#include "ops/gates/gates.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rows/rows.h"

namespace sps {

namespace {

Need need_of(const std::vector<Need>& needs, int64_t block) {
  return block < 0 ? Need::none : needs[size_t(block)];
}
int64_t kv_width(const ModelConfig& c, const Tower& t) {
  return t.kv_heads * c.head_dim;
}
int64_t ffn_width(const Tower& t, int64_t block) {
  return block < 0 ? 0 : t.ffn[size_t(block)];
}

}  // namespace

void Decoder::lay_out(Arena& arena) {
  const ModelConfig& c = plan_.config;
  const int64_t x = options_.step_rows, p = most_pred_rows_, picks = options_.slots;
  const auto buffer = [&](DType dtype, int64_t cols_x, int64_t cols_p) {
    return arena.take(dtype, 1, x * cols_x + p * cols_p);
  };
  const auto widest = [](const std::vector<int64_t>& widths) {
    return widths.empty() ? int64_t{0} : *std::max_element(widths.begin(), widths.end());
  };
  const int64_t dx = c.state.width, dp = c.pred.width, qx = c.state.heads * c.head_dim,
                qp = c.pred.heads * c.head_dim, kx = kv_width(c, c.state), kp = kv_width(c, c.pred);
  b_ = {};
  b_.residual = buffer(acc_, dx, dp), b_.delta = buffer(act_, dx, dp), b_.n = buffer(act_, dx, dp);
  b_.q = buffer(act_, qx, qp), b_.o = buffer(act_, qx, qp);
  const int64_t fx = widest(c.state.ffn), fp = widest(c.pred.ffn);
  b_.gate_up = buffer(act_, 2 * fx, 2 * fp), b_.h = buffer(act_, fx, fp);
  b_.rstd = buffer(acc_, 1, 1);
  if (c.qk_norm) {
    b_.q_normed = buffer(act_, qx, qp);
    b_.head_rstd = buffer(acc_, c.state.heads, c.pred.heads);
  }
  for (const Stage& stage : plan_.stages) {
    const bool state = need_of(plan_.state, stage.state) != Need::none;
    const bool pred = stage.pred >= 0 && plan_.pred_keys[size_t(stage.pred)];
    b_.kv.push_back(buffer(act_, state ? 2 * kx : 0, pred || one_projection(stage) ? 2 * kp : 0));
    b_.k.push_back(c.qk_norm ? buffer(act_, state ? kx : 0, pred ? kp : 0) : Tensor{});
  }
  for (const KeyPair& pair : caches_.pairs()) {
    const bool projected = pair.source == KeyPair::reader || pair.source == KeyPair::read_head;
    const int64_t width = projected ? pair.kv_heads * c.head_dim : 0;
    b_.read_kv.push_back(buffer(act_, 2 * width, 0));
    b_.read_k.push_back(c.qk_norm ? buffer(act_, width, 0) : Tensor{});
    if (projected && !b_.level_n) b_.level_n = buffer(act_, dx, 0);
  }
  if (c.has_pred() && c.ffn == FfnMode::pooled) {
    b_.pool_m = buffer(act_, dx, 0), b_.pool_f = buffer(act_, dx, 0);
    b_.gates = buffer(acc_, 3, 0);
  }
  const int64_t dr = c.readout == Readout::pred ? dp : dx;
  b_.final_s = arena.take(acc_, picks, dr), b_.final_n = arena.take(act_, picks, dr);
  b_.final_rstd = arena.take(acc_, picks, 1);
  b_.logits = arena.take(acc_, picks, c.vocab);
}

void Decoder::forward() {
  const ModelConfig& c = plan_.config;
  ops::embedding_forward(device(), tokens_.first(size_t(x_rows_)), master(params_.embed), {},
                         rows(b_.residual, c.state.width, c.pred.width).x);
  if (p_rows_ > 0 && c.pred_input != PredInput::state) start_prediction();
  kept_.assign(keys_.size(), false);

  const int64_t alive = plan_.state_blocks_alive();
  if (alive == 0) read_level(0);
  for (size_t n = 0; n < plan_.stages.size(); ++n) {
    const Stage& stage = plan_.stages[n];
    const Need nx = need_of(plan_.state, stage.state), np = need_of(plan_.pred, stage.pred);
    const bool x = nx != Need::none, p = np != Need::none && p_rows_ > 0;
    if (stage.state < 0 && stage.pred == 0 && p_rows_ > 0 && c.pred_input == PredInput::state)
      start_prediction();
    if (!x && !p) continue;
    if (x) read_level(stage.state);
    const bool x_rows = nx >= Need::pool, p_rows = p && np >= Need::pool;
    const Wanted queries{x_rows, p_rows}, keys{x, p && plan_.pred_keys[size_t(stage.pred)]};
    project(n, queries, keys);
    if (!x_rows && !p_rows) rotate_rows(n, queries, keys);
    if (x_rows || p_rows) {
      attention(n, queries, keys);
      attention_out(stage, x_rows, p_rows);
      if (c.has_pred() && c.ffn == FfnMode::pooled)
        pooled(stage.state);
      else
        feed_forward(stage, x_rows, p_rows);
    }
    if (x && stage.state == alive - 1 && plan_.level_needed(alive)) {
      read_level(alive);
      if (plan_.read_head) read_keys(size_t(caches_.find(KeyPair::read_head, 0)), params_.read_head, 0);
    }
  }
  std::vector<ops::DecodeKeys> rest;
  for (size_t i = 0; i < keys_.size(); ++i) {
    const bool pred = caches_.pairs()[i].source == KeyPair::pred;
    if (!kept_[i] && (!pred || p_rows_ > 0))
      rest.push_back({keys_[i].k, keys_[i].v, pred ? 1 : 0, caches_.cache(i)});
  }
  if (!rest.empty()) ops::keep_keys(device(), c.head_dim, lists_, rest);
}

// Runs a sub-layer for the streams that take part: once for the rows of both where it is the same for them.
template <class SubLayer>
void Decoder::each(bool x, bool p, bool alike, SubLayer&& sub_layer) {
  if (x && p && alike && plan_.config.state.width == plan_.config.pred.width) return sub_layer(Part::both);
  if (x) sub_layer(Part::x);
  if (p) sub_layer(Part::p);
}

void Decoder::start_prediction() {
  const ModelConfig& c = plan_.config;
  const Rows residual = rows(b_.residual, c.state.width, c.pred.width);
  const auto tokens = tokens_.subspan(size_t(x_rows_));
  switch (c.pred_input) {
    case PredInput::row:
      ops::copy_rows(device(), master(params_.embed).rows_from(c.pred_row, 1), residual.p);
      break;
    case PredInput::vector:
      ops::copy_rows(device(), master(params_.pred_input), residual.p);
      break;
    case PredInput::token:
      ops::embedding_forward(device(), tokens, master(params_.embed), master(params_.pred_input), residual.p);
      break;
    case PredInput::table:
      ops::embedding_forward(device(), tokens, master(params_.pred_embed), {}, residual.p);
      break;
    case PredInput::state:  // the finished state of the same position
      ops::embedding_forward(device(), sources_, residual.x, {}, residual.p);
      break;
  }
}

void Decoder::norm(bool x, bool p, int gain_x, int gain_p) {
  const ModelConfig& c = plan_.config;
  const Rows residual = rows(b_.residual, c.state.width, c.pred.width),
             n = rows(b_.n, c.state.width, c.pred.width), rstd = rows(b_.rstd, 1, 1);
  each(x, p, gain_x == gain_p, [&](Part part) {
    const Tensor s = of(residual, part);
    ops::rmsnorm_forward(device(), s, {}, master(part == Part::p ? gain_p : gain_x), eps(), s, of(n, part),
                         of(rstd, part));
  });
}

Decoder::Weight Decoder::weight(int i) const {
  if (options_.int8 != nullptr) return options_.int8->of(i);
  return store_.rounded(i);
}

Decoder::Weight Decoder::weight(int i, int64_t from, int64_t count) const {
  return std::visit([&](const auto& w) -> Weight { return w.rows_from(from, count); }, weight(i));
}

// Where a call goes: into the program that is being recorded, if that takes it.
const Exec& Decoder::device() {
  if (program_ != nullptr) program_->launch();
  return ex_;
}

template <class Add>
bool Decoder::in_program(const Weight& weight, Add&& add) {
  const auto* w = std::get_if<Tensor>(&weight);
  return program_ != nullptr && w != nullptr && add(*w);
}

void Decoder::product(const ops::DecodeRows& x, const Weight& weight, Tensor y, Tensor rest) {
  if (in_program(weight, [&](Tensor w) { return program_->linear(x, w, y, rest); })) return;
  std::visit([&](const auto& w) { ops::decode_linear(device(), x, w, y, rest); }, weight);
}

void Decoder::product_swiglu(const ops::DecodeRows& x, const Weight& weight, Tensor gate_up, Tensor h) {
  if (in_program(weight, [&](Tensor w) { return program_->linear_swiglu(x, w, h); })) return;
  std::visit([&](const auto& w) { ops::decode_linear_swiglu(device(), x, w, gate_up, h); }, weight);
}

void Decoder::product_add(Tensor x, const Weight& weight, Tensor delta, Tensor s) {
  if (in_program(weight, [&](Tensor w) { return program_->linear_add(x, w, s); })) return;
  std::visit([&](const auto& w) { ops::decode_linear_add(device(), x, w, delta, s); }, weight);
}

// The residual's rows, normed by the product that takes them.
ops::DecodeRows Decoder::normed(Part part, int gain) {
  const ModelConfig& c = plan_.config;
  return {of(rows(b_.residual, c.state.width, c.pred.width), part), master(gain), eps(),
          of(rows(b_.n, c.state.width, c.pred.width), part), of(rows(b_.rstd, 1, 1), part)};
}

void Decoder::rotate(Tensor x, int64_t heads, int64_t block, std::span<const int32_t> positions, int gain,
                     Tensor y) {
  Tensor rstd;
  if (gain != kNoParameter) {
    rstd = b_.head_rstd.cols_from(0, x.rows * heads);
    rstd.rows = x.rows, rstd.cols = rstd.stride = heads;
  }
  ops::rope_forward(device(), x, heads, rope_.of(plan_.config, block), positions,
                    {gain == kNoParameter ? Tensor{} : master(gain), eps()}, rstd, y);
}

Decoder::Projections Decoder::projections(size_t stage, Wanted keys) const {
  const ModelConfig& c = plan_.config;
  const int64_t kx = keys.x ? kv_width(c, c.state) : 0, kp = keys.p ? kv_width(c, c.pred) : 0;
  return {widths(b_.q, c.state.heads, c.pred.heads),
          widths(c.qk_norm ? b_.q_normed : b_.q, c.state.heads, c.pred.heads),
          rows(b_.kv[stage], 2 * kx, 2 * kp),
          c.qk_norm ? rows(b_.k[stage], kx, kp) : Rows{},
          kx,
          kp};
}

// Both streams' rows can be projected by one product.
bool Decoder::one_projection(const Stage& stage) const {
  if (stage.state < 0 || stage.pred < 0) return false;
  const BlockParameters &x = state_block(stage.state), &p = pred_block(stage.pred);
  const ModelConfig& c = plan_.config;
  return x.qkv == p.qkv && x.norm1 == p.norm1 && c.state.width == c.pred.width;
}

// Queries, keys and values of those streams that need them.
void Decoder::project(size_t stage, Wanted queries, Wanted keys) {
  const ModelConfig& c = plan_.config;
  const Stage& s = plan_.stages[stage];
  const BlockParameters &wx = state_block(s.state), &wp = pred_block(s.pred);
  const Projections to = projections(stage, keys);
  const auto weights = [&](Part part) -> const BlockParameters& { return part == Part::p ? wp : wx; };
  const bool one_weight = wx.qkv == wp.qkv, one_norm = wx.norm1 == wp.norm1;
  // Of few rows all is projected, wanted or not: one product then stands where there would be a norm and two.
  const bool x_rows = queries.x || keys.x, p_rows = queries.p || keys.p;
  if (queries != keys && keys.x && p_rows && x_rows_ + p_rows_ <= ops::kFewDecodeRows && one_projection(s)) {
    const int64_t width = 2 * kv_width(c, c.state);
    product(normed(Part::both, wx.norm1), weight(wx.qkv), to.q.both, rows(b_.kv[stage], width, width).both);
  } else if (queries == keys && (one_norm || !one_weight || !(keys.x && keys.p))) {
    each(keys.x, keys.p, one_weight && one_norm, [&](Part part) {
      const BlockParameters& w = weights(part);
      product(normed(part, w.norm1), weight(w.qkv), of(to.q, part), of(to.kv, part));
    });
  } else {
    // Rows that one product might take, in other company, are normed as it norms them.
    const bool alike = one_projection(s);
    const Rows n = rows(b_.n, c.state.width, c.pred.width);
    if (!alike) norm(x_rows, p_rows, wx.norm1, wp.norm1);
    const auto rows_of = [&](Part part) {
      return alike ? normed(part, wx.norm1) : ops::DecodeRows(of(n, part));
    };
    each(queries.x, queries.p, one_weight, [&](Part part) {
      const BlockParameters& w = weights(part);
      product(rows_of(part), weight(w.qkv, 0, w.q_rows), of(to.q, part));
    });
    each(keys.x, keys.p, one_weight, [&](Part part) {
      const BlockParameters& w = weights(part);
      product(rows_of(part), weight(w.qkv, w.q_rows, w.kv_rows), of(to.kv, part));
    });
  }
  if (keys.x)
    keys_[size_t(caches_.find(KeyPair::state, s.state))] = {to.keys(Part::x),
                                                            to.kv.x.cols_from(to.kx, to.kx)};
  if (keys.p)
    keys_[size_t(caches_.find(KeyPair::pred, s.pred))] = {to.keys(Part::p), to.kv.p.cols_from(to.kp, to.kp)};
}

void Decoder::rotate_rows(size_t stage, Wanted queries, Wanted keys) {
  const ModelConfig& c = plan_.config;
  const Stage& s = plan_.stages[stage];
  const BlockParameters &wx = state_block(s.state), &wp = pred_block(s.pred);
  const Projections of_stage = projections(stage, keys);
  const bool one_weight = wx.qkv == wp.qkv;
  each(queries.x, queries.p, one_weight && wx.q_norm == wp.q_norm, [&](Part part) {
    const bool pred = part == Part::p;
    rotate(of(of_stage.q, part), pred ? c.pred.heads : c.state.heads, pred ? s.pred : s.state,
           positions(part), (pred ? wp : wx).q_norm, of(of_stage.q_turned, part));
  });
  each(keys.x, keys.p, one_weight && wx.k_norm == wp.k_norm, [&](Part part) {
    const bool pred = part == Part::p;
    rotate(of_stage.raw_keys(part), (pred ? of_stage.kp : of_stage.kx) / c.head_dim, pred ? s.pred : s.state,
           positions(part), (pred ? wp : wx).k_norm, of_stage.keys(part));
  });
}

// Keys that prediction blocks project from the state residual that enters block `level`.
void Decoder::read_level(int64_t level) {
  for (const Plan::LevelReaders& r : plan_.own_readers)
    for (const int64_t i : r.blocks)
      if (r.level == level) read_keys(size_t(caches_.find(KeyPair::reader, i)), params_.pred[size_t(i)], i);
}

void Decoder::read_keys(size_t pair, const BlockParameters& b, int64_t rope_block) {
  const ModelConfig& c = plan_.config;
  const int64_t heads = caches_.pairs()[pair].kv_heads, width = heads * c.head_dim;
  const Tensor residual = rows(b_.residual, c.state.width, c.pred.width).x,
               n = rows(b_.level_n, c.state.width, 0).x;
  const Tensor kv = rows(b_.read_kv[pair], 2 * width, 0).x, k = kv.cols_from(0, width);
  product({residual, master(b.read_norm), eps(), n, rows(b_.rstd, 1, 1).x},
          weight(b.read_kv, b.read_kv_from, 2 * width), kv);
  keys_[pair] = {c.qk_norm ? rows(b_.read_k[pair], width, 0).x : k, kv.cols_from(width, width)};
  rotate(k, heads, rope_block, positions(Part::x), b.read_k_norm, keys_[pair].k);
}

// Whether prediction blocks of other stages read the keys of a stage's state block.
bool Decoder::read_elsewhere(const Stage& stage) const {
  const ModelConfig& c = plan_.config;
  return std::ranges::any_of(plan_.stages, [&](const Stage& other) {
    return other.pred >= 0 && other.state != stage.state && c.read_kv != ReadKv::own &&
           c.levels[size_t(other.pred)] == stage.state && !c.band_px(other.pred).empty();
  });
}

// `fresh`: keys that are this stage's own. They and the queries are as the products left them.
void Decoder::attention(size_t n_stage, Wanted asking, Wanted fresh) {
  const ModelConfig& c = plan_.config;
  const Stage& stage = plan_.stages[n_stage];
  const bool x = asking.x, p = asking.p;
  const Tower& tower = stage.state >= 0 ? c.state : c.pred;
  const ops::DecodeShape shape{tower.heads, tower.kv_heads, c.head_dim,
                               float(1.0 / std::sqrt(double(c.head_dim)))};
  const Projections own_rows = projections(n_stage, fresh);
  const Rows q = own_rows.q_turned, o = widths(b_.o, c.state.heads, c.pred.heads);
  std::array<ops::DecodeQueries, ops::kMaxQueryStreams> queries;
  std::array<ops::DecodeKeys, ops::kMaxKeySets> keys;
  constexpr size_t kState = 0, kPred = 1, kRead = 2;
  const auto set = [&](size_t n, KeyPair::Source source, int64_t block) {
    const int64_t pair = caches_.find(source, block);
    SPS_CHECK(pair >= 0);
    keys[n] = {keys_[size_t(pair)].k, keys_[size_t(pair)].v, source == KeyPair::pred ? 1 : 0,
               caches_.cache(size_t(pair))};
  };
  // A band cannot reach further back than a text is long.
  const auto within = [&](Band band) {
    if (band.hi >= c.context - 1) band.hi = Band::kInf;
    return band;
  };
  if (need_of(plan_.state, stage.state) != Need::none) set(kState, KeyPair::state, stage.state);
  if (p_rows_ > 0 && stage.pred >= 0 && plan_.pred_keys[size_t(stage.pred)])
    set(kPred, KeyPair::pred, stage.pred);
  if (x) {
    const Band xp = stage.pred >= 0 ? c.xp : Band::none();
    queries[0] = {q.x, o.x, {within(c.band_xx(stage.state)), within(xp), Band::none()}};
  }
  if (p) {
    const Band px = within(c.band_px(stage.pred));
    const int64_t level = c.levels[size_t(stage.pred)];
    const bool reads = !px.empty(), own = c.read_kv == ReadKv::own;
    const bool beside = reads && !own && level < c.state.layers && stage.state == level;
    queries[1] = {q.p, o.p, {beside ? px : Band::none(), within(c.pp), beside ? Band::none() : px}};
    if (reads && own)
      set(kRead, KeyPair::reader, stage.pred);
    else if (reads && level == c.state.layers)
      set(kRead, KeyPair::read_head, 0);
    else if (reads && !beside)
      set(kRead, KeyPair::state, level);
  }
  // In a step of one position a text attention itself turns the rows and keeps the keys, where it can.
  const BlockParameters &wx = state_block(stage.state), &wp = pred_block(stage.pred);
  const auto gain = [&](int i) { return i == kNoParameter ? Tensor{} : master(i); };
  ops::DecodeRotation rotation;
  rotation.table = rope_.of(c, x || fresh.x ? stage.state : stage.pred), rotation.eps = eps();
  const bool one_table =
      !(p || fresh.p) || !(x || fresh.x) || rotation.table.cos.data == rope_.of(c, stage.pred).cos.data;
  auto raw_queries = queries;
  auto raw_keys = keys;
  if (x) raw_queries[0].q = own_rows.q.x, rotation.q_gain[0] = gain(wx.q_norm);
  if (p) raw_queries[1].q = own_rows.q.p, rotation.q_gain[1] = gain(wp.q_norm);
  const auto turn = [&](size_t n, Part part, int norm, bool keep) {
    rotation.set[n] = {keys[n].k, gain(norm), keep};
    raw_keys[n].k = own_rows.raw_keys(part);
  };
  if (fresh.x) turn(kState, Part::x, wx.k_norm, keys[kState].cache.paged || !read_elsewhere(stage));
  if (fresh.p) turn(kPred, Part::p, wp.k_norm, true);
  if (one_table && ops::decode_attention_rotates(ex_, shape, lists_, raw_queries, raw_keys, rotation)) {
    if (program_ == nullptr || !program_->attention(shape, lists_, raw_queries, raw_keys, rotation))
      ops::decode_attention(device(), shape, lists_, raw_queries, raw_keys, rotation);
    if (fresh.x) kept_[size_t(caches_.find(KeyPair::state, stage.state))] = rotation.set[kState].keep;
    if (fresh.p) kept_[size_t(caches_.find(KeyPair::pred, stage.pred))] = true;
    return;
  }
  rotate_rows(n_stage, asking, fresh);
  ops::decode_attention(device(), shape, lists_, queries, keys);
}

void Decoder::attention_out(const Stage& stage, bool x, bool p) {
  const ModelConfig& c = plan_.config;
  const int wx = state_block(stage.state).out, wp = pred_block(stage.pred).out;
  const Rows o = widths(b_.o, c.state.heads, c.pred.heads),
             delta = rows(b_.delta, c.state.width, c.pred.width),
             residual = rows(b_.residual, c.state.width, c.pred.width);
  each(x, p, wx == wp, [&](Part part) {
    product_add(of(o, part), weight(part == Part::p ? wp : wx), of(delta, part), of(residual, part));
  });
}

void Decoder::feed_forward(const Stage& stage, bool x, bool p) {
  const ModelConfig& c = plan_.config;
  const BlockParameters &wx = state_block(stage.state), &wp = pred_block(stage.pred);
  x = x && wx.norm2 != kNoParameter, p = p && wp.norm2 != kNoParameter;  // else a block of attention alone
  const int64_t fx = ffn_width(c.state, stage.state), fp = ffn_width(c.pred, stage.pred);
  const Rows n = rows(b_.n, c.state.width, c.pred.width), gate_up = rows(b_.gate_up, 2 * fx, 2 * fp),
             h = rows(b_.h, fx, fp), delta = rows(b_.delta, c.state.width, c.pred.width),
             residual = rows(b_.residual, c.state.width, c.pred.width);
  // One product of rows that are normed differently does not norm them itself.
  const bool one_weight = wx.gate_up == wp.gate_up && wx.down == wp.down,
             apart = x && p && one_weight && wx.norm2 != wp.norm2;
  if (apart) norm(x, p, wx.norm2, wp.norm2);
  each(x, p, one_weight, [&](Part part) {
    const BlockParameters& w = part == Part::p ? wp : wx;
    product_swiglu(apart ? of(n, part) : normed(part, w.norm2), weight(w.gate_up), of(gate_up, part),
                   of(h, part));
    product_add(of(h, part), weight(w.down), of(delta, part), of(residual, part));
  });
}

// One FFN reads what the gates make of both streams' rows, and both take its output.
void Decoder::pooled(int64_t block) {
  const ModelConfig& c = plan_.config;
  const BlockParameters& w = params_.state[size_t(block)];
  norm(true, true, w.norm2, pred_block(block).norm2);
  const Rows n = rows(b_.n, c.state.width, c.pred.width), delta = rows(b_.delta, c.state.width, c.pred.width),
             residual = rows(b_.residual, c.state.width, c.pred.width);
  const int64_t width = ffn_width(c.state, block);
  const Tensor m = rows(b_.pool_m, c.state.width, 0).x, f = rows(b_.pool_f, c.state.width, 0).x,
               gate_up = rows(b_.gate_up, 2 * width, 0).x, h = rows(b_.h, width, 0).x;
  const auto gate = [&](int64_t i) { return rows(b_.gates.cols_from(i * x_rows_, x_rows_), 1, 0).x; };
  const bool state_takes = plan_.state[size_t(block)] == Need::all;
  const auto of_state = [&](Tensor t) { return state_takes ? t : Tensor{}; };
  const ops::GateRows gates{gate(0), of_state(gate(1)), gate(2)};
  ops::pool_forward(device(), n.x, n.p,
                    {master(w.pool_in), of_state(master(w.pool_state)), master(w.pool_pred)}, gates, m);
  product_swiglu(m, weight(w.gate_up), gate_up, h);
  product(h, weight(w.down), f);
  ops::scatter_forward(device(), f, gates, of_state(delta.x), delta.p);
  each(state_takes, true, true,
       [&](Part part) { ops::add_rows(device(), of(residual, part), of(delta, part), of(residual, part)); });
}

Tensor Decoder::readout() {
  const ModelConfig& c = plan_.config;
  const auto picked = int64_t(picks_.size());
  const Tensor logits = b_.logits.rows_from(0, picked);
  if (picked == 0) return logits;
  const Rows residual = rows(b_.residual, c.state.width, c.pred.width);
  ops::DecodeRows last(c.readout == Readout::pred ? residual.p : residual.x, master(params_.final_norm),
                       eps(), b_.final_n.rows_from(0, picked), b_.final_rstd.rows_from(0, picked));
  last.pick = picks_, last.s = b_.final_s.rows_from(0, picked);
  product(last, weight(params_.head), logits);
  return logits;
}

}  // namespace sps
