#include "model/model.h"

#include <algorithm>
#include <utility>

#include "ops/clip/clip.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear/linear.h"
#include "ops/rows/rows.h"

namespace sps {

namespace {

Tensor take_unit_gain(const ModelConfig& c, DType acc, Arena& arena) {
  return arena.take(acc, 1, c.state.width);
}

}  // namespace

size_t Model::table_bytes(const ModelConfig& config, DType master) {
  Arena planning;
  take_unit_gain(config, master, planning);
  return RopeTables::bytes(config, master) + planning.peak();
}

Model::Model(const ModelConfig& config, const ModelOptions& options)
    : plan_(make_plan(config, options.eliminate_dead)),
      options_(options),
      params_(describe_parameters(config, options.freeze)),
      made_again_(sps::made_again(plan_, options.recompute, options.freeze)),
      store_(params_.list, options.compute, options.train, options.device, options.masters),
      rope_(config, store_.master(), options.device) {
  SPS_CHECK(options_.max_rows > 0);
  ex_ = exec_on(options_.device);
  memory_ = Arena(sps::activation_bytes(shapes(), options_.max_rows), options_.device);

  Arena planning;
  take_unit_gain(config, store_.master(), planning);
  unit_gain_memory_ = Arena(planning.peak(), options_.device);
  unit_gain_ = take_unit_gain(config, store_.master(), unit_gain_memory_);
  ops::fill(ex_, unit_gain_, 1);

  const auto rows = size_t(options_.max_rows);
  const bool gpu = options_.device == Device::cuda;
  for (Pass& pass : passes_) {
    if (!gpu && &pass != &passes_[0]) continue;
    pass.lists = Bytes(list_bytes(options_.max_rows), gpu ? Memory::pinned : Memory::host);
    if (gpu) pass.nll = Bytes(rows * sizeof(float), Memory::pinned);
  }
  if (gpu) {
    indices_ = Bytes(list_bytes(options_.max_rows), Memory::device);
    flag_ = {indices_.data() + indices_.size() - sizeof(float), 1, 1, 1, DType::f32, Device::cuda};
  }
  x_ = {&plan_.config.state, &params_.state, &plan_.state, &a_.state, {}, {}, false};
  p_ = {&plan_.config.pred, &params_.pred, &plan_.pred, &a_.pred, {}, {}, false};
  both_ = {&plan_.config.state, &params_.state, nullptr, &a_.both, {}, {}, false};
}

Loss Model::train(const ModelInput& input, double scale) {
  start_train(input, scale);
  return take_loss();
}

void Model::start_train(const ModelInput& input, double scale) {
  SPS_CHECK(options_.train);
  if (flag_ && !std::exchange(started_, true)) ops::fill(ex_, flag_, 0);
  begin(input, scale);
  if (picked_count_ == 0) return;
  if (ex_.device == Device::cuda && options_.graphs)
    graphs_.run(ex_, {input_.batch, input_.length, picked_count_}, [this] { train_pass(); });
  else
    train_pass();
  take_nll();
}

void Model::train_pass() {
  forward();
  const Tensor nll = a_.nll.rows_from(0, picked_count_);
  ops::head_loss_train(ex_, a_.final_n.rows_from(0, picked_count_), weight(params_.head), picked_targets_,
                       scale_, nll, g_.final_n.rows_from(0, picked_count_), grad(params_.head));
  backward();
  if (flag_) ops::flag_not_finite(ex_, nll, flag_);
}

Loss Model::evaluate(const ModelInput& input, std::span<double> nll) {
  SPS_CHECK(loss_.scored == 0);
  begin(input, 0);
  std::fill(nll.begin(), nll.end(), 0.0);
  if (picked_count_ == 0) return {};
  forward();
  ops::head_loss_forward(ex_, a_.final_n.rows_from(0, picked_count_), weight(params_.head), picked_targets_,
                         a_.nll.rows_from(0, picked_count_));
  take_nll();
  const Loss loss = take_loss();
  if (!nll.empty()) {
    SPS_CHECK(int64_t(nll.size()) == input.rows());
    const Pass& pass = passes_[pass_];
    for (size_t r = 0; r < pass.picked.size(); ++r) nll[size_t(pass.picked[r])] = nll_at(pass, r);
  }
  return loss;
}

void Model::logits(const ModelInput& input, std::span<const int32_t> rows, Tensor out) {
  ModelInput all = input;
  all.targets = {};
  begin(all, 0);
  SPS_CHECK(int64_t(rows.size()) <= options_.max_rows && out.rows == int64_t(rows.size()));
  std::copy(rows.begin(), rows.end(), passes_[pass_].list(kPicked, options_.max_rows));
  picked_count_ = int64_t(rows.size());
  input_ = all;
  put_input();
  forward();
  Tensor made = out;
  if (ex_.device == Device::cuda && out.device == Device::cpu) {
    const size_t bytes = size_t(out.count()) * dtype_size(out.dtype);
    if (logits_.size() < bytes) synchronize(ex_), logits_ = Bytes(bytes, Memory::device);
    made = {logits_.data(), out.rows, out.cols, out.cols, out.dtype, Device::cuda};
  }
  ops::linear_forward(ex_, a_.final_n.rows_from(0, picked_count_), weight(params_.head), made);
  if (made.data != out.data) copy_tensor(made, out);
}

// The losses of the pass go to the CPU once they are there; nobody waits for them yet.
void Model::take_nll() {
  Pass& pass = passes_[pass_];
  if (ex_.device == Device::cuda)
    copy_bytes(ex_, pass.nll.data(), a_.nll.data, size_t(picked_count_) * sizeof(float));
  pass.done.set(ex_);
  pass.pending = true;
}

double Model::nll_at(const Pass& pass, size_t row) const {
  if (ex_.device == Device::cuda) return double(reinterpret_cast<const float*>(pass.nll.data())[row]);
  return a_.nll.dtype == DType::f64 ? *a_.nll.row<double>(int64_t(row))
                                    : double(*a_.nll.row<float>(int64_t(row)));
}

// Added up in double and in order: the sum does not depend on threads.
void Model::collect(Pass& pass) {
  if (!pass.pending) return;
  pass.done.wait();
  pass.pending = false;
  double nll = 0;
  for (size_t r = 0; r < pass.targets.size(); ++r) {
    if (pass.targets[r] < 0) continue;
    nll += nll_at(pass, r);
    ++loss_.scored;
  }
  loss_.nll += nll;
}

Loss Model::take_loss() {
  collect(passes_[1 - pass_]);  // the older one first
  collect(passes_[pass_]);
  started_ = false;
  return std::exchange(loss_, {});
}

Tensor Model::state_level(int64_t level) const {
  if (level < plan_.state_blocks_alive()) return a_.state[size_t(level)].s1;
  return level == plan_.state_blocks_alive() ? a_.top : Tensor{};
}

std::span<const int32_t> Model::pick() const {
  return picked_all_ ? std::span<const int32_t>{} : picked_;
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
