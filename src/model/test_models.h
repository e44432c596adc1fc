// For the tests: a small model of every family and of every key's less common values, and inputs with
// documents.
#pragma once

#include <string>
#include <vector>

#include "base/rng.h"
#include "model/model.h"

namespace sps {

struct TestModel {
  std::string name;
  ModelKeys keys;
};

// Two layers (three where depths differ), width 16, two heads, vocabulary 29 with end-of-text 27 and row 28.
inline std::vector<TestModel> test_models() {
  std::vector<TestModel> all;
  ModelKeys base;
  base.layers = 2, base.d_model = 16, base.heads = 2, base.d_ffn = {24}, base.vocab = 29, base.context = 12;
  base.eot = 27;
  const auto add = [&](const std::string& name, const std::string& family, const auto& change) {
    ModelKeys k = base;
    k.family = family;
    change(k);
    all.push_back({name, k});
  };
  const auto nothing = [](ModelKeys&) {};
  const auto window = [](int64_t w) { return [w](ModelKeys& k) { k.window = w; }; };
  add("standard", "standard", nothing);
  add("standard_untied", "standard", [](ModelKeys& k) { k.tie_head = "false"; });
  for (const int64_t w : {0, 2}) add("sps_w" + std::to_string(w), "sps", window(w));
  add("sps_full", "sps", window(kWindowFull));
  for (const int64_t w : {0, 2}) add("delayed_state_w" + std::to_string(w), "delayed_state", window(w));
  for (const int64_t w : {0, 2}) add("reverse_sps_w" + std::to_string(w), "reverse_sps", window(w));
  add("free_pause", "free_pause", nothing);
  add("free_pause_w2", "free_pause", window(2));
  add("free_pause_pooled", "free_pause", [](ModelKeys& k) { k.ffn = "pooled"; });
  add("two_tower", "two_tower", nothing);
  add("two_tower_3+2", "two_tower", [](ModelKeys& k) { k.state_layers = 3, k.pred_layers = 2; });
  add("sequential", "sequential", nothing);
  add("sequential_1+3", "sequential", [](ModelKeys& k) { k.state_layers = 1, k.pred_layers = 3; });
  // Other starts of the prediction stream.
  add("sps_token", "sps", [](ModelKeys& k) { k.window = 2, k.pred_input = "token"; });
  add("sps_vector", "sps", [](ModelKeys& k) { k.window = 2, k.pred_input = "vector"; });
  add("sps_table", "sps", [](ModelKeys& k) { k.window = 2, k.pred_input = "table"; });
  add("free_pause_token", "free_pause", [](ModelKeys& k) { k.pred_input = "token"; });
  add("free_pause_pooled_token", "free_pause",
      [](ModelKeys& k) { k.ffn = "pooled", k.pred_input = "token"; });
  add("free_pause_state_start", "free_pause", [](ModelKeys& k) { k.pred_input = "state"; });
  add("sequential_vector_tied", "sequential",
      [](ModelKeys& k) { k.pred_input = "vector", k.tie_head = "true"; });
  add("sequential_state_start", "sequential",
      [](ModelKeys& k) { k.pred_input = "state", k.tie_head = "true"; });
  add("two_tower_row", "two_tower", [](ModelKeys& k) { k.pred_input = "row"; });
  // Other reads.
  add("shared_sequential", "free_pause", [](ModelKeys& k) { k.read_level = "final"; });
  add("shared_attention", "two_tower", [](ModelKeys& k) { k.share = "attention"; });
  add("shared_attention_final", "sequential", [](ModelKeys& k) { k.share = "attention"; });
  add("shared_norms_ffn", "two_tower", [](ModelKeys& k) { k.share = "norms,ffn"; });
  add("same_level_own", "two_tower", [](ModelKeys& k) { k.read_level = "same"; });
  add("post_state_kv", "free_pause", [](ModelKeys& k) { k.read_level = "post"; });
  add("levels_own", "two_tower", [](ModelKeys& k) { k.layers = 3, k.read_level = "1,3,1"; });
  add("levels_below", "two_tower", [](ModelKeys& k) { k.layers = 3, k.read_level = "0,1,1"; });
  add("levels_zero", "two_tower", [](ModelKeys& k) { k.read_level = "0,0"; });
  add("levels_state_kv", "free_pause", [](ModelKeys& k) { k.layers = 3, k.read_level = "1,0,1"; });
  add("pooled_own", "free_pause",
      [](ModelKeys& k) { k.ffn = "pooled", k.read_kv = "own", k.share = "attention"; });
  add("dual_sps", "sps", [](ModelKeys& k) { k.window = 2, k.share = "none"; });
  add("dual_sps_norms", "sps", [](ModelKeys& k) { k.window = 2, k.share = "norms"; });
  add("own_with_prediction_keys", "two_tower", [](ModelKeys& k) { k.band_pp = "0:2"; });
  add("odd_bands", "sps",
      [](ModelKeys& k) { k.band_xx = "0:3", k.band_xp = "2:5", k.band_px = "1:4", k.band_pp = "0:1"; });
  // Backbones.
  const auto backbone = [](ModelKeys& k) {
    k.heads = 4, k.kv_heads = 2, k.head_dim = 4, k.qk_norm = true, k.rope_pairs = "half_split";
    k.sliding_window = 3, k.full_attention_every = 2, k.rope_fraction = 0.5;
  };
  add("backbone_standard", "standard", backbone);
  add("backbone_sps", "sps", [&](ModelKeys& k) { backbone(k), k.window = 2; });
  add("backbone_free_pause", "free_pause", backbone);
  add("backbone_pooled", "free_pause", [&](ModelKeys& k) { backbone(k), k.ffn = "pooled"; });
  add("backbone_sequential", "sequential", backbone);
  add("qk_norm_shared_sequential", "free_pause",
      [](ModelKeys& k) { k.read_level = "final", k.qk_norm = true; });
  // Two rotated pairs of four: the smallest head whose angles tell the rotated width from the head's.
  add("partial_rotary", "two_tower", [](ModelKeys& k) { k.rope_fraction = 0.5; });
  add("gqa_one_head", "sps", [](ModelKeys& k) { k.kv_heads = 1, k.window = 2; });
  add("unequal_widths", "sequential", [](ModelKeys& k) { k.pred_width = 24, k.pred_ffn = {40}; });
  add("attention_only_blocks", "two_tower", [](ModelKeys& k) { k.d_ffn = {0, 24}, k.pred_ffn = {24, 0}; });
  add("attention_only_sps", "sps", [](ModelKeys& k) { k.window = 1, k.d_ffn = {0, 24}; });
  return all;
}

// A batch of random ids with an end-of-text here and there; the last sequence begins with a document of one
// token.
struct TestInput {
  std::vector<int32_t> tokens, targets, document_start, positions;
  int64_t batch, length;

