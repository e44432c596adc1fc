#include "model/model.h"

#include <algorithm>

#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear/linear.h"
#include "ops/rows/rows.h"

namespace sps {

namespace {

size_t activation_bytes(const Plan& plan, const ModelParameters& params, const ModelOptions& o) {
  Arena planning;
  Activations a;
  Gradients g;
  lay_out({&plan, &params, o.compute, o.train}, o.max_rows, planning, a, g);
  return planning.peak();
}

}  // namespace

MemoryPlan plan_memory(const ModelConfig& config, const ModelOptions& o) {
  const Plan plan = make_plan(config, o.eliminate_dead);
  const ModelParameters params = describe_parameters(config);
  const size_t master = o.compute == DType::f64 ? 8 : 4;
  MemoryPlan m;
  m.weights = size_t(params.count()) * (master + (o.compute == DType::bf16 ? 2 : 0));
  m.gradients = o.train ? size_t(params.count()) * master : 0;
  m.activations = activation_bytes(plan, params, o);
  return m;
}

Model::Model(const ModelConfig& config, const ModelOptions& options)
    : plan_(make_plan(config, options.eliminate_dead)),
      options_(options),
      params_(describe_parameters(config, options.freeze)),
      store_(params_.list, options.compute, options.train) {
  SPS_CHECK(options_.max_rows > 0);
  memory_ = Arena(activation_bytes(plan_, params_, options_), Device::cpu);

  const DType acc = store_.master();
  const auto lay_out_tables = [&](Arena& arena) {
    const auto table = [&](ops::RopeTable& t, int64_t width) {
      t.cos = arena.take(acc, config.context, width / 2);
      t.sin = arena.take(acc, config.context, width / 2);
      t.pairs = config.rope_pairs;
    };
    // Without a sliding window every block is a full one and only the first table is used.
    const int64_t full_width =
        std::max<int64_t>(2, int64_t(double(config.head_dim) * config.rope_fraction / 2 + 0.5) * 2);
    table(rope_full_, full_width);
    if (config.sliding_window > 0) table(rope_local_, config.head_dim);
    unit_gain_ = arena.take(acc, 1, config.state.width);
  };
  Arena planning;
  lay_out_tables(planning);
  tables_ = Arena(planning.peak(), Device::cpu);
  lay_out_tables(tables_);
  ops::rope_fill(rope_full_, config.rope_theta);
  if (config.sliding_window > 0) ops::rope_fill(rope_local_, config.rope_theta);
  ops::fill(ex_, unit_gain_, 1);

  picked_.resize(size_t(options_.max_rows));
  picked_targets_.resize(size_t(options_.max_rows));
  x_ = {&plan_.config.state, &params_.state, &plan_.state, &a_.state, {}, {}, false};
  p_ = {&plan_.config.pred, &params_.pred, &plan_.pred, &a_.pred, {}, {}, false};
}

Loss Model::train(const ModelInput& input, double scale) {
  SPS_CHECK(options_.train);
  begin(input);
  if (picked_count_ == 0) return {};
  forward(input);
  const std::span<const int32_t> targets{picked_targets_.data(), size_t(picked_count_)};
  ops::head_loss_train(ex_, a_.final_n.rows_from(0, picked_count_), weight(params_.head), targets,
                       float(scale), a_.nll.rows_from(0, picked_count_),
                       g_.final_n.rows_from(0, picked_count_), grad(params_.head));
  backward(input);
  return sum_loss();
}

Loss Model::evaluate(const ModelInput& input, std::span<double> nll) {
  begin(input);
  std::fill(nll.begin(), nll.end(), 0.0);
  if (picked_count_ == 0) return {};
  forward(input);
  const std::span<const int32_t> targets{picked_targets_.data(), size_t(picked_count_)};
  ops::head_loss_forward(ex_, a_.final_n.rows_from(0, picked_count_), weight(params_.head), targets,
                         a_.nll.rows_from(0, picked_count_));
  if (!nll.empty()) {
    SPS_CHECK(int64_t(nll.size()) == input.rows());
    for (int64_t r = 0; r < picked_count_; ++r) nll[size_t(picked_[size_t(r)])] = nll_at(r);
  }
  return sum_loss();
}

void Model::logits(const ModelInput& input, std::span<const int32_t> rows, Tensor out) {
  begin(input);
  SPS_CHECK(int64_t(rows.size()) <= options_.max_rows && out.rows == int64_t(rows.size()));
  std::copy(rows.begin(), rows.end(), picked_.begin());
  picked_count_ = int64_t(rows.size());
  forward(input);
  ops::linear_forward(ex_, a_.final_n.rows_from(0, picked_count_), weight(params_.head), out);
}

double Model::nll_at(int64_t row) const {
  return a_.nll.dtype == DType::f64 ? *a_.nll.row<double>(row) : double(*a_.nll.row<float>(row));
}

// Added up in double and in order: the sum does not depend on threads.
Loss Model::sum_loss() const {
  Loss loss;
  loss.scored = 0;
  for (int64_t r = 0; r < picked_count_; ++r) {
    if (picked_targets_[size_t(r)] < 0) continue;
    loss.nll += nll_at(r);
    ++loss.scored;
  }
  return loss;
}

Tensor Model::state_level(int64_t level) const {
  if (level < plan_.state_blocks_alive()) return a_.state[size_t(level)].s1;
  return level == plan_.state_blocks_alive() ? a_.top : Tensor{};
}

std::span<const int32_t> Model::pick() const {
  if (picked_count_ == input_.rows()) return {};
  return {picked_.data(), size_t(picked_count_)};
}

Tensor Model::prediction_start() const {
  return config().pred_input == PredInput::row ? master(params_.embed).rows_from(config().pred_row, 1)
                                               : master(params_.pred_input);
}

Tensor Model::prediction_start_grad() const {
  return config().pred_input == PredInput::row ? grad(params_.embed).rows_from(config().pred_row, 1)
                                               : grad(params_.pred_input);
}

ops::QkNorm Model::qk_norm(int gain) const {
  return {gain == kNoParameter ? Tensor{} : master(gain), float(config().norm_eps)};
}

Tensor Model::qkv_weight(const BlockParameters& b, bool query, bool keys, bool gradient) const {
  const Tensor w = gradient ? grad(b.qkv) : weight(b.qkv);
  const int64_t from = query ? 0 : b.q_rows;
  return w.rows_from(from, (query ? b.q_rows : 0) + (keys ? b.kv_rows : 0));
}

std::pair<ReaderActivations*, size_t> Model::reader_of(int64_t block) {
  for (ReaderActivations& r : a_.readers)
    for (size_t n = 0; n < r.blocks.size(); ++n)
      if (r.blocks[n] == block) return {&r, n};
  if (plan_.read_head && config().levels[size_t(block)] == config().state.layers) return {&a_.read_head, 0};
  return {nullptr, 0};
}

}  // namespace sps
