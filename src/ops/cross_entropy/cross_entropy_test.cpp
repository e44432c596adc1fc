#include "ops/cross_entropy/cross_entropy.h"

#include <cstring>

#include "base/error.h"
#include "base/threads.h"
#include "ops/check.h"
#include "ops/cross_entropy/head_cuts.h"
#include "ops/linear/gemm.h"

namespace sps::ops {
namespace {

// Everything a call reads and writes. Every fifth row carries no loss.
struct Case {
  int64_t rows, d, vocab;
  Matrix scale, x, w, nll, dx, dw;
  std::vector<int32_t> targets;

  Case(DType act, int64_t rows_in, int64_t d_in, int64_t vocab_in, bool padded = false, double std = 1)
      : rows(rows_in),
        d(d_in),
        vocab(vocab_in),
        scale(DType::f32, 1, 1),
        x(act, rows, d, padded ? d + 5 : 0),
        w(act, vocab, d, padded ? d + 3 : 0) {
    scale.set(0, 0, rows > 0 ? 1.0 / double(rows) : 1.0);
    x.randomise(3, "x", std);
    w.randomise(3, "w", 1 / std::sqrt(double(d)));
    make_results(act == DType::f64 ? DType::f64 : DType::f32, padded);
    const Rng rng(3, "targets");
    for (int64_t r = 0; r < rows; ++r)
      targets.push_back(r % 5 == 4 ? -1 : int32_t(rng.below(uint64_t(r), uint64_t(vocab))));
  }
  void make_results(DType sums, bool padded) {
    nll = Matrix(sums, rows, 1);
    dx = Matrix(x->dtype, rows, d, padded ? d + 9 : 0);
    dw = Matrix(sums, vocab, d, padded ? d + 2 : 0);
    dw.randomise(3, "dw",
                 0.1 / double(vocab));  // of the size of the gradients, so that neither hides the other
  }
  // The same numbers in f64.
  Case in_f64() const {
    Case c = *this;
    c.scale = scale.to(DType::f32);
    c.x = x.to(DType::f64), c.w = w.to(DType::f64);
    c.nll = nll.to(DType::f64), c.dx = dx.to(DType::f64), c.dw = dw.to(DType::f64);
    return c;
  }
  void train(Device device = Device::cpu) {
    OnDevice on(device);
    head_loss_train(on.exec(), on(x), on(w), on.ids(targets), on(scale), on(nll), on(dx), on(dw));
  }
  void forward(Device device = Device::cpu) {
    OnDevice on(device);
    head_loss_forward(on.exec(), on(x), on(w), on.ids(targets), on(nll));
  }
};

void expect_close(DType act, int64_t rows, int64_t d, int64_t vocab, bool padded,
                  const std::vector<Device>& devices) {
  Case want = Case(act, rows, d, vocab, padded).in_f64();
  want.train();
  for (const Device device : devices) {
    SCOPED_TRACE(fmt::format("{}: {} rows {} d {} vocab {} padded {}", device == Device::cpu ? "cpu" : "cuda",
                             dtype_name(act), rows, d, vocab, padded));
    Case c(act, rows, d, vocab, padded);
    c.train(device);
    SPS_EXPECT_CLOSE(c.nll, want.nll, tolerance(DType::f32));
    // d_logits are rounded to the act dtype before both products, dx once more after it.
    SPS_EXPECT_CLOSE(c.dx, want.dx, tolerance(act, 2));
    SPS_EXPECT_CLOSE(c.dw, want.dw, tolerance(act, 1));
    c.nll.fill(-1);
    c.forward(device);
    SPS_EXPECT_CLOSE(c.nll, want.nll, tolerance(DType::f32));
  }
}

TEST(CrossEntropy, MatchesReference) {
  for (const DType act : {DType::f32, DType::bf16})
    for (const bool padded : {false, true}) {
      expect_close(act, 1, 16, 10, padded, test_devices());
      expect_close(act, 3, 5, 1, padded, test_devices());
      expect_close(act, 17, 8, 1025, padded, test_devices());
      expect_close(act, 129, 24, 2500, padded, test_devices());
      expect_close(act, 333, 16, 193, padded, test_devices());
      expect_close(act, 1100, 8, 70, padded, test_devices());
      expect_close(act, 8300, 8, 70, padded, test_devices());  // two groups
    }
}

TEST(CrossEntropy, MatchesReferenceWithoutBf16Instructions) {
  const ForceBf16Fallback forced;
  expect_close(DType::bf16, 17, 8, 1025, false, {Device::cpu});
  expect_close(DType::bf16, 333, 16, 193, true, {Device::cpu});
}

TEST(CrossEntropy, LargeVocabularyIsCutIntoGroups) {
  expect_close(DType::f32, 400, 4, 150000, false, test_devices());  // on a GPU into chunks
}

TEST(CrossEntropy, SmallVocabularyAndManyRows) {
  expect_close(DType::bf16, 17000, 8, 20, false, test_devices());  // two groups on a GPU too
}

// On a GPU several rows follow each other in the same shared memory, whole or, above 57 thousand, in part.
TEST(CrossEntropy, RowsOfManyKilobytes) {
  for (const int64_t vocab : {50257, 50304, 70001})
    expect_close(DType::bf16, 290, 8, vocab, false, test_devices());
}

TEST(CrossEntropy, CutsCoverTheRowsAndKeepTheirBounds) {
  for (const int64_t rows : {1, 100, 1281, 49152, 100000})
    for (const int64_t vocab : {1, 257, 50304, 150001, 100000000})
      for (const DType act : {DType::f32, DType::bf16})
        for (const bool train : {false, true}) {
          SCOPED_TRACE(fmt::format("rows {} vocab {} {} train {}", rows, vocab, dtype_name(act), train));
          const HeadCuts cuts = head_cuts(rows, vocab, act, train);
          EXPECT_GE(cuts.stride, vocab);
          EXPECT_LT(cuts.stride, vocab + 8);
          EXPECT_EQ(cuts.stride % 8, 0);
          ASSERT_GE(cuts.chunk, 1);
          EXPECT_LE(cuts.chunk, cuts.group);
          EXPECT_LE(cuts.group, rows);
          if (cuts.chunk > 1) {
            EXPECT_LE(cuts.chunk * cuts.stride * 4, int64_t{256} << 20);
          }
          if (train && cuts.group > 1) {
            EXPECT_LE(cuts.group * cuts.stride * int64_t(dtype_size(act)), int64_t{1} << 30);
          }
          if (!train) {
            EXPECT_EQ(cuts.group, cuts.chunk);
          }
        }
  // A head of 50304 with the rows of a large micro-batch: five groups of equal size.
  EXPECT_EQ(head_cuts(49152, 50304, DType::bf16, true).group, 9856);
  EXPECT_EQ(head_cuts(49152, 50304, DType::bf16, true).chunk, 1280);
}

TEST(CrossEntropy, ReferenceGradients) {
  Case c(DType::f64, 6, 7, 11);
  c.dw.fill(0);
  c.train();
  const auto loss = [&] {
    c.forward();
    double sum = 0;
    for (int64_t r = 0; r < c.rows; ++r) sum += c.scale.get(0, 0) * c.nll.get(r, 0);
    return sum;
  };
  expect_gradient(loss, c.x, c.dx, "dx");
  expect_gradient(loss, c.w, c.dw, "dw");
}

std::vector<std::byte> result_bytes(DType act, int64_t rows, int64_t d, int64_t vocab,
                                    Device device = Device::cpu) {
  Case c(act, rows, d, vocab, true);
  c.train(device);
  std::vector<std::byte> bytes;
  const auto append = [&](const Matrix& m) {
    for (int64_t r = 0; r < m->rows; ++r) {
      const auto* from =
          static_cast<const std::byte*>(m->data) + size_t(r * m->stride) * dtype_size(m->dtype);
      bytes.insert(bytes.end(), from, from + size_t(m->cols) * dtype_size(m->dtype));
    }
  };
  append(c.nll), append(c.dx), append(c.dw);
  c.forward(device);
  append(c.nll);
  return bytes;
}

TEST(CrossEntropy, SameBitsForAnyThreadCountAndEveryCall) {
  const int before = thread_count();
  for (const DType act : {DType::f32, DType::bf16})
    for (const auto& [rows, vocab] :
         {std::pair<int64_t, int64_t>{1, 1500}, {100, 2100}, {1500, 300}, {4200, 30}}) {
      SCOPED_TRACE(fmt::format("{} rows {} vocab {}", dtype_name(act), rows, vocab));
      set_thread_count(2);
      const auto two = result_bytes(act, rows, 40, vocab), again = result_bytes(act, rows, 40, vocab);
      set_thread_count(1);
      const auto one = result_bytes(act, rows, 40, vocab);
      set_thread_count(before);
      EXPECT_EQ(std::memcmp(two.data(), again.data(), two.size()), 0);
      EXPECT_EQ(std::memcmp(two.data(), one.data(), two.size()), 0);
    }
}

TEST(CrossEntropy, SameBitsInEveryCallOnEveryDevice) {
  for (const Device device : test_devices())
    for (const DType act : {DType::f32, DType::bf16})
      for (const auto& [rows, vocab] : {std::pair<int64_t, int64_t>{1, 1500}, {4200, 30}, {700, 5000}}) {
        const auto once = result_bytes(act, rows, 40, vocab, device);
        EXPECT_TRUE(once == result_bytes(act, rows, 40, vocab, device)) << rows << " rows of " << vocab;
      }
}

TEST(CrossEntropy, RowsWithoutTargetAreExactlyZero) {
  for (const Device device : test_devices()) {
    Case c(DType::f32, 10, 8, 30);
    c.dx.fill(7);
    c.train(device);
    for (const int64_t r : {4, 9}) {
      EXPECT_EQ(c.nll.get(r, 0), 0);
      for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(c.dx.get(r, i), 0);
    }
    std::fill(c.targets.begin(), c.targets.end(), -1);
    const Matrix dw = c.dw.to(DType::f64);
    c.train(device);
    SPS_EXPECT_CLOSE(c.dw, dw, 0.0);
  }
}

// Each block of a GPU takes many rows; here most of them carry no loss, in runs of every length.
TEST(CrossEntropy, FewScoredRowsAmongMany) {
  for (const Device device : test_devices()) {
    Case c(DType::bf16, 3000, 8, 900);
    const Rng rng(5, "scored");
    for (size_t r = 0; r < c.targets.size(); ++r)
      if (rng.below(r, 4) > 0) c.targets[r] = -1;
    Case want = c.in_f64();
    want.train();
    c.train(device);
    SPS_EXPECT_CLOSE(c.nll, want.nll, tolerance(DType::f32));
    SPS_EXPECT_CLOSE(c.dx, want.dx, tolerance(DType::bf16, 2));
    SPS_EXPECT_CLOSE(c.dw, want.dw, tolerance(DType::bf16, 1));
  }
}

TEST(CrossEntropy, LargeLogitsNeitherOverflowNorLoseTheLoss) {
  for (const Device device : test_devices())
    for (const DType act : {DType::f32, DType::bf16}) {
      Case c(act, 20, 16, 1500, false, 1e4);  // logits of magnitude 1e4
      Case want = c.in_f64();
      want.train();
      c.train(device);
      SPS_EXPECT_CLOSE(c.nll, want.nll, tolerance(DType::f32));
      for (int64_t r = 0; r < 20; ++r) ASSERT_TRUE(std::isfinite(c.nll.get(r, 0)));
    }
}

TEST(CrossEntropy, NanReachesTheLossOfItsRowOnly) {
  for (const Device device : test_devices())
    for (const DType act : {DType::f32, DType::bf16})
      for (const bool train : {false, true}) {
        Case c(act, 20, 16, 1500);
        c.x.set(7, 3, NAN);
        if (train)
          c.train(device);
        else
          c.forward(device);
        for (int64_t r = 0; r < 20; ++r) EXPECT_EQ(std::isnan(c.nll.get(r, 0)), r == 7) << r;
      }
}

TEST(CrossEntropy, TargetBeyondTheVocabularyIsSeenInTheLossOfAGpu) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  for (const bool train : {false, true}) {
    Case c(DType::bf16, 20, 16, 1500);
    c.targets[7] = 1500;
    if (train)
      c.train(Device::cuda);
    else
      c.forward(Device::cuda);
    for (int64_t r = 0; r < 20; ++r) EXPECT_EQ(std::isnan(c.nll.get(r, 0)), r == 7) << r;
  }
}

TEST(CrossEntropy, NoRows) {
  for (const Device device : test_devices()) {
    Case c(DType::f32, 0, 8, 30);
    const Matrix dw = c.dw.to(DType::f64);
    c.train(device);
    c.forward(device);
    SPS_EXPECT_CLOSE(c.dw, dw, 0.0);
  }
}

}  // namespace
}  // namespace sps::ops