  TestInput(const ModelConfig& c, int64_t batch_size, int64_t row_length, uint64_t seed,
            bool documents = true)
      : batch(batch_size), length(row_length) {
    const Rng rng(seed, "test input");
    for (int64_t i = 0; i < batch * length; ++i) {
      const auto n = uint64_t(i);
      const bool end = documents && (rng.below(3 * n, 5) == 0 || i == (batch - 1) * length);
      tokens.push_back(end ? int32_t(c.eot) : int32_t(rng.below(3 * n + 1, uint64_t(c.eot))));
      targets.push_back(int32_t(rng.below(3 * n + 2, uint64_t(c.eot) + 1)));
    }
    set_documents(c);
  }
  // Documents and loss mask from the tokens.
  void set_documents(const ModelConfig& c) {
    document_start.clear(), positions.clear();
    for (int64_t r = 0; r < batch; ++r) {
      int32_t start = 0;
      for (int64_t i = 0; i < length; ++i) {
        const auto at = size_t(r * length + i);
        const bool end = tokens[at] == c.eot;
        if (end && c.eot_begins()) start = int32_t(i);
        document_start.push_back(start);
        positions.push_back(int32_t(i));
        if (end && !c.eot_begins()) start = int32_t(i) + 1, targets[at] = -1;
      }
    }
  }
  ModelInput input() const { return {batch, length, tokens, targets, document_start, positions}; }
  int64_t scored() const {
    int64_t n = 0;
    for (const int32_t t : targets) n += t >= 0;
    return n;
  }
};

// Weights far enough from zero that every path carries a gradient: gates open, norms not 1, larger matrices.
// They are bf16 numbers, so that a bf16 model and the reference have the same ones.
inline void lively_weights(Model& model, uint64_t seed, double spread = 0.25) {
  ParameterStore& store = model.store();
  store.initialise(seed);
  for (size_t i = 0; i < store.list().size(); ++i) {
    const Parameter& p = store.list()[i];
    const OnHost host(store.weight(int(i)));
    const Tensor w = host;
    const Rng rng(seed + 1, p.name);
    for (int64_t k = 0; k < p.count(); ++k) {
      const double noise = rng.normal(uint64_t(k));
      const float value = float(bf16(p.shape.size() == 1 ? 1 + 0.3 * noise : spread * noise));
      if (w.dtype == DType::f64)
        w.as<double>()[k] = value;
      else
        w.as<float>()[k] = value;
    }
    if (store.device() == Device::cuda) copy_tensor(w, store.weight(int(i)));
  }
  store.round();
}

}  // namespace sps
