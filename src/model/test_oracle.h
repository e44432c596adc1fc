// For the tests: a second forward pass, in plain double loops, written from the formulas of the papers alone.
// It reads ModelKeys and named weights and shares nothing with the program's own way: no ModelConfig, plan or
// bands. The first paper's families run as its interleaved sequence of 2T slots x_0 p_0 x_1 p_1 ... under a
// dense mask; the others as a state tower and a cross-attending prediction tower.
#pragma once

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "model/test_models.h"

namespace sps {

using OracleRow = std::vector<double>;
using OracleRows = std::vector<OracleRow>;

struct OracleResult {
  std::vector<double> nll;  // per row of the input, 0 where no loss is counted
  std::vector<OracleRows> state,
      pred;  // residual entering block l, the last one leaving the tower: [l][row][d]
};

class Oracle {
 public:
  Oracle(const ModelKeys& keys, const ParameterStore& store) : keys_(keys) {
    for (size_t i = 0; i < store.list().size(); ++i) {
      const Parameter& p = store.list()[i];
      const Tensor w = store.weight(int(i));
      OracleRows rows(size_t(p.rows()), OracleRow(size_t(p.cols())));
      for (int64_t r = 0; r < p.rows(); ++r)
        for (int64_t c = 0; c < p.cols(); ++c)
          rows[size_t(r)][size_t(c)] =
              w.dtype == DType::f64 ? w.row<double>(r)[c] : double(w.row<float>(r)[c]);
      weights_[p.name] = std::move(rows);
    }
    const std::string& f = keys.family;
    interleaved_ = f == "sps" || f == "delayed_state" || f == "reverse_sps";
    const bool tower = f == "two_tower" || f == "sequential";
    pooled_ = keys.ffn == "pooled";
    state_layers_ = keys.state_layers >= 0 ? keys.state_layers : keys.layers;
    pred_layers_ = f == "standard" ? 0 : keys.pred_layers >= 0 ? keys.pred_layers : state_layers_;
    head_dim_ = keys.head_dim >= 0 ? keys.head_dim : keys.d_model / keys.heads;
    group_ = keys.kv_heads >= 0 ? keys.heads / keys.kv_heads : 1;
    const auto chosen = [](const std::string& said, const std::string& otherwise) {
      return said.empty() ? otherwise : said;
    };
    own_kv_ = chosen(keys.read_kv, tower ? "own" : "state") == "own";
    input_ = chosen(keys.pred_input, tower ? "table" : f == "free_pause" ? "vector" : "row");
    share_ = chosen(keys.share, tower ? "none" : pooled_ ? "attention,norms" : "all");
    tied_ = chosen(keys.tie_head, tower ? "false" : "true") == "true";
    reads_state_ = f == "standard" || f == "reverse_sps";
    window_ = keys.window == kWindowFull ? 1 << 30 : keys.window;
    if (keys.window == kWindowAuto) window_ = interleaved_ ? 64 : 0;
    const std::string level = chosen(keys.read_level, f == "sequential"               ? "final"
                                                      : f != "two_tower"              ? "same"
                                                      : state_layers_ == pred_layers_ ? "post"
                                                                                      : "top");
    for (int64_t i = 0; i < pred_layers_; ++i) {
      if (level == "same") levels_.push_back(i);
      if (level == "post") levels_.push_back(i + 1);
      if (level == "top") levels_.push_back(state_layers_ - pred_layers_ + 1 + i);
      if (level == "final") levels_.push_back(state_layers_);
      if (std::isdigit(static_cast<unsigned char>(level[0])) != 0)
        levels_.push_back(level[size_t(2 * i)] - '0');
    }
  }

