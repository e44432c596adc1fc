#include "model/describe.h"

#include <algorithm>

#include "base/error.h"
#include "model/keys.h"

namespace sps {

namespace {

bool same(const CacheLine& a, const CacheLine& b) {
  return a.kind == b.kind && a.numbers == b.numbers && a.horizon.kind == b.horizon.kind &&
         a.horizon.steps == b.horizon.steps;
}

void phrase(std::vector<std::string>& phrases, std::string_view tower, const std::vector<Need>& needs) {
  for (size_t begin = 0; begin < needs.size();) {
    size_t end = begin + 1;
    while (end < needs.size() && needs[end] == needs[begin]) ++end;
    const std::string blocks = end - begin == 1 ? fmt::format("{} block {}", tower, begin)
                                                : fmt::format("{} blocks {} to {}", tower, begin, end - 1);
    switch (needs[begin]) {
      case Need::none:
        phrases.push_back(blocks + ": everything");
        break;
      case Need::keys:
        phrases.push_back(blocks + ": all but keys and values");
        break;
      case Need::pool:
        phrases.push_back(blocks + ": the gate that lets the pooled FFN's output back in");
        break;
      case Need::all:
        break;
    }
    begin = end;
  }
}

nlohmann::ordered_json flops_json(const Flops& f) {
  return {{"qkv", f.qkv},           {"read", f.read},    {"scores", f.scores}, {"softmax", f.softmax},
          {"weighted", f.weighted}, {"out", f.out},      {"ffn", f.ffn},       {"gates", f.gates},
          {"head", f.head},         {"total", f.total()}};
}

nlohmann::ordered_json training_json(const Description& d) {
  const auto total = [&](const Flops& forward) { return training_flops(forward, d.options.freeze); };
  return {{"published", total(d.published)},
          {"required", total(d.required)},
          {"executed", total(d.executed) + d.made_again.total()}};
}

nlohmann::ordered_json band_json(Band band, int64_t length) {
  if (band.empty()) return nullptr;
  nlohmann::ordered_json j{{"lo", band.lo}, {"hi", nullptr}};  // null: without end
  if (band.hi != Band::kInf) j["hi"] = band.hi;
  j["pairs"] = ops::band_area(band, length);
  return j;
}

std::string_view name_of(KeyPair::Source kind) {
  switch (kind) {
    case KeyPair::state:
      return "state";
    case KeyPair::pred:
      return "prediction";
    case KeyPair::reader:
      return "read";
    case KeyPair::read_head:
      return "read_head";
  }
  return "?";
}

}  // namespace

std::string grouped(int64_t n) {
  std::string text = std::to_string(n);
  const size_t sign = n < 0 ? 1 : 0;
  for (size_t at = text.size(); at > sign + 3;) text.insert(at -= 3, ",");
  return text;
}

int64_t DecodeCache::persistent_numbers() const {
  int64_t n = 0;
  for (const CacheLine& l : lines)
    if (l.horizon.kind == Horizon::persistent) n += l.blocks * l.numbers;
  return n;
}

int64_t DecodeCache::ring_numbers(int64_t tokens) const {
  int64_t n = 0;
  for (const CacheLine& l : lines)
    if (l.horizon.kind == Horizon::ring) n += l.blocks * l.numbers * std::min(l.horizon.steps, tokens);
  return n;
}

DecodeCache decode_cache(const Plan& plan) {
  DecodeCache cache;
  for (const KeyPair& pair : key_pairs(plan)) {
    const CacheLine line{pair.source, 1, 2 * pair.kv_heads * plan.config.head_dim, pair.horizon};
    if (line.horizon.kind == Horizon::nothing) continue;
    const auto found = std::find_if(cache.lines.begin(), cache.lines.end(),
                                    [&](const CacheLine& l) { return same(l, line); });
    if (found == cache.lines.end())
      cache.lines.push_back(line);
    else
      ++found->blocks;
  }
  return cache;
}

// Two-tower spec, 5.3.
std::vector<int64_t> prefill_rows(const Plan& plan, int64_t length) {
  const ModelConfig& c = plan.config;
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < c.pred.layers; ++i) {
    const int64_t later = c.pred.layers - 1 - i;  // blocks whose windows look back from the last row
    const int64_t reach = plan.lockstep ? length : c.pp.empty() ? 0 : std::min(c.pp.hi, length);
    rows.push_back(plan.lockstep ? length : std::min(length, later * reach + 1));
  }
  return rows;
}

