// Freeze-and-retrain: a fresh prediction tower on the frozen state tower of another run.
#include "train/freeze.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "base/test_dir.h"
#include "base/test_files.h"
#include "data/test_corpus.h"
#include "model/load.h"
#include "score/model_input.h"
#include "train/test_run.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

std::string bytes_of(Tensor t) {
  std::string all;
  const size_t size = dtype_size(t.dtype);
  for (int64_t r = 0; r < t.rows; ++r)
    all.append(static_cast<const char*>(t.data) + size_t(r * t.stride) * size, size_t(t.cols) * size);
  return all;
}

// Name -> bytes of every weight.
std::map<std::string, std::string> weights_of(const Model& model) {
  std::map<std::string, std::string> all;
  for (const NamedTensor& w : named_weights(model.parameters(), model.store()))
    all[w.name] = bytes_of(w.tensor);
  return all;
}

bool belongs_to_state(const std::string& name) {
  return name == "embed" || name.starts_with("state.");
}

class FreezeTest : public testing::Test {
 protected:
  RunConfig tower(const std::string& name, const std::string& level, const std::string& kv,
                  const std::string& dtype = "f32") const {
    RunConfig c = tiny_run(data_, dir_.path() / name);
    c.model.family = "sequential", c.model.window = kWindowAuto, c.model.layers = 3;
    c.model.read_level = level, c.model.read_kv = kv;
    c.run.dtype = dtype;
    return c;
  }
  // A run of another seed on the state tower of `source`.
  RunConfig retrain(const RunConfig& source, const std::string& name, const std::string& level,
                    const std::string& kv) const {
    RunConfig c = source;
    c.run.dir = (dir_ / name).string();
    c.model.read_level = level, c.model.read_kv = kv;
    c.train.seed = 7;
    c.freeze.from = source.run_dir().string();
    return c;
  }
  Batch validation_batch(const ModelConfig& model) const {
    const TokenFile file = TokenFile::open(data_, "val");
    const std::vector<int64_t> starts{0, model.context};
    Batch batch;
    batch.fill(file, starts, model.context, special_ids(model));
    return batch;
  }
  std::string refusal(const RunConfig& run) const {
    const std::string error = error_of([&] { Trainer t(run); });
    EXPECT_FALSE(fs::exists(run.run_dir())) << error;
    return error;
  }

  TestDir dir_;
  fs::path data_ = make_test_data(dir_);
};

struct Read {
  const char *level, *kv;
};
constexpr Read kReads[] = {{"post", "own"},   {"final", "own"},   {"3,1,2", "own"},   {"same", "own"},
                           {"post", "state"}, {"final", "state"}, {"3,1,2", "state"}, {"same", "state"}};

struct TowerCase {
  const char* dtype;
  Read read;
  std::string name;
};
std::vector<TowerCase> cases() {
  std::vector<TowerCase> all;
  for (const char* dtype : {"f32", "bf16"})
    for (const Read& read : kReads)
      all.push_back({dtype, read, fmt::format("{} {} {}", dtype, read.level, read.kv)});
  return all;
}