  OracleResult run(const ModelInput& in) const {
    OracleResult all;
    all.state.resize(size_t(state_layers_) + 1),
        all.pred.resize(pred_layers_ > 0 ? size_t(pred_layers_) + 1 : 0);
    for (int64_t b = 0; b < in.batch; ++b) {
      const auto from = size_t(b * in.length), n = size_t(in.length);
      Sequence s;
      s.tokens.assign(in.tokens.begin() + long(from), in.tokens.begin() + long(from + n));
      s.positions.assign(in.positions.begin() + long(from), in.positions.begin() + long(from + n));
      for (size_t i = 0, document = 0; i < n; ++i) {
        s.document.push_back(document);
        document += s.tokens[i] == keys_.eot ? 1 : 0;  // end-of-text belongs to the document that it closes
      }
      if (interleaved_)
        run_slots(s);
      else
        run_towers(s);
      const auto collect = [](std::vector<OracleRows>& to, const std::vector<OracleRows>& levels) {
        for (size_t l = 0; l < levels.size(); ++l)
          to[l].insert(to[l].end(), levels[l].begin(), levels[l].end());
      };
      collect(all.state, s.x), collect(all.pred, s.p);
      const OracleRows& last = reads_state_ ? s.x.back() : s.p.back();
      for (size_t i = 0; i < n; ++i) {
        const int32_t target = in.targets[from + i];
        all.nll.push_back(target < 0 ? 0 : cross_entropy(last[i], target));
      }
    }
    return all;
  }

 private:
  struct Sequence {
    std::vector<int32_t> tokens, positions;
    std::vector<size_t> document;
    std::vector<OracleRows> x, p;  // residuals per level
  };
  struct Key {
    OracleRow k, v;
  };

  const OracleRows& at(const std::string& name) const { return weights_.at(name); }
  bool shares(const std::string& what) const {
    return share_ == "all" || share_.find(what) != std::string::npos || (what == "ffn" && pooled_);
  }
  // Where the weights of a block live: the prediction tower's own, or the state's if this kind is shared.
  std::string block(bool pred, int64_t layer, const std::string& kind) const {
    return (pred && !shares(kind) ? "pred." : "state.") + std::to_string(layer) + ".";
  }

  static OracleRow times(const OracleRows& w, const OracleRow& x, size_t from, size_t rows) {
    OracleRow y(rows, 0.0);
    for (size_t r = 0; r < rows; ++r)
      for (size_t c = 0; c < x.size(); ++c) y[r] += w[from + r][c] * x[c];
    return y;
  }
  static OracleRow times(const OracleRows& w, const OracleRow& x) { return times(w, x, 0, w.size()); }
  static void add(OracleRow& to, const OracleRow& x, double factor = 1) {
    for (size_t c = 0; c < x.size(); ++c) to[c] += factor * x[c];
  }
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

  OracleRow rms_norm(const OracleRow& x, const OracleRow& gain) const {
    double square = 0;
    for (const double v : x) square += v * v;
    const double r = 1 / std::sqrt(square / double(x.size()) + keys_.norm_eps);
    OracleRow y;
    for (size_t c = 0; c < x.size(); ++c) y.push_back(x[c] * r * gain[c]);
    return y;
  }

  bool full_layer(int64_t layer) const {
    return keys_.sliding_window == 0 ||
           (keys_.full_attention_every > 0 &&
            layer % keys_.full_attention_every == keys_.full_attention_every - 1);
  }

  // Heads side by side: QK-norm where the model has it, then the rotation of the layer.
  OracleRow turned(OracleRow x, const std::string& gain, int64_t layer, int32_t position) const {
    const auto hd = size_t(head_dim_);
    const size_t width =
        full_layer(layer) ? size_t(2 * std::llround(double(hd) * keys_.rope_fraction / 2)) : hd;
    for (size_t h = 0; h < x.size(); h += hd) {
      if (keys_.qk_norm) {
        const OracleRow n = rms_norm(OracleRow(x.begin() + long(h), x.begin() + long(h + hd)), at(gain)[0]);
        std::copy(n.begin(), n.end(), x.begin() + long(h));
      }
      for (size_t m = 0; m < width / 2; ++m) {
        const bool adjacent = keys_.rope_pairs == "adjacent";
        double& a = x[h + (adjacent ? 2 * m : m)];
        double& b = x[h + (adjacent ? 2 * m + 1 : m + width / 2)];
        const double angle = position * std::pow(keys_.rope_theta, -2.0 * double(m) / double(width));
        const double ra = a * std::cos(angle) - b * std::sin(angle),
                     rb = a * std::sin(angle) + b * std::cos(angle);
        a = ra, b = rb;
      }
    }
    return x;
  }

