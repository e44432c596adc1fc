// For the tests of whole passes: what a pass left behind, row by row and bit by bit, and distances between
// gradients.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/threads.h"
#include "model/test_models.h"

namespace sps {

// Tiny passes gain nothing from threads, and waiting for one on a busy machine costs far more than the pass.
class OneThread {
 public:
  OneThread() : before_(thread_count()) { set_thread_count(1); }
  ~OneThread() { set_thread_count(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

class ModelTest : public testing::TestWithParam<TestModel> {
 protected:
  OneThread one_thread_;
};

inline std::string test_name(const testing::TestParamInfo<TestModel>& info) {
  std::string name = info.param.name;
  std::replace(name.begin(), name.end(), '+', '_');
  return name;
}

constexpr int32_t kRare = 26;  // an id that plain_input leaves for tests to place by hand

// Sequences without kRare; ends of text only where given (in every sequence).
inline TestInput plain_input(const ModelConfig& c, int64_t batch, int64_t length,
                             const std::vector<size_t>& ends = {}) {
  TestInput input(c, batch, length, 5, false);
  for (int32_t& t : input.tokens) t %= kRare;
  for (int64_t b = 0; b < batch; ++b)
    for (const size_t at : ends) input.tokens[size_t(b * length) + at] = int32_t(c.eot);
  input.set_documents(c);
  return input;
}

// The tests' smallest model of a family.
inline ModelKeys small_keys(const std::string& family, int64_t window = kWindowAuto) {
  ModelKeys keys = test_models()[0].keys;
  keys.family = family, keys.window = window;
  return keys;
}

constexpr DType kFastTypes[] = {DType::f32, DType::bf16};

inline std::string row_bits(Tensor t, int64_t r) {
  const size_t size = dtype_size(t.dtype);
  return {static_cast<const char*>(t.data) + size_t(r * t.stride) * size, size_t(t.cols) * size};
}
inline std::string bits(Tensor t) {
  std::string all;
  for (int64_t r = 0; r < t.rows; ++r) all += row_bits(t, r);
  return all;
}
inline double value(Tensor t, int64_t r, int64_t c) {
  if (t.dtype == DType::f64) return t.row<double>(r)[c];
  return t.dtype == DType::f32 ? double(t.row<float>(r)[c]) : double(float(t.row<bf16>(r)[c]));
}
inline void set_row(Tensor t, int64_t r, double v) {
  for (int64_t c = 0; c < t.cols; ++c)
    if (t.dtype == DType::f64)
      t.row<double>(r)[c] = v;
    else
      t.row<float>(r)[c] = float(v);
}
inline double l2_norm(Tensor t) {
  double s = 0;
  for (int64_t r = 0; r < t.rows; ++r)
    for (int64_t c = 0; c < t.cols; ++c) s += value(t, r, c) * value(t, r, c);
  return std::sqrt(s);
}
inline double l2_distance(Tensor a, Tensor b) {
  double s = 0;
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t c = 0; c < a.cols; ++c) s += std::pow(value(a, r, c) - value(b, r, c), 2);
  return std::sqrt(s);
}

inline int parameter_index(const Model& model, const std::string& name) {
  const auto& list = model.store().list();
  for (size_t i = 0; i < list.size(); ++i)
    if (list[i].name == name) return int(i);
  return kNoParameter;
}
inline Tensor gradient(const Model& model, const std::string& name) {
  return model.store().gradient(parameter_index(model, name));
}
inline Tensor weight(Model& model, const std::string& name) {
  return model.store().weight(parameter_index(model, name));
}

// A model with lively weights.
struct LivelyModel : Model {
  explicit LivelyModel(const ModelKeys& keys, ModelOptions options = {})
      : Model(resolve(keys), with_rows(options)) {
    lively_weights(*this, 3);
  }
  static ModelOptions with_rows(ModelOptions options) {
    if (options.max_rows == 0) options.max_rows = 48;
    return options;
  }
};

// One backward pass from zero gradients, for the mean over the scored positions.
inline Loss train_once(Model& model, const TestInput& input) {
  model.store().zero_gradients(exec_on(model.store().device()));
  return model.train(input.input(), 1.0 / double(std::max<int64_t>(1, input.scored())));
}

// Every gradient within `tolerance` of the other model's, relative to its length; one that is much smaller
// than the whole carries the rounding of the large ones around it.
inline void expect_same_gradients(const Model& got, const Model& want, double tolerance) {
  const double whole = l2_norm(want.store().all_gradients());
  for (const Parameter& p : want.store().list()) {
    const Tensor w = gradient(want, p.name), g = gradient(got, p.name);
    EXPECT_LE(l2_distance(g, w), tolerance * (l2_norm(w) + 0.02 * whole)) << p.name;
  }
}

// What evaluate() left behind: each tensor's rows as bits. Tensors of one row (a constant start) and those in
// memory that stages share are left out.
class Snapshot {
 public:
  Snapshot(Model& model, const TestInput& input) : model_(model), rows_(input.batch * input.length) {
    std::vector<double> nll(input.tokens.size());
    model.evaluate(input.input(), nll);
    add("nll", view(nll.data(), rows_, 1));
    const Activations& a = model.activations();
    stream("state", a.state, &Stage::state);
    stream("pred", a.pred, &Stage::pred);
    add("state.top", a.top);
    for (size_t r = 0; r < a.readers.size(); ++r) reader("reader." + std::to_string(r), a.readers[r]);
    reader("read_head", a.read_head);
    for (size_t j = 0; j < a.pool.size(); ++j) {
      const std::string at = "pool." + std::to_string(j);
      add(at + ".m", a.pool[j].m), add(at + ".gate", a.pool[j].gate), add(at + ".f", a.pool[j].f);
    }
    // The readout's rows are packed: those that carry a loss, or all without dead-work elimination.
    std::vector<std::string> last(static_cast<size_t>(rows_));
    int64_t packed = 0;
    for (int64_t r = 0; r < rows_; ++r) {
      if (model.plan().eliminate_dead && input.targets[size_t(r)] < 0) continue;
      last[size_t(r)] = row_bits(a.final_s, packed) + row_bits(a.final_n, packed);
      ++packed;
    }
    tensors_.emplace_back("final", std::move(last));
  }

  using Rows = std::function<bool(int64_t)>;
  // The first tensor and row that differs among these rows; empty if none does. `skip` begins names to leave
  // out.
  std::string difference(const Snapshot& other, const Rows& rows, const std::string& skip = " ") const {
    return compare(
        other, [&](const std::string& name) { return name.rfind(skip, 0) != 0; }, rows);
  }
  // The same for tensors whose names begin with `prefix`.
  std::string difference_in(const Snapshot& other, const std::string& prefix) const {
    return compare(
        other, [&](const std::string& name) { return name.rfind(prefix, 0) == 0; },
        [](int64_t) { return true; });
  }
  const std::vector<std::string>& rows_of(const std::string& name) const {
    for (const auto& [n, rows] : tensors_)
      if (n == name) return rows;
    fail("no tensor {} in the snapshot", name);
  }

 private:
  void add(const std::string& name, Tensor t) {
    if (t.empty() || t.rows != rows_) return;
    std::vector<std::string> rows;
    for (int64_t r = 0; r < t.rows; ++r) rows.push_back(row_bits(t, r));
    tensors_.emplace_back(name, std::move(rows));
  }
  void stream(const std::string& stream, const std::vector<StreamActivations>& blocks,
              int64_t Stage::*block) {
    const ModelOptions& o = model_.options();
    for (size_t b = 0; b < blocks.size(); ++b) {
      const StreamActivations& s = blocks[b];
      add(stream + "." + std::to_string(b) + ".s1", s.s1);
      const auto& stages = model_.plan().stages;
      const auto stage = std::find_if(stages.begin(), stages.end(),
                                      [&](const Stage& at) { return at.*block == int64_t(b); });
      if (shared_part(model_.plan(), *stage, o.recompute, o.freeze, o.train) != Recompute::none) continue;
      const std::pair<const char*, Tensor> parts[] = {{"n1", s.n1},    {"q", s.q},   {"k", s.k},
                                                      {"v", s.v},      {"o", s.o},   {"lse", s.lse},
                                                      {"s2", s.s2},    {"n2", s.n2}, {"gate_up", s.gate_up},
                                                      {"gate", s.gate}};
      for (const auto& [part, tensor] : parts) add(stream + "." + std::to_string(b) + "." + part, tensor);
    }
  }
  void reader(const std::string& name, const ReaderActivations& r) {
    add(name + ".n", r.n), add(name + ".kv", r.kv);
  }

  std::string compare(const Snapshot& other, const std::function<bool(const std::string&)>& wanted,
                      const Rows& rows) const {
    size_t compared = 0;
    for (const auto& [name, mine] : tensors_) {
      if (!wanted(name)) continue;
      const auto* theirs = &mine;
      for (const auto& [n, t] : other.tensors_)
        if (n == name) theirs = &t;
      if (theirs == &mine) continue;
      ++compared;
      for (size_t r = 0; r < std::min(mine.size(), theirs->size()); ++r)
        if (rows(int64_t(r)) && mine[r] != (*theirs)[r]) return name + " row " + std::to_string(r);
    }
    return compared > 0 ? "" : "nothing to compare";
  }

  Model& model_;
  int64_t rows_;
  std::vector<std::pair<std::string, std::vector<std::string>>> tensors_;
};

}  // namespace sps
