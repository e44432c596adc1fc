#include "model/parameters.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "model/test_variants.h"

namespace sps {
namespace {

int64_t no_decay(const ModelParameters& p) {
  int64_t n = 0;
  for (const Parameter& t : p.list) n += t.decays() ? 0 : t.count();
  return n;
}

std::map<std::string, std::vector<int64_t>> shapes(const ModelParameters& p) {
  std::map<std::string, std::vector<int64_t>> all;
  for (const Parameter& t : p.list) all[t.name] = t.shape;
  return all;
}

int64_t count(const std::string& settings) {
  return describe_parameters(config_for("s", settings)).count();
}

TEST(Parameters, TotalsOfThePapersScalesInEveryFamily) {
  struct Row {
    std::string scale;
    int64_t total, no_decay, embedding;
  };
  for (const auto& [scale, total, norms, embedding] :
       {Row{"xs", 53'027'328, 8'704, 25'755'648}, Row{"s", 130'665'216, 19'200, 38'633'472},
        Row{"m", 378'717'184, 50'176, 51'511'296}, Row{"l", 831'253'760, 93'440, 64'389'120},
        Row{"xl", 1'678'081'600, 155'200, 80'486'400}}) {
    for (const std::string family : {"standard", "sps", "delayed_state", "reverse_sps"})
      for (const std::string window : {"0", "64", "full"}) {
        SCOPED_TRACE(scale + " " + family + " " + window);
        const ModelParameters p =
            describe_parameters(config_for(scale, "family=" + family + " window=" + window));
        EXPECT_EQ(p.count(), total);
        EXPECT_EQ(no_decay(p), norms);
        EXPECT_EQ(p.count() - p.non_embedding(), embedding);
      }
  }
}

TEST(Parameters, ModelsThatShareEverythingLoadIntoEachOther) {
  const auto standard = shapes(describe_parameters(config_for("xs", "family=standard")));
  for (const std::string family : {"sps", "delayed_state", "reverse_sps"})
    EXPECT_EQ(shapes(describe_parameters(config_for("xs", "family=" + family))), standard) << family;
  auto pause = shapes(describe_parameters(config_for("xs", "family=free_pause")));
  EXPECT_EQ(pause.at("pred_input"), (std::vector<int64_t>{1, 512}));
  pause.erase("pred_input");
  EXPECT_EQ(pause, standard);
}

TEST(Parameters, TwoTowerTable) {
  for (const Variant& v : variants()) {
    SCOPED_TRACE(v.name);
    const ModelParameters p = describe_parameters(config_for("s", v.settings));
    EXPECT_EQ(p.count(), v.total);
    EXPECT_EQ(p.non_embedding(), v.non_embedding);
  }
}

// Two-tower spec, 1.11.
TEST(Parameters, WhatSharingSaves) {
  constexpr int64_t L = 12, d = 768, ffn = 2304;
  const int64_t own = count("family=two_tower");
  EXPECT_EQ(own - count("family=two_tower share=attention"), L * 4 * d * d);
  EXPECT_EQ(own - count("family=two_tower share=norms"), L * 2 * d);
  EXPECT_EQ(own - count("family=two_tower share=ffn"), L * 3 * d * ffn);
  EXPECT_EQ(own - count("family=two_tower share=all"), L * (4 * d * d + 2 * d + 3 * d * ffn));
  const std::string shared = "family=two_tower read.level=same read.kv=state share=attention,norms";
  EXPECT_EQ(count(shared) - count(shared + " ffn=pooled"), L * (3 * d * ffn - 4 * d));
  // From the state's keys and values to a norm and a projection for each prediction block.
  EXPECT_EQ(own - count("family=two_tower read.level=same read.kv=state"), L * (2 * d * d + d));
  // One projection of the level above the last block serves all its readers.
  EXPECT_EQ(count("family=free_pause read.level=post") - count("family=free_pause"), 2 * d * d + d);
  EXPECT_EQ(count("family=free_pause read.level=final") - count("family=free_pause read.level=post"), 0);
}

TEST(Parameters, ASharedPredictionTowerOwnsNoTensor) {
  for (const std::string settings : {"family=sps", "family=free_pause", "family=free_pause read.level=final",
                                     "family=free_pause ffn=pooled", "family=free_pause window=16"})
    for (const Parameter& p : describe_parameters(config_for("s", settings)).list)
      EXPECT_EQ(p.name.find("pred."), std::string::npos) << settings << ": " << p.name;
  // Attention alone: the block's own norms, read norm and FFN remain, no projection does.
  std::set<std::string> tensors;
  for (const Parameter& p : describe_parameters(config_for("s", "family=two_tower share=attention")).list)
    if (p.name.starts_with("pred.3.")) tensors.insert(p.name.substr(7));
  EXPECT_EQ(tensors, (std::set<std::string>{"norm1", "norm2", "read_norm", "gate_up", "down"}));
}

TEST(Parameters, ASharedReadProjectionIsTheKeyPartOfTheStatesOwn) {
  const ModelParameters p = describe_parameters(config_for("s", "family=two_tower share=attention"));
  for (size_t i = 0; i < p.pred.size(); ++i) {
    EXPECT_EQ(p.pred[i].read_kv, p.state[i].qkv);
    EXPECT_EQ(p.pred[i].read_kv_from, 768);
    EXPECT_EQ(p.pred[i].kv_rows, 2 * 768);
  }
}

TEST(Parameters, PredictionBlocksProjectOnlyWhatIsRead) {
  const auto has = [](const ModelConfig& c, const std::string& name) {
    return shapes(describe_parameters(c)).count(name) == 1;
  };
  const ModelConfig tower = config_for("s", "family=two_tower");
  EXPECT_TRUE(has(tower, "pred.0.q") && !has(tower, "pred.0.qkv"));
  EXPECT_EQ(shapes(describe_parameters(tower)).at("pred.0.read_kv"), (std::vector<int64_t>{1536, 768}));
  const ModelConfig windowed = config_for("s", "family=two_tower band.pp=0:16");
  EXPECT_TRUE(!has(windowed, "pred.0.q") && has(windowed, "pred.0.qkv") && has(windowed, "pred.0.read_kv"));
}

TEST(Parameters, BlocksWithoutFeedForwardHoldNoTensorsOfIt) {
  const ModelParameters p =
      describe_parameters(config_for("demo", "family=two_tower d_ffn=576,0,0,576 pred_ffn=0"));
  const auto all = shapes(p);
  for (const std::string part : {"norm2", "gate_up", "down"}) {
    EXPECT_EQ(all.count("state.0." + part), 1u);
    EXPECT_EQ(all.count("state.1." + part), 0u);
    EXPECT_EQ(all.count("pred.0." + part), 0u);
  }
}

TEST(Parameters, TowersOfOtherWidths) {
  const ModelConfig c = config_for("s", "family=sequential layers=6 pred_width=384 pred_ffn=1152");
  const auto all = shapes(describe_parameters(c));
  EXPECT_EQ(all.at("pred.0.q"), (std::vector<int64_t>{384, 384}));
  EXPECT_EQ(all.at("pred.0.read_norm"), (std::vector<int64_t>{768}));
  EXPECT_EQ(all.at("pred.0.read_kv"), (std::vector<int64_t>{768, 768}));
  EXPECT_EQ(all.at("pred_embed"), (std::vector<int64_t>{50304, 384}));
  EXPECT_EQ(all.at("head"), (std::vector<int64_t>{50304, 384}));
  EXPECT_EQ(all.at("final_norm"), (std::vector<int64_t>{384}));
  // Per block 2 d_s d_p + d_s for the read, 2 d_p^2 + 3 d_p I + 2 d_p for the rest.
  const int64_t pred = 6 * (2 * 768 * 384 + 768 + 2 * 384 * 384 + 3 * 384 * 1152 + 2 * 384);
  EXPECT_EQ(describe_parameters(c).count(), 50304 * (768 + 384 + 384) + 6 * 7'669'248 + pred + 384);
}

TEST(Parameters, GroupedQueriesAndHeadNorms) {
  const auto all =
      shapes(describe_parameters(config_for("1b", "family=free_pause qk_norm=true read.level=final")));
  EXPECT_EQ(all.at("state.23.qkv"), (std::vector<int64_t>{(16 + 2 * 8) * 96, 1536}));
  EXPECT_EQ(all.at("state.23.out"), (std::vector<int64_t>{1536, 1536}));
  EXPECT_EQ(all.at("state.0.q_norm"), (std::vector<int64_t>{96}));
  EXPECT_EQ(all.at("read_head.kv"), (std::vector<int64_t>{2 * 8 * 96, 1536}));
  EXPECT_EQ(all.at("read_head.k_norm"), (std::vector<int64_t>{96}));
}

TEST(Parameters, InitialScales) {
  const auto std_of = [](const std::string& scale, const std::string& settings, const std::string& name) {
    for (const Parameter& p : describe_parameters(config_for(scale, settings)).list)
      if (p.name == name) return p.init_std;
    ADD_FAILURE() << name;
    return -1.0;
  };
  // Model spec, section 5, as printed there (six decimals).
  for (const auto& [scale, std] :
       {std::pair("xs", .005), {"s", .004082}, {"m", .002887}, {"l", .002357}, {"xl", .002041}}) {
    EXPECT_NEAR(std_of(scale, "family=sps", "state.0.out"), std, 5e-7);
    EXPECT_EQ(std_of(scale, "family=sps", "state.0.down"), 0.02);
    EXPECT_EQ(std_of(scale, "family=sps", "embed"), 0.02);
  }
  // Two-tower spec, 1.0: the deeper tower counts, for both.
  EXPECT_NEAR(std_of("s", "family=sequential layers=6", "pred.5.out"), .005774, 5e-7);
  for (const std::string towers : {"state_layers=3 pred_layers=9", "state_layers=9 pred_layers=3"})
    for (const std::string name : {"pred.0.out", "state.0.out"})
      EXPECT_NEAR(std_of("s", "family=sequential " + towers, name), .004714, 5e-7);
  EXPECT_EQ(std_of("s", "family=free_pause", "pred_input"), 0.02);
  const ModelParameters p = describe_parameters(config_for("s", "family=free_pause ffn=pooled"));
  for (const Parameter& t : p.list) {
    const bool gain = t.shape.size() == 1, gate = t.name.starts_with("pool."), start = t.name == "pred_input";
    // Gates start at exactly zero; they and the start vector decay like every matrix.
    EXPECT_EQ(t.init_std, gain || gate               ? 0.0
                          : t.name.ends_with(".out") ? 0.02 / std::sqrt(24.0)
                                                     : 0.02)
        << t.name;
    EXPECT_EQ(t.init_mean, gain ? 1.0 : 0.0) << t.name;
    EXPECT_EQ(t.decays(), !gain) << t.name;
    EXPECT_EQ(t.embedding, start || t.name == "embed") << t.name;
  }
}

TEST(Parameters, AUniformListOfWidthsIsTheScalar) {
  const auto list =
      describe_parameters(config_for("demo", "family=two_tower d_ffn=576,576,576,576 pred_ffn=576")).list;
  const auto scalar = describe_parameters(config_for("demo", "family=two_tower d_ffn=576")).list;
  ASSERT_EQ(list.size(), scalar.size());
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(list[i].name, scalar[i].name);
    EXPECT_EQ(list[i].shape, scalar[i].shape);
  }
}

TEST(ParameterStore, TensorsOfOneNameStartWithTheSameBits) {
  const std::string small = "layers=2 d_model=64 heads=1 kv_heads=1 d_ffn=96 vocab=300 eot=256";
  const auto store = [&](const std::string& settings, uint64_t seed) {
    ParameterStore s(describe_parameters(config_for("demo", small + " " + settings)).list, DType::f32, false);
    s.initialise(seed);
    return s;
  };
  const ParameterStore standard = store("family=standard", 7), sps = store("family=sps", 7),
                       tower = store("family=two_tower", 7), other = store("family=standard", 8);
  EXPECT_EQ(standard.hash(), sps.hash());
  EXPECT_EQ(standard.hash(), store("family=standard", 7).hash());
  EXPECT_NE(standard.hash(), other.hash());
  int shared = 0;
  for (size_t i = 0; i < standard.list().size(); ++i)
    for (size_t j = 0; j < tower.list().size(); ++j) {
      if (standard.list()[i].name != tower.list()[j].name) continue;
      ++shared;
      const Tensor a = standard.weight(int(i)), b = tower.weight(int(j));
      ASSERT_EQ(a.count(), b.count());
      EXPECT_TRUE(std::equal(a.as<float>(), a.as<float>() + a.count(), b.as<float>()))
          << standard.list()[i].name;
    }
  EXPECT_EQ(shared, int(standard.list().size()));
}

TEST(ParameterStore, WithoutTheMastersOfProductsTheRoundedCopiesAreTheSame) {
  for (const char* settings : {"family=standard", "family=free_pause ffn=pooled", "family=two_tower"}) {
    const ModelParameters p = describe_parameters(config_for("demo", settings));
    ParameterStore all(p.list, DType::bf16, false),
        needed(p.list, DType::bf16, false, Device::cpu, Masters::needed);
    all.initialise(5), needed.initialise(5);
    int64_t dropped = 0;
    for (int i = 0; i < int(p.list.size()); ++i) {
      const Parameter& parameter = p.list[size_t(i)];
      const bool kept = !parameter.product || parameter.elsewhere;
      EXPECT_EQ(bool(needed.weight(i)), kept) << parameter.name;
      dropped += kept ? 0 : parameter.count();
      EXPECT_EQ(0, std::memcmp(all.rounded(i).data, needed.rounded(i).data,
                               size_t(parameter.count()) * sizeof(bf16)))
          << parameter.name;
      if (needed.weight(i)) {
        EXPECT_EQ(0, std::memcmp(all.weight(i).data, needed.weight(i).data,
                                 size_t(parameter.count()) * sizeof(float)))
            << parameter.name;
      }
    }
    EXPECT_GT(dropped, p.non_embedding() / 2);
    EXPECT_EQ(all.all_weights().count() - needed.all_weights().count(), dropped);
    // In f32 products read the masters.
    EXPECT_EQ(ParameterStore(p.list, DType::f32, false, Device::cpu, Masters::needed).all_weights().count(),
              p.count());
  }
}

TEST(ParameterStore, InitialValuesHaveTheirDistribution) {
  const ModelParameters p = describe_parameters(config_for("xs", "family=standard layers=1 vocab=512 eot=1"));
  ParameterStore store(p.list, DType::f32, false);
  store.initialise(1);
  for (size_t i = 0; i < p.list.size(); ++i) {
    const Tensor w = store.weight(int(i));
    const float* v = w.as<float>();
    double sum = 0, squares = 0;
    for (int64_t k = 0; k < w.count(); ++k) sum += double(v[k]), squares += double(v[k]) * double(v[k]);
    const double n = double(w.count()), std = p.list[i].init_std;
    if (std == 0) {
      EXPECT_TRUE(std::all_of(v, v + w.count(), [](float x) { return x == 1; })) << p.list[i].name;
      continue;
    }
    // Five standard errors of the mean and of the variance of n normal numbers.
    EXPECT_LT(std::abs(sum / n), 5 * std / std::sqrt(n)) << p.list[i].name;
    EXPECT_LT(std::abs(squares / n / (std * std) - 1), 5 * std::sqrt(2 / n)) << p.list[i].name;
  }
}

}  // namespace
}  // namespace sps