  // One query over the keys it may read.
  OracleRow attend(const OracleRow& q, const std::vector<const Key*>& visible) const {
    // The operation takes its scale as a float.
    const auto hd = size_t(head_dim_);
    const double scale = double(float(1 / std::sqrt(double(head_dim_))));
    OracleRow o(q.size(), 0.0);
    for (size_t h = 0; h < q.size() / hd; ++h) {
      const size_t kh = h / size_t(group_) * hd;
      std::vector<double> weight;
      double largest = -INFINITY, sum = 0;
      for (const Key* key : visible) {
        double s = 0;
        for (size_t c = 0; c < hd; ++c) s += q[h * hd + c] * key->k[kh + c];
        weight.push_back(s * scale), largest = std::max(largest, s * scale);
      }
      for (double& w : weight) w = std::exp(w - largest), sum += w;
      for (size_t n = 0; n < visible.size(); ++n)
        for (size_t c = 0; c < hd; ++c) o[h * hd + c] += weight[n] / sum * visible[n]->v[kh + c];
    }
    return o;
  }

  OracleRow feed_forward(const std::string& where, const OracleRow& n) const {
    const OracleRow both = times(at(where + "gate_up"), n);
    const size_t width = both.size() / 2;
    OracleRow h;
    for (size_t c = 0; c < width; ++c) h.push_back(both[c] * sigmoid(both[c]) * both[width + c]);
    return times(at(where + "down"), h);
  }
  void add_feed_forward(OracleRow& row, bool pred, int64_t layer) const {
    const std::string where = block(pred, layer, "ffn");
    if (weights_.count(where + "gate_up") == 0) return;
    add(row, feed_forward(where, rms_norm(row, at(block(pred, layer, "norms") + "norm2")[0])));
  }

  double cross_entropy(const OracleRow& row, int32_t target) const {
    const OracleRow logits = times(at(tied_ ? "embed" : "head"), rms_norm(row, at("final_norm")[0]));
    double largest = -INFINITY, sum = 0;
    for (const double v : logits) largest = std::max(largest, v);
    for (const double v : logits) sum += std::exp(v - largest);
    return largest + std::log(sum) - logits[size_t(target)];
  }

  OracleRow prediction_start(int32_t token) const {
    if (input_ == "row") return at("embed")[size_t(keys_.pred_row >= 0 ? keys_.pred_row : keys_.eot + 1)];
    if (input_ == "table") return at("pred_embed")[size_t(token)];
    OracleRow row = at("pred_input")[0];
    if (input_ == "token") add(row, at("embed")[size_t(token)]);
    return row;
  }

  // Projections of a normed row: query, and key with value.
  OracleRow query(bool pred, int64_t layer, const OracleRow& n, int32_t position) const {
    const std::string where = block(pred, layer, "attention");
    const OracleRows& w = at(where + (weights_.count(where + "q") != 0 ? "q" : "qkv"));
    return turned(times(w, n, 0, at(where + "out")[0].size()), where + "q_norm", layer, position);
  }
  // Keys are the first half of `w` from row `from` on, values the second.
  Key key(const OracleRows& w, size_t from, const std::string& gain, int64_t layer, const OracleRow& n,
          int32_t position) const {
    const size_t half = (w.size() - from) / 2;
    return {turned(times(w, n, from, half), gain, layer, position), times(w, n, from + half, half)};
  }
  Key own_key(bool pred, int64_t layer, const OracleRow& n, int32_t position) const {
    const std::string where = block(pred, layer, "attention");
    return key(at(where + "qkv"), at(where + "out")[0].size(), where + "k_norm", layer, n, position);
  }

  // A band that the keys spell out, "lo:hi" in steps back; the rule of the family otherwise.
  static bool in_band(const std::string& text, int64_t steps, bool otherwise) {
    if (text.empty()) return otherwise;
    if (text == "none") return false;
    const size_t colon = text.find(':');
    const std::string hi = text.substr(colon + 1);
    return steps >= std::stol(text.substr(0, colon)) && (hi == "inf" || steps <= std::stol(hi));
  }