double prefill_flops(const Plan& plan, int64_t length) {
  const ModelConfig& c = plan.config;
  const double T = double(length);
  Plan part = plan;
  std::fill(part.pred.begin(), part.pred.end(), Need::none);
  const Flops state = flops_executed(part, length);
  double total = state.total() - state.head + state.head / T;

  std::fill(part.state.begin(), part.state.end(), Need::none);
  part.read_head = false;
  const std::vector<int64_t> rows = prefill_rows(plan, length);
  for (size_t i = 0; i < rows.size(); ++i) {
    part.pred.assign(rows.size(), Need::none);
    part.pred[i] = plan.pred[i];
    const Flops f = flops_executed(part, length);
    const double share = double(rows[i]) / T;
    const bool keys = plan.pred_keys[i], once = i == 0 && plan.constant_start;
    const double kv =
        keys && !once ? 2.0 * double(c.pred.width) * 2 * double(c.pred.kv_heads * c.head_dim) : 0;
    // Keys are also needed of the rows that the first of these rows sees.
    const int64_t key_rows =
        keys && !c.pp.empty() ? std::min(length, rows[i] + std::min(c.pp.hi, length)) : length;
    total += f.read + kv * double(key_rows) / T + (f.qkv - kv) * (once ? 1 : share);
    total += (f.out + f.ffn + f.gates) * share;
    if (plan.pred[i] < Need::pool) continue;
    const double q = double(c.pred.heads * c.head_dim);
    for (const Band b : {c.band_px(int64_t(i)), c.pp})
      total += (4 * q + 3 * double(c.pred.heads)) *
               double(ops::band_area(b, length) - ops::band_area(b, length - rows[i])) / T;
  }
  return total;
}

int64_t serial_blocks(const Plan& plan) {
  const ModelConfig& c = plan.config;
  if (c.readout == Readout::state) return c.state.layers;
  int64_t done = c.pred_input == PredInput::state ? c.state.layers : 0;
  for (const int64_t level : c.levels) done = std::max(done, c.px.empty() ? 0 : level) + 1;
  return done;
}

std::vector<std::string> dead_work(const Plan& plan) {
  std::vector<std::string> phrases;
  phrase(phrases, "state", plan.state);
  phrase(phrases, "prediction", plan.pred);
  if (plan.constant_start)
    phrases.push_back(
        "prediction block 0: its rows start equal, so they are normed and projected once, not per row");
  return phrases;
}

Description describe(const ModelConfig& config, DescribeOptions options) {
  if (options.length < 0) usage_error("--length {}: expected a positive number of tokens", options.length);
  if (options.picture < 0 || options.picture > kMaxPicture)
    usage_error("--mask {}: expected 0 to {} positions", options.picture, kMaxPicture);
  if (options.length == 0) options.length = config.context;
  Description d;
  d.options = std::move(options);
  d.plan = make_plan(config);
  const ModelParameters parameters = describe_parameters(config, d.options.freeze);
  d.total = parameters.count();
  d.non_embedding = parameters.non_embedding();
  for (const Parameter& p : parameters.list) d.no_decay += p.decays() ? 0 : p.count();
  d.frozen = parameters.frozen();
  ModelOptions model;
  model.compute = d.options.dtype;
  model.max_rows = d.options.micro_batch * config.context;
  model.freeze = d.options.freeze;
  model.device = d.options.device;
  model.recompute = d.options.recompute;
  d.memory = plan_memory(config, model);
  d.cache = decode_cache(d.plan);
  const int64_t length = d.options.length;
  d.prefill_rows = prefill_rows(d.plan, length);
  d.prefill_flops = prefill_flops(d.plan, length);
  d.serial_blocks = serial_blocks(d.plan);
  d.dead = dead_work(d.plan);
  d.published = flops_published(config, length);
  d.required = flops_required(config, length);
  d.executed = flops_executed(d.plan, length);
  d.made_again = flops_made_again(d.plan, d.options.recompute, d.options.freeze, length);
  return d;
}

