#include "model/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/hash.h"
#include "base/rng.h"
#include "base/threads.h"
#include "ops/rows/rows.h"
#include "tensor/device.h"

namespace sps {

namespace {

constexpr double kStd = 0.02;  // model spec, section 5

class Builder {
 public:
  explicit Builder(const ModelConfig& c) : c_(c) {
    // Attention outputs are scaled down with the deeper tower (two-tower spec 1.0); the FFN's output is not
    // (model spec, section 5: the reference scales attention alone, and the published numbers were made that
    // way).
    out_std_ = kStd / std::sqrt(2.0 * double(std::max(c.state.layers, c.pred.layers)));
  }

  ModelParameters build() {
    p_.embed = matrix("embed", c_.vocab, c_.state.width, kStd, true);
    for (int64_t j = 0; j < c_.state.layers; ++j) state_block(j);
    if (c_.has_pred()) prediction();
    const int64_t width = c_.readout == Readout::pred ? c_.pred.width : c_.state.width;
    p_.final_norm = gain("final_norm", width);
    p_.head = c_.tie_head ? p_.embed : matrix("head", c_.vocab, width, kStd, true);
    mark_products();
    return std::move(p_);
  }

 private:
  int add(Parameter p) {
    p_.list.push_back(std::move(p));
    return int(p_.list.size()) - 1;
  }
  int matrix(std::string name, int64_t rows, int64_t cols, double std, bool embedding = false) {
    return add({std::move(name), {rows, cols}, std, 0, embedding});
  }
  int gain(std::string name, int64_t d) { return add({std::move(name), {d}, 0, 1, false}); }
  int head_gain(const std::string& name) { return c_.qk_norm ? gain(name, c_.head_dim) : kNoParameter; }

  // A gain may be folded into what projects keys from a level, and a tied head is a table of embeddings.
  void mark_products() {
    const auto mark = [&](int i, bool elsewhere) {
      if (i == kNoParameter) return;
      p_.list[size_t(i)].product = true;
      p_.list[size_t(i)].elsewhere |= elsewhere;
    };
    const auto mark_block = [&](const BlockParameters& b) {
      for (const int i : {b.qkv, b.out, b.gate_up, b.down}) mark(i, false);
      mark(b.read_kv, true);
    };
    mark(p_.head, c_.tie_head);
    for (const auto* blocks : {&p_.state, &p_.pred})
      for (const BlockParameters& b : *blocks) mark_block(b);
    mark_block(p_.read_head);
  }

  void attention(const std::string& at, const Tower& t, bool keys, BlockParameters& b) {
    b.q_rows = t.heads * c_.head_dim;
    b.kv_rows = keys ? 2 * t.kv_heads * c_.head_dim : 0;
    b.qkv = matrix(at + (keys ? ".qkv" : ".q"), b.q_rows + b.kv_rows, t.width, kStd);
    b.q_norm = head_gain(at + ".q_norm");
    if (keys) b.k_norm = head_gain(at + ".k_norm");
    b.out = matrix(at + ".out", t.width, b.q_rows, out_std_);
  }
  void ffn(const std::string& at, int64_t d, int64_t width, BlockParameters& b) {
    b.gate_up = matrix(at + ".gate_up", 2 * width, d, kStd);
    b.down = matrix(at + ".down", d, width, kStd);
  }

  void state_block(int64_t j) {
    const std::string at = fmt::format("state.{}", j);
    const int64_t d = c_.state.width, width = c_.state.ffn[size_t(j)];
    BlockParameters b;
    b.norm1 = gain(at + ".norm1", d);
    attention(at, c_.state, true, b);
    if (width > 0) {  // else a block of attention alone: no second norm either
      b.norm2 = gain(at + ".norm2", d);
      ffn(at, d, width, b);
    }
    if (c_.has_pred() && c_.ffn == FfnMode::pooled) {
      b.pool_in = matrix(fmt::format("pool.{}.in", j), 1, 2 * d, 0);
      b.pool_state = matrix(fmt::format("pool.{}.state", j), 1, d, 0);
      b.pool_pred = matrix(fmt::format("pool.{}.pred", j), 1, d, 0);
    }
    p_.state.push_back(b);
  }