  // Slots in order: even ones are tokens, odd ones predictions. A key is visible if its slot is not later
  // and, where its stream is the temporary one, its token at most w steps back.
  bool slot_visible(const Sequence& s, size_t slot, size_t key_slot, int64_t layer) const {
    if (key_slot > slot || s.document[slot / 2] != s.document[key_slot / 2]) return false;
    const int64_t steps = int64_t(slot / 2) - int64_t(key_slot / 2);
    const bool key_is_x = key_slot % 2 == 0, query_is_x = slot % 2 == 0;
    const bool temporary = key_is_x != (keys_.family == "sps");
    const std::string& band = query_is_x ? key_is_x ? keys_.band_xx : keys_.band_xp
                              : key_is_x ? keys_.band_px
                                         : keys_.band_pp;
    if (!in_band(band, steps, !temporary || steps <= window_)) return false;
    return !key_is_x || full_layer(layer) || steps < keys_.sliding_window;
  }

  void run_slots(Sequence& s) const {
    OracleRows rows;
    const auto keep = [&] {
      s.x.emplace_back(), s.p.emplace_back();
      for (size_t slot = 0; slot < rows.size(); ++slot)
        (slot % 2 == 0 ? s.x : s.p).back().push_back(rows[slot]);
    };
    for (const int32_t token : s.tokens) {
      rows.push_back(at("embed")[size_t(token)]);
      rows.push_back(prediction_start(token));
    }
    for (int64_t layer = 0; layer < state_layers_; ++layer) {
      keep();
      OracleRows q;
      std::vector<Key> keys;
      for (size_t slot = 0; slot < rows.size(); ++slot) {
        const bool pred = slot % 2 == 1;
        const OracleRow n = rms_norm(rows[slot], at(block(pred, layer, "norms") + "norm1")[0]);
        q.push_back(query(pred, layer, n, s.positions[slot / 2]));
        keys.push_back(own_key(pred, layer, n, s.positions[slot / 2]));
      }
      for (size_t slot = 0; slot < rows.size(); ++slot) {
        const bool pred = slot % 2 == 1;
        std::vector<const Key*> visible;
        for (size_t t = 0; t < rows.size(); ++t)
          if (slot_visible(s, slot, t, layer)) visible.push_back(&keys[t]);
        add(rows[slot], times(at(block(pred, layer, "attention") + "out"), attend(q[slot], visible)));
        add_feed_forward(rows[slot], pred, layer);
      }
    }
    keep();
  }

  // A tower of queries that attend to `keys` (and, with `own`, to those) and take the result into their rows.
  void attention(const Sequence& s, bool pred, int64_t layer, OracleRows& rows, const std::vector<Key>& keys,
                 const std::vector<Key>& own) const {
    const std::string gain = block(pred, layer, "norms") + "norm1";
    for (size_t i = 0; i < rows.size(); ++i) {
      std::vector<const Key*> visible;
      for (size_t j = 0; j <= i; ++j) {
        if (s.document[i] != s.document[j]) continue;
        const auto steps = int64_t(i - j);
        if (full_layer(layer) || steps < keys_.sliding_window) visible.push_back(&keys[j]);
        if (!own.empty() && in_band(keys_.band_pp, steps, steps <= window_)) visible.push_back(&own[j]);
      }
      const OracleRow q = query(pred, layer, rms_norm(rows[i], at(gain)[0]), s.positions[i]);
      add(rows[i], times(at(block(pred, layer, "attention") + "out"), attend(q, visible)));
    }
  }

  std::vector<Key> tower_keys(const Sequence& s, bool pred, int64_t layer, const OracleRows& rows) const {
    std::vector<Key> keys;
    for (size_t i = 0; i < rows.size(); ++i)
      keys.push_back(own_key(pred, layer, rms_norm(rows[i], at(block(pred, layer, "norms") + "norm1")[0]),
                             s.positions[i]));
    return keys;
  }