// The state rows of every level are the source's bits; so are the logits with the source's prediction tower.
TEST_F(FreezeTest, ComputesTheSourcesStatesAndWithItsTowerItsLogits) {
  for (const auto& [dtype, read, name] : cases()) {
    SCOPED_TRACE(name);
    const RunConfig source = tower(name, read.level, read.kv, dtype);
    Trainer(source).run();
    LoadedModel from = load_model(source.run_dir(), compute_dtype(dtype), 32);
    const Batch batch = validation_batch(from.model->config());
    from.model->evaluate(model_input(batch));

    const auto states = [](const Model& m) {
      std::vector<std::string> levels;
      for (int64_t j = 0; j <= 3; ++j)
        if (const Tensor level = m.state_level(j)) levels.push_back(bytes_of(level));
      return levels;
    };
    const auto want = states(*from.model);
    ASSERT_GE(want.size(), 3u);
    for (const Read& other : kReads) {
      Trainer t(retrain(source, "never", other.level, other.kv));
      t.model().evaluate(model_input(batch));
      const auto got = states(t.model());
      const size_t both = std::min(got.size(), want.size());
      ASSERT_GE(both, 3u);
      EXPECT_TRUE(std::equal(got.begin(), got.begin() + std::ptrdiff_t(both), want.begin()))
          << other.level << " " << other.kv;
    }

    Trainer t(retrain(source, "never", read.level, read.kv));
    const std::vector<int32_t> rows{0, 5, 17, 31};
    const int64_t vocab = from.model->config().vocab;
    std::vector<float> source_logits(size_t(4 * vocab)), logits(size_t(4 * vocab));
    from.model->logits(model_input(batch), rows, view(source_logits.data(), 4, vocab));
    t.model().logits(model_input(batch), rows, view(logits.data(), 4, vocab));
    EXPECT_NE(logits, source_logits) << "the prediction tower is fresh";
    for (const NamedTensor& w : named_weights(t.model().parameters(), t.model().store())) {
      const StoredTensor& trained = from.checkpoint.weights.at(w.name);
      std::memcpy(w.tensor.data, trained.data, trained.bytes);
    }
    t.model().store().round();
    t.model().logits(model_input(batch), rows, view(logits.data(), 4, vocab));
    EXPECT_EQ(logits, source_logits);
  }
}

TEST_F(FreezeTest, OnlyTheFreshTowerMoves) {
  for (const auto& [dtype, read, name] : cases()) {
    SCOPED_TRACE(name);
    const RunConfig source = tower(name, read.level, read.kv, dtype);
    Trainer(source).run();
    const LoadedCheckpoint from = load_checkpoint(latest_checkpoint(source.run_dir())->path);

    RunConfig c = retrain(source, name + " again", read.level, read.kv), fresh = c;
    fresh.freeze.from.clear();
    const auto initial = weights_of(Trainer(fresh).model());
    Trainer t(c);
    const auto before = weights_of(t.model());
    ASSERT_EQ(before.size(), initial.size());
    const bool read_head = before.contains("read_head.kv");
    EXPECT_EQ(read_head, from.weights.tensors().contains("read_head.kv"));
    const auto frozen = [&](const std::string& n) {
      return belongs_to_state(n) || n.starts_with("read_head.");
    };
    for (const auto& [n, bytes] : before) {
      const StoredTensor& stored = from.weights.at(n);
      const std::string trained(static_cast<const char*>(stored.data), stored.bytes);
      EXPECT_EQ(bytes == trained, frozen(n)) << n;
      EXPECT_EQ(bytes == initial.at(n), !frozen(n) || initial.at(n) == trained) << n;
    }

    const auto steps = take_steps(t, 11);
    EXPECT_LT(steps.back().loss, steps.front().loss - 0.3);
    for (const auto& [n, bytes] : weights_of(t.model())) EXPECT_EQ(bytes == before.at(n), frozen(n)) << n;
    stop(t);
    const LoadedCheckpoint saved = load_checkpoint(latest_checkpoint(c.run_dir())->path);
    size_t moments = 0;
    for (const auto& [n, bytes] : before) {
      for (const char* moment : {"m.", "v."})
        EXPECT_EQ(saved.optimizer->tensors().contains(moment + n), !frozen(n)) << n;
      moments += frozen(n) ? 0 : 2;
    }
    EXPECT_EQ(saved.optimizer->tensors().size(), moments);
    EXPECT_EQ(saved.state.at("frozen").at("read_head"), read_head);
  }
}