nlohmann::ordered_json to_json(const Description& d) {
  const ModelConfig& c = d.config();
  const int64_t length = d.options.length;
  ModelKeys keys = keys_of(c);
  OptionTable table;
  bind_model(table, keys);

  nlohmann::ordered_json blocks = nlohmann::ordered_json::array();
  for (int64_t b = 0; b < std::max(c.state.layers, c.pred.layers); ++b) {
    nlohmann::ordered_json block{{"block", b}};
    if (b < c.state.layers)
      block["state"] = {
          {"ffn", c.state.ffn[size_t(b)]},
          {"need", name_of(d.plan.state[size_t(b)])},
          {"full_attention", c.full_attention(b)},
          {"visible_pairs", ops::band_area(c.band_xx(b), length) + ops::band_area(c.xp, length)}};
    if (b < c.pred.layers)
      block["prediction"] = {
          {"ffn", c.pred.ffn[size_t(b)]},
          {"need", name_of(d.plan.pred[size_t(b)])},
          {"reads_level", c.levels[size_t(b)]},
          {"keys", bool(d.plan.pred_keys[size_t(b)])},
          {"prefill_rows", d.prefill_rows[size_t(b)]},
          {"visible_pairs", ops::band_area(c.band_px(b), length) + ops::band_area(c.pp, length)}};
    blocks.push_back(block);
  }

  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  for (const CacheLine& l : d.cache.lines) {
    nlohmann::ordered_json line{{"what", name_of(l.kind)},
                                {"blocks", l.blocks},
                                {"bytes_per_block", 2 * l.numbers},
                                {"steps", nullptr}};
    if (l.horizon.kind == Horizon::ring) line["steps"] = l.horizon.steps;
    lines.push_back(line);
  }

  return {
      {"name", d.options.name},
      {"family", c.family},
      {"config", table.to_json().at("model")},
      {"parameters",
       {{"total", d.total},
        {"non_embedding", d.non_embedding},
        {"embedding", d.total - d.non_embedding},
        {"no_decay", d.no_decay},
        {"frozen", d.frozen}}},
      {"memory",
       {{"device", d.options.device == Device::cuda ? "cuda" : "cpu"},
        {"dtype", dtype_name(d.options.dtype)},
        {"recompute", name_of(d.options.recompute)},
        {"micro_batch", d.options.micro_batch},
        {"context", c.context},
        {"weights_bytes", d.memory.weights},
        {"gradients_bytes", d.memory.gradients},
        {"optimizer_bytes", d.memory.moments},
        {"activations_bytes", d.memory.activations},
        {"tables_bytes", d.memory.tables},
        {"scratch_bytes", d.memory.scratch},
        {"context_bytes", d.memory.context},
        {"total_bytes", d.memory.total()}}},
      {"length", length},
      {"bands",
       {{"xx", band_json(c.xx, length)},
        {"xp", band_json(c.xp, length)},
        {"px", band_json(c.has_pred() ? c.px : Band::none(), length)},
        {"pp", band_json(c.pp, length)}}},
      {"order", {{"lockstep", d.plan.lockstep}, {"joint", d.plan.joint}, {"serial_blocks", d.serial_blocks}}},
      {"cache",
       {{"dtype", "bf16"},
        {"bytes_per_token", 2 * d.cache.persistent_numbers()},
        {"ring_bytes_per_sequence", 2 * d.cache.ring_numbers()},
        {"lines", lines}}},
      {"prefill", {{"flops_per_token", d.prefill_flops}, {"prediction_rows", d.prefill_rows}}},
      {"dead_work", d.dead},
      {"flops_per_token",
       {{"published", flops_json(d.published)},
        {"required", flops_json(d.required)},
        {"executed", flops_json(d.executed)},
        {"training", training_json(d)}}},
      {"blocks", blocks}};
}

}  // namespace sps