  // The state level that prediction block `layer` reads, as keys and values.
  std::vector<Key> read(const Sequence& s, int64_t layer,
                        const std::vector<std::vector<Key>>& state_keys) const {
    const int64_t level = levels_[size_t(layer)];
    if (!own_kv_ && level < state_layers_) return state_keys[size_t(level)];
    std::string norm = "read_head.norm", kv = "read_head.kv", gain = "read_head.k_norm";
    size_t from = 0;
    if (own_kv_) {
      const std::string at_block = "pred." + std::to_string(layer) + ".";
      norm = at_block + "read_norm", kv = at_block + "read_kv", gain = at_block + "read_k_norm";
      if (shares("attention")) {
        const std::string where = block(true, layer, "attention");
        kv = where + "qkv", gain = where + "k_norm", from = at(where + "out")[0].size();
      }
    }
    std::vector<Key> keys;
    for (size_t i = 0; i < s.tokens.size(); ++i)
      keys.push_back(
          key(at(kv), from, gain, layer, rms_norm(s.x[size_t(level)][i], at(norm)[0]), s.positions[i]));
    return keys;
  }

  void pooled_feed_forward(int64_t layer, OracleRow& x, OracleRow& p) const {
    const std::string pool = "pool." + std::to_string(layer) + ".";
    const OracleRow a = rms_norm(x, at(block(false, layer, "norms") + "norm2")[0]);
    const OracleRow b = rms_norm(p, at(block(true, layer, "norms") + "norm2")[0]);
    OracleRow both = a;
    both.insert(both.end(), b.begin(), b.end());
    const double g = sigmoid(times(at(pool + "in"), both)[0]);
    OracleRow mixed(a.size(), 0.0);
    add(mixed, a, g), add(mixed, b, 1 - g);
    const OracleRow f = feed_forward(block(false, layer, "ffn"), mixed);
    add(x, f, sigmoid(times(at(pool + "state"), a)[0]));
    add(p, f, sigmoid(times(at(pool + "pred"), b)[0]));
  }

  void run_towers(Sequence& s) const {
    OracleRows x, p;
    std::vector<std::vector<Key>> state_keys;
    const bool window = keys_.family == "free_pause" ? window_ > 0 : !keys_.band_pp.empty();
    const auto state_attention = [&](int64_t layer) {
      s.x.push_back(x);
      state_keys.push_back(tower_keys(s, false, layer, x));
      attention(s, false, layer, x, state_keys.back(), {});
    };
    const auto pred_attention = [&](int64_t layer) {
      s.p.push_back(p);
      attention(s, true, layer, p, read(s, layer, state_keys),
                window ? tower_keys(s, true, layer, p) : std::vector<Key>{});
    };
    const auto start = [&] {
      for (const int32_t token : s.tokens) p.push_back(prediction_start(token));
    };
    for (const int32_t token : s.tokens) x.push_back(at("embed")[size_t(token)]);
    if (pooled_) {
      start();
      for (int64_t layer = 0; layer < state_layers_; ++layer) {
        state_attention(layer);
        pred_attention(layer);
        for (size_t i = 0; i < x.size(); ++i) pooled_feed_forward(layer, x[i], p[i]);
      }
      s.x.push_back(x), s.p.push_back(p);
      return;
    }
    for (int64_t layer = 0; layer < state_layers_; ++layer) {
      state_attention(layer);
      for (OracleRow& row : x) add_feed_forward(row, false, layer);
    }
    s.x.push_back(x);
    if (pred_layers_ == 0) return;
    if (input_ == "state")
      p = x;
    else
      start();
    for (int64_t layer = 0; layer < pred_layers_; ++layer) {
      pred_attention(layer);
      for (OracleRow& row : p) add_feed_forward(row, true, layer);
    }
    s.p.push_back(p);
  }

  ModelKeys keys_;
  std::map<std::string, OracleRows> weights_;
  bool interleaved_, pooled_, own_kv_, tied_, reads_state_;
  int64_t state_layers_, pred_layers_, head_dim_, group_, window_;
  std::string input_, share_;
  std::vector<int64_t> levels_;
};

}  // namespace sps