// The gradient of a step is that of the whole model, its norm that of the trained part alone.
TEST_F(FreezeTest, TheNormIsOverWhatIsTrained) {
  const RunConfig source = tower("source", "final", "own");
  Trainer(source).run();
  RunConfig c = retrain(source, "frozen", "post", "own"), free = c;
  free.freeze.from.clear();
  Trainer frozen(c), whole(free);
  for (const NamedTensor& w : named_weights(whole.model().parameters(), whole.model().store()))
    for (const NamedTensor& f : named_weights(frozen.model().parameters(), frozen.model().store()))
      if (f.name == w.name) std::memcpy(w.tensor.data, f.tensor.data, size_t(f.tensor.count()) * 4);
  const Trainer::Step sf = frozen.step(), sw = whole.step();
  EXPECT_EQ(sf.loss, sw.loss);
  double squares = 0, all = 0;
  const ParameterStore &f = frozen.model().store(), &w = whole.model().store();
  for (size_t i = 0; i < f.list().size(); ++i) {
    for (int64_t k = 0; k < w.list()[i].count(); ++k)
      all += std::pow(double(w.gradient(int(i)).as<float>()[k]), 2);
    if (f.list()[i].frozen) continue;
    EXPECT_TRUE(bytes_of(f.gradient(int(i))) == bytes_of(w.gradient(int(i)))) << f.list()[i].name;
    for (int64_t k = 0; k < f.list()[i].count(); ++k)
      squares += std::pow(double(f.gradient(int(i)).as<float>()[k]), 2);
  }
  EXPECT_NEAR(sf.grad_norm, std::sqrt(squares), 1e-6 * std::sqrt(squares));
  EXPECT_NEAR(sw.grad_norm, std::sqrt(all), 1e-6 * std::sqrt(all));
  EXPECT_GT(all, 1.0005 * squares) << "the difference is no rounding";
}

// A read head that the source never had is part of the new tower.
TEST_F(FreezeTest, AReadHeadOfItsOwnIsTrained) {
  const RunConfig source = tower("source", "final", "own");
  Trainer(source).run();
  const RunConfig c = retrain(source, "again", "final", "state");
  run_part(c, 1);
  const auto before = weights_of(*load_model(c.run_dir(), DType::f32).model);
  Trainer t(c);
  take_steps(t, 4);
  for (const auto& [n, bytes] : weights_of(t.model()))
    EXPECT_EQ(bytes == before.at(n), belongs_to_state(n)) << n;
}

// Any state tower that is its own will do: a standard model's, a shared one's, one that was frozen before.
TEST_F(FreezeTest, TakesTheTowerOfOtherFamilies) {
  RunConfig standard = tower("standard", "", "");
  standard.model.family = "standard";
  RunConfig pause = tower("pause", "", "");
  pause.model.family = "free_pause";
  std::vector<RunConfig> sources{standard, pause, tower("two", "post", "state")};
  for (const RunConfig& source : sources) Trainer(source).run();
  sources.push_back(retrain(sources[2], "again", "post", "own"));
  Trainer(sources.back()).run();
  for (const RunConfig& source : sources) {
    RunConfig c = retrain(source, "taken " + source.run_dir().filename().string(), "final", "own");
    c.model.family = "sequential", c.model.pred_layers = 2;
    c.freeze.from = latest_checkpoint(source.run_dir())->path.string();
    const auto want = weights_of(*load_model(source.run_dir(), DType::f32).model);
    Trainer t(c);
    take_steps(t, 2);
    int frozen = 0;
    for (const auto& [n, bytes] : weights_of(t.model())) {
      if (!belongs_to_state(n)) continue;
      EXPECT_TRUE(bytes == want.at(n)) << source.run_dir() << " " << n;
      ++frozen;
    }
    EXPECT_EQ(frozen, 1 + 3 * 6);
  }
}

