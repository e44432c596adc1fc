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
    const Tensor g = model.store().gradient(int(i));
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

TEST_P(EveryModel, F32AndBf16MatchTheReference) {
  const ModelConfig c = resolve(GetParam().keys);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // f32: sums of some hundred terms. bf16: activations carry 8 bits (2^-9 each) through two or three
    // blocks; the distance of a gradient is taken relative to its length. A rare input makes a row nearly
    // zero before a norm, which magnifies any rounding, so bf16 is judged by the middle one of five inputs; a
    // wrong formula shows in all.
    const double loss_tolerance = dtype == DType::f32 ? 1e-5 : 0.01,
                 tolerance = dtype == DType::f32 ? 1e-4 : 0.08;
    Model reference(c, {.compute = DType::f64, .max_rows = 24}), model(c, {.compute = dtype, .max_rows = 24});
    lively_weights(reference, 3);
    lively_weights(model, 3);
    std::vector<std::vector<double>> distances(model.store().list().size());
    for (uint64_t seed = 5; seed < 10; ++seed) {
      const TestInput input(c, 2, 12, seed);
      const double scale = 1.0 / double(input.scored());
      for (Model* m : {&reference, &model}) m->store().zero_gradients(Exec{});
      const double want = reference.train(input.input(), scale).nll * scale;
      const double got = model.train(input.input(), scale).nll * scale;
      EXPECT_NEAR(got, want, loss_tolerance * want) << dtype_name(dtype);
      const auto g = gradients_of(model), r = gradients_of(reference);
      double total = 0;
      for (const auto& v : r) total = std::hypot(total, norm_of(v));
      for (size_t i = 0; i < g.size(); ++i) {
        double distance = 0;
        for (size_t k = 0; k < g[i].size(); ++k) distance = std::hypot(distance, g[i][k] - r[i][k]);
        // A tensor with a tiny gradient carries the rounding of the large ones around it.
        distances[i].push_back(distance / (norm_of(r[i]) + 0.02 * total));
      }
    }
    for (size_t i = 0; i < distances.size(); ++i) {
      std::sort(distances[i].begin(), distances[i].end());
      EXPECT_LE(distances[i][dtype == DType::f32 ? 4 : 2], tolerance)
          << dtype_name(dtype) << " " << model.store().list()[i].name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, EveryModel, testing::ValuesIn(test_models()), [](const auto& info) {
  std::string name = info.param.name;
  for (char& ch : name)
    if (std::isalnum(static_cast<unsigned char>(ch)) == 0) ch = '_';
  return name;
});

}  // namespace
}  // namespace sps