  void prediction() {
    if (c_.pred_input == PredInput::vector || c_.pred_input == PredInput::token)
      p_.pred_input = matrix("pred_input", 1, c_.pred.width, kStd, true);
    if (c_.pred_input == PredInput::table)
      p_.pred_embed = matrix("pred_embed", c_.vocab, c_.pred.width, kStd, true);
    if (make_plan(c_).read_head) {
      BlockParameters& b = p_.read_head;
      b.kv_rows = 2 * c_.state.kv_heads * c_.head_dim;
      b.read_norm = gain("read_head.norm", c_.state.width);
      b.read_kv = matrix("read_head.kv", b.kv_rows, c_.state.width, kStd);
      b.read_k_norm = head_gain("read_head.k_norm");
    }
    for (int64_t i = 0; i < c_.pred.layers; ++i) prediction_block(i);
  }

  void prediction_block(int64_t i) {
    const std::string at = fmt::format("pred.{}", i);
    const int64_t d = c_.pred.width, width = c_.pred.ffn[size_t(i)];
    const BlockParameters shared =
        c_.share.any() || c_.ffn == FfnMode::pooled ? p_.state[size_t(i)] : BlockParameters{};
    BlockParameters b;
    b.norm1 = c_.share.norms ? shared.norm1 : gain(at + ".norm1", d);
    if (c_.share.attention) {
      b.qkv = shared.qkv, b.q_norm = shared.q_norm, b.k_norm = shared.k_norm, b.out = shared.out;
      b.q_rows = shared.q_rows, b.kv_rows = shared.kv_rows;
    } else {
      attention(at, c_.pred, c_.pred_writes_keys(), b);
    }
    if (c_.read_kv == ReadKv::own && !c_.px.empty()) {
      b.read_norm = gain(at + ".read_norm", c_.state.width);
      if (c_.share.attention) {
        b.read_kv = shared.qkv, b.read_k_norm = shared.k_norm, b.read_kv_from = shared.q_rows;
      } else {
        b.read_kv = matrix(at + ".read_kv", 2 * c_.pred.kv_heads * c_.head_dim, c_.state.width, kStd);
        b.read_k_norm = head_gain(at + ".read_k_norm");
      }
    }
    if (width > 0) {
      b.norm2 = c_.share.norms ? shared.norm2 : gain(at + ".norm2", d);
      if (c_.share.ffn || c_.ffn == FfnMode::pooled) {
        b.gate_up = shared.gate_up, b.down = shared.down;
        b.pool_in = shared.pool_in, b.pool_state = shared.pool_state, b.pool_pred = shared.pool_pred;
      } else {
        ffn(at, d, width, b);
      }
    }
    p_.pred.push_back(b);
  }