TEST_F(FreezeTest, ContinuesToTheSameBytesWithoutTheSource) {
  for (const char* dtype : {"f32", "bf16"}) {
    const RunConfig source = tower(std::string("source ") + dtype, "final", "state", dtype);
    Trainer(source).run();
    const auto again = [&](const std::string& name) {
      return retrain(source, dtype + name, "3,3,1", "state");
    };
    Trainer(again("whole")).run();
    const std::string final = "checkpoints/tokens-000000000000768-final";
    const auto want = folder_content(again("whole").run_dir() / final);
    EXPECT_EQ(want.size(), 4u);
    const std::vector<int64_t> stops{1, 5, 11};
    for (const int64_t at : stops) run_part(again(std::to_string(at)), at);
    fs::remove_all(source.run_dir());
    for (const int64_t at : stops) {
      const RunConfig c = again(std::to_string(at));
      Trainer t(c);
      EXPECT_EQ(t.steps(), at);
      t.run();
      EXPECT_TRUE(folder_content(c.run_dir() / final) == want) << dtype << ", stopped at " << at;
    }
  }
}

TEST_F(FreezeTest, ChangedFrozenWeightsAreNotedOnResume) {
  const RunConfig source = tower("source", "final", "state");
  Trainer(source).run();
  const RunConfig c = retrain(source, "again", "post", "state");
  run_part(c, 3);
  const fs::path path = latest_checkpoint(c.run_dir())->path;
  LoadedModel held = load_model(path, DType::f32);
  const std::vector<NamedTensor> weights = named_weights(held.model->parameters(), held.model->store());
  const LoadedCheckpoint good = load_checkpoint(path);
  std::map<std::string, std::vector<float>> moments;
  std::vector<NamedTensor> optimizer;
  for (const auto& [name, stored] : good.optimizer->tensors()) {
    std::vector<float>& values = moments[name];
    values.resize(stored.bytes / 4);
    std::memcpy(values.data(), stored.data, stored.bytes);
    optimizer.push_back({name, stored.shape, view(values.data(), 1, int64_t(values.size()))});
  }
  // Complete checkpoints in every respect: only the weights themselves tell.
  const auto save = [&](nlohmann::json state) {
    save_checkpoint(c.run_dir(),
                    {CheckpointKind::named, good.tokens, good.config, state, weights, optimizer});
  };
  save(good.state);
  EXPECT_EQ(Trainer(c).steps(), 3);
  for (const NamedTensor& w : weights) {
    float& value = w.tensor.as<float>()[w.tensor.count() - 1];
    const float kept = value;
    value += 1;
    save(good.state);
    if (belongs_to_state(w.name) || w.name.starts_with("read_head.")) {
      const std::string error = error_of([&] { Trainer t(c); });
      EXPECT_PRED2(mentions, error, "frozen weights");
      EXPECT_PRED2(mentions, error, "tokens-000000000000192");
    } else {
      EXPECT_EQ(Trainer(c).steps(), 3) << w.name;
    }
    value = kept;
  }
  nlohmann::json state = good.state;
  state.erase("frozen");
  save(state);
  EXPECT_PRED2(mentions, error_of([&] { Trainer t(c); }), "without a frozen state tower");
  state["frozen"] = {{"xxh3", 3}};
  save(state);
  EXPECT_PRED2(mentions, error_of([&] { Trainer t(c); }), "does not say what is frozen");
}

