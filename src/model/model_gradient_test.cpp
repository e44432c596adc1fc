// Gradients of whole models: every parameter of a small model of every family against central differences in
// double, and the f32 and bf16 passes against the double one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "model/test_models.h"
#include "ops/check.h"

namespace sps {
namespace {

class EveryModel : public testing::TestWithParam<TestModel> {};

std::vector<std::vector<double>> gradients_of(const Model& model) {
  std::vector<std::vector<double>> all;
  for (size_t i = 0; i < model.store().list().size(); ++i) {
    const OnHost host(model.store().gradient(int(i)));
    const Tensor g = host;
    all.emplace_back();
    for (int64_t k = 0; k < g.count(); ++k)
      all.back().push_back(g.dtype == DType::f64 ? g.as<double>()[k] : double(g.as<float>()[k]));
  }
  return all;
}

double norm_of(const std::vector<double>& v) {
  double s = 0;
  for (const double x : v) s += x * x;
  return std::sqrt(s);
}

TEST_P(EveryModel, GradientsMatchCentralDifferences) {
  const ModelConfig c = resolve(GetParam().keys);
  Model model(c, {.compute = DType::f64, .max_rows = 20});
  lively_weights(model, 3);
  const TestInput input(c, 2, 10, 5);
  const double scale = 1.0 / double(input.scored());
  model.store().zero_gradients(Exec{});
  const Loss loss = model.train(input.input(), scale);
  EXPECT_EQ(loss.scored, input.scored());
  const auto analytic = gradients_of(model);
  double largest = 0;
  for (const auto& g : analytic)
    for (const double x : g) largest = std::max(largest, std::abs(x));

  const Rng rng(9, "elements");
  for (size_t i = 0; i < model.store().list().size(); ++i) {
    const Parameter& p = model.store().list()[i];
    double* w = model.store().weight(int(i)).as<double>();
    for (uint64_t n = 0; n < 6; ++n) {
      const auto k = size_t(rng.below(i * 100 + n, uint64_t(p.count())));
      const double keep = w[k], h = 1e-5;
      w[k] = keep + h;
      const double up = model.evaluate(input.input()).nll * scale;
      w[k] = keep - h;
      const double down = model.evaluate(input.input()).nll * scale;
      w[k] = keep;
      EXPECT_NEAR(analytic[i][k] / largest, (up - down) / (2 * h) / largest, 1e-6)
          << p.name << " element " << k;
    }
  }
}

// Moves every weight by what rounding to bf16 would (at most 2^-9 of it; the tests' weights are bf16 numbers
// already). What that does to the gradients says how much a model's formulas magnify any rounding.
void shake_weights(Model& model) {
  for (size_t i = 0; i < model.store().list().size(); ++i) {
    const Rng rng(4, model.store().list()[i].name);
    const Tensor w = model.store().weight(int(i));
    for (int64_t k = 0; k < w.count(); ++k)
      w.as<double>()[k] *= 1 + std::ldexp(rng.uniform(uint64_t(k)) - 0.5, -8);
  }
}

// The distance of each tensor's gradient, relative to its length. A tensor with a tiny gradient carries the
// rounding of the large ones around it.
std::vector<double> distances(const std::vector<std::vector<double>>& got,
                              const std::vector<std::vector<double>>& want) {
  double total = 0;
  for (const auto& v : want) total = std::hypot(total, norm_of(v));
  std::vector<double> all;
  for (size_t i = 0; i < got.size(); ++i) {
    double sum = 0;
    for (size_t k = 0; k < got[i].size(); ++k) sum += std::pow(got[i][k] - want[i][k], 2);
    all.push_back(std::sqrt(sum) / (norm_of(want[i]) + 0.02 * total));
  }
  return all;
}

// f32: sums of some hundred terms. bf16: activations and their gradients are rounded a dozen times a block
// forward and as often backward, so a gradient may be a few times as far away as with shaken weights (errors
// add up like the root of their number; on a CPU the median of all tensors is 1.5 times, the largest 3.7). A
// rare input makes a row nearly zero before a norm, so bf16 is judged by the middle one of five inputs; a
// wrong formula shows in all.
void expect_the_reference(const ModelConfig& c, const ops::Backend& backend, int64_t batch, int64_t length,
                          double spread) {
  const bool f32 = backend.dtype == DType::f32;
  const double loss_tolerance = f32 ? 1e-5 : 0.01;
  Model reference(c, {.compute = DType::f64, .max_rows = batch * length});
  Model shaken(c, {.compute = DType::f64, .max_rows = batch * length});
  Model model(c, {.compute = backend.dtype, .max_rows = batch * length, .device = backend.device});
  for (Model* m : {&reference, &shaken, &model}) lively_weights(*m, 3, spread);
  shake_weights(shaken);
  const size_t tensors = model.store().list().size();
  std::vector<std::vector<double>> found(tensors), unit(tensors);
  for (uint64_t seed = 5; seed < 10; ++seed) {
    const TestInput input(c, batch, length, seed);
    const double scale = 1.0 / double(input.scored());
    const auto train = [&](Model& m) {
      m.store().zero_gradients(exec_on(m.options().device));
      return m.train(input.input(), scale).nll * scale;
    };
    const double want = train(reference), got = train(model);
    EXPECT_NEAR(got, want, loss_tolerance * want) << backend.name();
    const auto truth = gradients_of(reference);
    const auto d = distances(gradients_of(model), truth);
    if (!f32) train(shaken);
    const auto u = distances(f32 ? truth : gradients_of(shaken), truth);
    for (size_t i = 0; i < tensors; ++i) found[i].push_back(d[i]), unit[i].push_back(u[i]);
  }
  for (size_t i = 0; i < tensors; ++i) {
    std::sort(found[i].begin(), found[i].end());
    std::sort(unit[i].begin(), unit[i].end());
    const double allowed = f32 ? 1e-4 : 5 * unit[i][2];
    EXPECT_LE(found[i][f32 ? 4 : 2], allowed) << backend.name() << " " << model.store().list()[i].name;
  }
}

TEST_P(EveryModel, F32AndBf16MatchTheReference) {
  for (const ops::Backend& backend : ops::fast_backends())
    expect_the_reference(resolve(GetParam().keys), backend, 2, 12, 0.25);
}

// Heads and widths as real models have them, and sequences of several tiles with a rest: what the small
// models leave to the kernels' edges.
TEST_P(EveryModel, RealHeadsMatchTheReferenceOnAGpu) {
  if (gpu_count() == 0) GTEST_SKIP() << "there is no GPU here";
  ModelKeys keys = GetParam().keys;
  const bool grouped = keys.kv_heads > 0 && keys.kv_heads < keys.heads;
  keys.context = 300, keys.d_model = 128, keys.heads = 2, keys.kv_heads = grouped ? 1 : 2, keys.head_dim = 64;
  if (keys.pred_width > 0) keys.pred_width = 192;
  for (int64_t& ffn : keys.d_ffn) ffn *= 8;
  for (int64_t& ffn : keys.pred_ffn) ffn *= 8;
  for (const DType dtype : {DType::f32, DType::bf16})
    expect_the_reference(resolve(keys), {Device::cuda, dtype}, 2, 213, 0.09);
}

INSTANTIATE_TEST_SUITE_P(Families, EveryModel, testing::ValuesIn(test_models()), [](const auto& info) {
  std::string name = info.param.name;
  for (char& ch : name)
    if (std::isalnum(static_cast<unsigned char>(ch)) == 0) ch = '_';
  return name;
});

}  // namespace
}  // namespace sps