  const ModelConfig& c_;
  ModelParameters p_;
  double out_std_ = 0;
};

}  // namespace

int64_t ModelParameters::count() const {
  int64_t n = 0;
  for (const Parameter& p : list) n += p.count();
  return n;
}

int64_t ModelParameters::non_embedding() const {
  int64_t n = 0;
  for (const Parameter& p : list) n += p.embedding ? 0 : p.count();
  return n;
}

int64_t ModelParameters::frozen() const {
  int64_t n = 0;
  for (const Parameter& p : list) n += p.frozen ? p.count() : 0;
  return n;
}

ModelParameters describe_parameters(const ModelConfig& config, Freeze freeze) {
  SPS_CHECK(freeze.state || !freeze.read_head);
  if (freeze.state) check_freezable(config);
  ModelParameters all = Builder(config).build();
  for (Parameter& p : all.list) p.frozen = freeze.covers(p.name);
  return all;
}

void lay_out_moments(const std::vector<Parameter>& list, DType master, Arena& arena,
                     std::vector<Tensor>& first, std::vector<Tensor>& second) {
  first.clear(), second.clear();
  for (const Parameter& p : list) {
    first.push_back(p.frozen ? Tensor{} : arena.take(master, 1, p.count()));
    second.push_back(p.frozen ? Tensor{} : arena.take(master, 1, p.count()));
  }
}

namespace {

bool holds_all(DType compute, bool gradients, Masters masters) {
  return gradients || compute != DType::bf16 || masters == Masters::all;
}
bool needs_master(const Parameter& p) {
  return !p.product || p.elsewhere;
}

}  // namespace

int64_t held_masters(const std::vector<Parameter>& list, DType compute, bool gradients, Masters masters) {
  int64_t count = 0;
  for (const Parameter& p : list)
    count += holds_all(compute, gradients, masters) || needs_master(p) ? p.count() : 0;
  return count;
}

ParameterStore::ParameterStore(const std::vector<Parameter>& list, DType compute, bool gradients,
                               Device device, Masters masters)
    : list_(list),
      compute_(compute),
      master_(master_of(compute)),
      device_(device),
      all_masters_(holds_all(compute, gradients, masters)) {
  SPS_CHECK(device == Device::cpu || compute != DType::f64);
  const auto held = [&](const Parameter& p) { return all_masters_ || needs_master(p); };
  int64_t total = 0;
  for (const Parameter& p : list_) total += p.count();
  const auto lay_out = [&](Arena& arena) {
    all_weights_ = arena.take(master_, 1, held_masters(list_, compute, gradients, masters));
    if (gradients) all_gradients_ = arena.take(master_, 1, total);
    if (compute_ == DType::bf16) all_rounded_ = arena.take(DType::bf16, 1, total);
  };
  Arena planning;
  lay_out(planning);
  memory_ = Arena(planning.peak(), device);
  lay_out(memory_);
  int64_t at = 0, at_held = 0;
  for (const Parameter& p : list_) {
    const auto part = [&](Tensor all, int64_t from) {
      return all.cols_from(from, p.count()).reshaped(p.rows(), p.cols());
    };
    weights_.push_back(held(p) ? part(all_weights_, at_held) : Tensor{});
    gradients_.push_back(gradients ? part(all_gradients_, at) : Tensor{});
    if (compute_ == DType::bf16) rounded_.push_back(part(all_rounded_, at));
    at += p.count(), at_held += held(p) ? p.count() : 0;
  }
}

void ParameterStore::initialise(uint64_t seed) {
  for (size_t i = 0; i < list_.size(); ++i) {
    const Parameter& p = list_[i];
    const Rng rng(seed, p.name);
    const auto fill = [&]<class T>(T* out) {
      parallel_chunks(p.count(), 1 << 14, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k)
          out[k] = p.init_std > 0 ? T(float(p.init_std * rng.normal(uint64_t(k)))) : T(float(p.init_mean));
      });
    };
    const auto fill_there = [&]<class T>(T, Tensor to) {
      if (device_ == Device::cpu) return fill(to.as<T>());
      std::vector<T> values(static_cast<size_t>(p.count()));
      fill(values.data());
      copy_tensor(view(values.data(), p.rows(), p.cols()), to);
    };
    if (master_ == DType::f64)
      fill_there(double{}, weights_[i]);
    else if (weights_[i])
      fill_there(float{}, weights_[i]);
    else
      fill_there(bf16{}, rounded_[i]);
  }
  round();
}

void ParameterStore::round() {
  if (compute_ != DType::bf16) return;
  const Exec ex = exec_on(device_);
  if (all_masters_) return ops::copy_rows(ex, all_weights_, all_rounded_);
  for (size_t i = 0; i < list_.size(); ++i)
    if (weights_[i]) ops::copy_rows(ex, weights_[i], rounded_[i]);
}

void ParameterStore::zero_gradients(const Exec& ex) {
  ops::fill(ex, all_gradients_, 0);
}

uint64_t ParameterStore::hash() const {
  SPS_CHECK(all_masters_);
  const OnHost weights(all_weights_);
  return hash64(weights->data, size_t(weights->count()) * dtype_size(master_));
}

}  // namespace sps