TEST_F(FreezeTest, AnotherTowerIsRefusedByItsFirstKey) {
  const RunConfig source = tower("source", "post", "own");
  Trainer(source).run();
  struct Other {
    std::function<void(ModelKeys&)> change;
    std::string named;
  };
  const std::vector<Other> all{
      {[](ModelKeys& k) { k.state_layers = 2, k.read_level = "final"; },
       "has model.state_layers = 3, but this run has 2"},
      {[](ModelKeys& k) { k.d_model = 32; }, "has model.d_model = 16, but this run has 32"},
      {[](ModelKeys& k) { k.heads = 4; }, "has model.heads = 2, but this run has 4"},
      {[](ModelKeys& k) { k.kv_heads = 1; }, "has model.kv_heads = 2, but this run has 1"},
      {[](ModelKeys& k) {
         k.d_ffn = {24, 24, 8};
       },
       "has model.d_ffn = [24,24,24], but this run has [24,24,8]"},
      {[](ModelKeys& k) { k.vocab = 384; }, "has model.vocab = 320, but this run has 384"},
      {[](ModelKeys& k) { k.qk_norm = true; }, "has model.qk_norm = false, but this run has true"},
      {[](ModelKeys& k) { k.rope_pairs = "half_split"; },
       "has model.rope_pairs = adjacent, but this run has half_split"},
      {[](ModelKeys& k) { k.rope_theta = 500; }, "has model.rope_theta = 10000"},
      {[](ModelKeys& k) { k.rope_fraction = 0.5; }, "has model.rope_fraction = 1"},
      {[](ModelKeys& k) { k.norm_eps = 1e-5; }, "has model.norm_eps = 1e-06"},
      {[](ModelKeys& k) { k.sliding_window = 8; }, "has model.sliding_window = 0, but this run has 8"},
      {[](ModelKeys& k) { k.full_attention_every = 2; }, "has model.full_attention_every = 0"},
      {[](ModelKeys& k) { k.band_xx = "0:3"; }, "has model.band.xx = 0:inf, but this run has 0:3"},
      {[](ModelKeys& k) { k.context = 32; }, "model.context = 16, but this run has 32"},
  };
  for (const Other& o : all) {
    RunConfig c = retrain(source, "never", "post", "own");
    o.change(c.model);
    EXPECT_PRED2(mentions, refusal(c), o.named);
  }
  RunConfig shorter = retrain(source, "shorter", "final", "own");
  shorter.model.context = 8;
  EXPECT_TRUE(std::isfinite(Trainer(shorter).step().loss));
}

TEST_F(FreezeTest, WhatCannotWorkIsRefusedInOneSentence) {
  const RunConfig source = tower("source", "post", "own");
  Trainer(source).run();
  const auto with = [&](const auto& change) {
    RunConfig c = retrain(source, "never", "post", "own");
    change(c);
    return refusal(c);
  };
  EXPECT_PRED2(mentions, with([](RunConfig& c) { c.phase.at = 0.5; }), "phase.at = ");
  EXPECT_PRED2(mentions, with([](RunConfig& c) { c.model.tie_head = "true"; }), "model.tie_head");
  EXPECT_PRED2(mentions, with([](RunConfig& c) { c.model.pred_input = "row"; }), "model.pred_input = row");
  EXPECT_PRED2(mentions, with([](RunConfig& c) { c.freeze.from += "/nowhere"; }), "does not exist");
  EXPECT_PRED2(mentions, with([&](RunConfig& c) { c.freeze.from = data_.string(); }), "neither a checkpoint");
  EXPECT_PRED2(mentions, with([](RunConfig& c) { c.run.dtype = "f64"; }), "run.dtype = f64 needs F64");

  for (const bool pooled : {false, true}) {
    RunConfig reads = tower(pooled ? "pooled" : "lockstep", "", "");
    reads.model.family = pooled ? "free_pause" : "sps", reads.model.ffn = pooled ? "pooled" : "";
    Trainer(reads).run();
    EXPECT_PRED2(mentions, with([&](RunConfig& c) { c.freeze.from = reads.run_dir().string(); }),
                 pooled ? "model.ffn = pooled" : "model.band.xp = 1:64");
  }
}

// Another source is another run, and so is none.
TEST_F(FreezeTest, ARunKeepsItsSource) {
  const RunConfig source = tower("source", "post", "own");
  Trainer(source).run();
  RunConfig c = retrain(source, "again", "post", "own");
  run_part(c, 2);
  c.freeze.from += "/.";
  EXPECT_PRED2(mentions, error_of([&] { Trainer t(c); }), "freeze.from");
  c.freeze.from.clear();
  EXPECT_PRED2(mentions, error_of([&] { Trainer t(c); }), "freeze.from");
}

}  // namespace
}  // namespace sps
