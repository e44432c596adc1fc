#include "ops/rope/rope.h"

#include <complex>

#include "base/error.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

constexpr int64_t kPositions = 2356;
constexpr double kBase = 10000;

struct Table {
  Matrix cos, sin;
  RopeTable table;
  Table(DType dtype, int64_t width, RopePairs pairs)
      : cos(dtype, kPositions, width / 2), sin(dtype, kPositions, width / 2), table{*cos, *sin, pairs} {
    rope_fill(table, kBase);
  }
  RopeTable on(OnDevice& device) const { return {device(cos), device(sin), table.pairs}; }
};

struct Case {
  int64_t rows, heads, head_dim, width;
  RopePairs pairs = RopePairs::adjacent;
  bool norm = false, one_row = false, wide_dy = false;
  bool aligned =
      false;  // rows start where wide accesses may: the GPU has kernels for these, and for all others
};

std::vector<Case> cases() {
  const int64_t shapes[][4] = {{1, 1, 2, 2},    {3, 2, 8, 8},      {100, 3, 64, 64}, {257, 4, 48, 24},
                               {33, 5, 96, 48}, {130, 1, 128, 64}, {7, 3, 10, 6},    {20, 2, 13, 6}};
  std::vector<Case> all;
  for (const auto& s : shapes)
    for (const RopePairs pairs : {RopePairs::adjacent, RopePairs::half_split})
      for (const bool norm : {false, true})
        for (const bool one_row : {false, true})
          all.push_back({s[0], s[1], s[2], s[3], pairs, norm, one_row, all.size() % 3 == 0});
  // Heads of 2 to 32 lanes, some of them idle, more heads than a thread takes at once, rotated in part.
  const int64_t aligned[][4] = {{5, 1, 32, 32},  {70, 9, 64, 64},  {33, 5, 96, 48},
                                {9, 3, 128, 64}, {3, 2, 512, 480}, {2, 1, 544, 32}};
  for (const auto& s : aligned)
    for (const RopePairs pairs : {RopePairs::adjacent, RopePairs::half_split})
      for (const bool norm : {false, true})
        for (const bool one_row : {false, true})
          all.push_back({s[0], s[1], s[2], s[3], pairs, norm, one_row, all.size() % 3 == 0, true});
  return all;
}

std::string describe(const Case& c, DType act) {
  return fmt::format("{} rows {} heads {} head_dim {} width {}{}{}{}{}", dtype_name(act), c.rows, c.heads,
                     c.head_dim, c.width, c.pairs == RopePairs::adjacent ? " adjacent" : " half_split",
                     c.norm ? " norm" : "", c.one_row ? " one_row" : "", c.aligned ? " aligned" : "");
}

std::vector<int32_t> random_positions(int64_t rows) {
  const Rng rng(5, "positions");
  std::vector<int32_t> positions;
  for (int64_t r = 0; r < rows; ++r) positions.push_back(int32_t(rng.below(uint64_t(r), kPositions)));
  return positions;
}

// All tensors of a case: x, y and dx are columns of wider rows, as q and k are of qkv.
struct Data {
  std::vector<int32_t> positions;
  Matrix x, y, dy, dx, gain, rstd, dgain;

  static Data of(const Case& c, DType act) {
    const DType wide = act == DType::f64 ? DType::f64 : DType::f32;
    const int64_t cols = c.heads * c.head_dim, x_rows = c.one_row ? 1 : c.rows;
    Data t{random_positions(c.rows),
           Matrix(act, x_rows, cols, 3 * cols),
           Matrix(act, c.rows, cols, cols + (c.aligned ? 8 : 3)),
           Matrix(c.wide_dy ? wide : act, c.rows, cols, cols + (c.aligned ? 16 : 2)),
           Matrix(act, x_rows, cols, 3 * cols),
           Matrix(wide, 1, c.head_dim),
           Matrix(wide, x_rows, c.heads, c.heads + 1),
           Matrix(wide, 1, c.head_dim)};
    t.x.randomise(1, "x");
    t.dy.randomise(1, "dy");
    t.gain.randomise(1, "gain", 0.3, 1);
    t.dgain.randomise(1, "dgain");
    return t;
  }
  Data in_double() const {
    const DType f64 = DType::f64;
    return {positions,  x.to(f64),    y.to(f64),    dy.to(f64),
            dx.to(f64), gain.to(f64), rstd.to(f64), dgain.to(f64)};
  }
  void forward(const Case& c, const Table& table, Device device = Device::cpu) const {
    forward_into(y, c, table, device);
  }
  void forward_into(const Matrix& to, const Case& c, const Table& table, Device device) const {
    OnDevice on(device);
    rope_forward(on.exec(), on(x), c.heads, table.on(on), on.ids(positions), {c.norm ? on(gain) : Tensor{}},
                 on(rstd), on(to));
  }
  void backward(const Case& c, const Table& table, Device device = Device::cpu) const {
    backward_into(dx, c, table, device);
  }
  void backward_into(const Matrix& to, const Case& c, const Table& table, Device device) const {
    OnDevice on(device);
    rope_backward(on.exec(), on(dy), c.heads, table.on(on), on.ids(positions), {c.norm ? on(gain) : Tensor{}},
                  on(x), on(rstd), on(to), on(dgain));
  }
};

// Pairs turn as complex numbers, with theta from the rotated width; at position 0 every wrong theta looks
// right.
TEST(Rope, RotatesAsComplexNumbersFarFromTheStart) {
  const int64_t head_dim = 32, heads = 2;
  for (const int64_t width : {32, 16, 6})
    for (const RopePairs pairs : {RopePairs::adjacent, RopePairs::half_split})
      for (const DType dtype : {DType::f64, DType::f32}) {
        const Table table(dtype, width, pairs);
        const std::vector<int32_t> positions = {0, 1, 700, 2355};
        Matrix x(dtype, 4, heads * head_dim), y(dtype, 4, heads * head_dim),
            want(DType::f64, 4, heads * head_dim);
        x.randomise(2, "x");
        rope_forward({}, x, heads, table.table, positions, {}, {}, y);
        for (int64_t r = 0; r < 4; ++r)
          for (int64_t h = 0; h < heads; ++h) {
            const int64_t at = h * head_dim;
            for (int64_t m = 0; m < width / 2; ++m) {
              const int64_t a = at + (pairs == RopePairs::adjacent ? 2 * m : m);
              const int64_t b = at + (pairs == RopePairs::adjacent ? 2 * m + 1 : m + width / 2);
              const double theta = std::exp(-std::log(kBase) * 2 * double(m) / double(width));
              const auto turned = std::complex<double>(x.get(r, a), x.get(r, b)) *
                                  std::polar(1.0, double(positions[size_t(r)]) * theta);
              want.set(r, a, turned.real());
              want.set(r, b, turned.imag());
            }
            for (int64_t c = width; c < head_dim; ++c) want.set(r, at + c, x.get(r, at + c));
          }
        SPS_EXPECT_CLOSE(y, want, dtype == DType::f64 ? 1e-11 : 1e-6);
      }
}

TEST(Rope, KeepsTheLengthOfEveryPair) {
  const Table table(DType::f32, 64, RopePairs::adjacent);
  Matrix x(DType::f32, 50, 64), y(DType::f32, 50, 64);
  x.randomise(3, "x");
  rope_forward({}, x, 1, table.table, random_positions(50), {}, {}, y);
  for (int64_t r = 0; r < 50; ++r)
    for (int64_t m = 0; m < 32; ++m)
      ASSERT_NEAR(std::hypot(y.get(r, 2 * m), y.get(r, 2 * m + 1)),
                  std::hypot(x.get(r, 2 * m), x.get(r, 2 * m + 1)), 1e-6);
}

TEST(Rope, ScoresDependOnTheDistanceOnly) {
  for (const int64_t width : {64, 32})
    for (const RopePairs pairs : {RopePairs::adjacent, RopePairs::half_split}) {
      const Table table(DType::f64, width, pairs);
      Matrix q(DType::f64, 1, 64), k(DType::f64, 1, 64), rq(DType::f64, 1, 64), rk(DType::f64, 1, 64);
      q.randomise(4, "q");
      k.randomise(4, "k");
      const auto score = [&](int32_t i, int32_t j) {
        rope_forward({}, q, 1, table.table, std::vector<int32_t>{i}, {}, {}, rq);
        rope_forward({}, k, 1, table.table, std::vector<int32_t>{j}, {}, {}, rk);
        double sum = 0;
        for (int64_t c = 0; c < 64; ++c) sum += rq.get(0, c) * rk.get(0, c);
        return sum;
      };
      for (const int32_t distance : {0, 1, 64, 700}) {
        EXPECT_NEAR(score(distance, 0), score(1655 + distance, 1655), 1e-9);
        EXPECT_GT(std::abs(score(distance, 0) - score(distance + 1, 0)), 1e-3);
      }
    }
}

TEST(Rope, PairConventionsDiffer) {
  const Table adjacent(DType::f32, 32, RopePairs::adjacent),
      half_split(DType::f32, 32, RopePairs::half_split);
  Matrix x(DType::f32, 1, 32), a(DType::f32, 1, 32), h(DType::f32, 1, 32);
  x.randomise(6, "x");
  for (const int32_t position : {0, 1, 700}) {
    rope_forward({}, x, 1, adjacent.table, std::vector<int32_t>{position}, {}, {}, a);
    rope_forward({}, x, 1, half_split.table, std::vector<int32_t>{position}, {}, {}, h);
    if (position == 0) {
      EXPECT_EQ(bits(a), bits(h));
    } else {
      EXPECT_GT(relative_error(a, h), 0.1);
    }
  }
}

TEST(Rope, QkNormGivesHeadsOfUnitMeanSquare) {
  const Table table(DType::f64, 16, RopePairs::adjacent);
  Matrix x(DType::f64, 3, 48), y(DType::f64, 3, 48), gain(DType::f64, 1, 16), rstd(DType::f64, 3, 3);
  x.randomise(7, "x", 5);
  gain.fill(1);
  rope_forward({}, x, 3, table.table, random_positions(3), {*gain}, rstd, y);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t h = 0; h < 3; ++h) {
      double sum = 0, sum_x = 0;
      for (int64_t c = 16 * h; c < 16 * (h + 1); ++c)
        sum += y.get(r, c) * y.get(r, c), sum_x += x.get(r, c) * x.get(r, c);
      EXPECT_NEAR(sum / 16, 1, 1e-5);
      EXPECT_NEAR(rstd.get(r, h), 1 / std::sqrt(sum_x / 16 + 1e-6), 1e-9);
    }
}

TEST(Rope, GradientMatchesCentralDifferences) {
  for (const RopePairs pairs : {RopePairs::adjacent, RopePairs::half_split})
    for (const bool norm : {false, true})
      for (const bool one_row : {false, true}) {
        const Case c{6, 2, 10, 6, pairs, norm, one_row};
        SCOPED_TRACE(describe(c, DType::f64));
        const Table table(DType::f64, c.width, pairs);
        Data t = Data::of(c, DType::f64);
        t.dgain.fill(0);
        t.forward(c, table);
        t.backward(c, table);
        const auto loss = [&] {
          t.forward(c, table);
          double sum = 0;
          for (int64_t r = 0; r < c.rows; ++r)
            for (int64_t i = 0; i < t.y->cols; ++i) sum += t.dy.get(r, i) * t.y.get(r, i);
          return sum;
        };
        expect_gradient(loss, t.x, t.dx, "dx");
        if (norm) expect_gradient(loss, t.gain, t.dgain, "dgain");
      }
}

TEST(Rope, FastMatchesReference) {
  for (const auto& [device, act] : fast_backends())
    for (const Case& c : cases()) {
      SCOPED_TRACE(describe(c, act));
      const Table table(DType::f32, c.width, c.pairs), exact(DType::f64, c.width, c.pairs);
      Data fast = Data::of(c, act);
      Data want = fast.in_double();
      fast.forward(c, table, device);
      want.forward(c, exact);
      SPS_EXPECT_CLOSE(fast.y, want.y, tolerance(act));
      SPS_EXPECT_CLOSE(fast.rstd, want.rstd, tolerance(DType::f32));
      fast.backward(c, table, device);
      want.backward(c, exact);
      SPS_EXPECT_CLOSE(fast.dx, want.dx, tolerance(act));
      SPS_EXPECT_CLOSE(fast.dgain, want.dgain, tolerance(DType::f32));
    }
}

TEST(Rope, MayBeInPlace) {
  for (const auto& [device, act] : all_backends())
    for (const RopePairs pairs : {RopePairs::adjacent, RopePairs::half_split})
      for (const bool norm : {false, true})
        for (const bool aligned : {false, true}) {
          Case c{150, 3, 20, 12, pairs, norm};
          if (aligned) c.head_dim = 48, c.width = 32, c.aligned = true;
          const Table table(act == DType::f64 ? DType::f64 : DType::f32, c.width, pairs);
          Data t = Data::of(c, act);
          t.forward(c, table, device);
          t.backward(c, table, device);
          if (!norm) {
            t.forward_into(t.x, c, table, device);
            EXPECT_EQ(bits(t.x), bits(t.y));
          }
          t.backward_into(t.dy, c, table, device);
          EXPECT_EQ(bits(t.dy), bits(t.dx));
        }
}

TEST(Rope, OneRowServesEveryPosition) {
  for (const Device device : test_devices())
    for (const bool norm : {false, true})
      for (const bool aligned : {false, true}) {
        const Case one{40, 2, 16, 16, RopePairs::adjacent, norm, true, false, aligned},
            many{40, 2, 16, 16, RopePairs::adjacent, norm, false, false, aligned};
        const Table table(DType::f32, 16, RopePairs::adjacent);
        Data a = Data::of(one, DType::f32), b = Data::of(many, DType::f32);
        for (int64_t r = 0; r < 40; ++r)
          for (int64_t c = 0; c < 32; ++c) b.x.set(r, c, a.x.get(0, c));
        a.forward(one, table, device);
        b.forward(many, table, device);
        EXPECT_EQ(bits(a.y), bits(b.y));
      }
}

// What is not rotated is only copied: a NaN in it stays alone, beside rotated dimensions and beside its like.
TEST(Rope, NanBesideTheRotatedPartStaysAlone) {
  for (const Device device : test_devices())
    for (const RopePairs pairs : {RopePairs::adjacent, RopePairs::half_split}) {
      const Case c{2, 1, 64, 32, pairs, false, false, false, true};
      const Table table(DType::f32, c.width, pairs);
      Data t = Data::of(c, DType::bf16);
      t.x.set(1, 41, NAN);
      t.forward(c, table, device);
      for (int64_t r = 0; r < 2; ++r)
        for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(std::isnan(t.y.get(r, i)), r == 1 && i == 41);
    }
}

TEST(Rope, SameBitsEveryTime) {
  for (const Device device : test_devices())
    for (const bool one_row : {false, true}) {
      const Case c{600, 3, 64, 64, RopePairs::adjacent, true, one_row, false, true};
      const Table table(DType::f32, 64, c.pairs);
      const auto run = [&] {
        Data t = Data::of(c, DType::bf16);
        t.forward(c, table, device);
        t.backward(c, table, device);
        return bits(t.y) + bits(t.rstd) + bits(t.dx) + bits(t.dgain);
      };
      const std::string once = run();
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(run() == once);
    }
}

TEST(Rope, SameBitsForAnyThreads) {
  for (const bool one_row : {false, true}) {
    const Case c{900, 3, 64, 64, RopePairs::adjacent, true, one_row};
    const Table table(DType::f32, 64, c.pairs);
    expect_same_bits_for_any_threads([&] {
      Data t = Data::of(c, DType::bf16);
      t.forward(c, table);
      t.backward(c, table);
      return bits(t.y) + bits(t.rstd) + bits(t.dx) + bits(t.dgain);
    });
  }
}

TEST(RopeDeathTest, RefusesAPositionPastTheTable) {
  const Table table(DType::f32, 8, RopePairs::adjacent);
  Matrix x(DType::f32, 1, 8), y(DType::f32, 1, 8);
  EXPECT_DEATH(rope_forward({}, x, 1, table.table, std::vector<int32_t>{int32_t(kPositions)}, {}, {}, y),
               "p < table.cos.rows");
}

}  // namespace
}  // namespace sps::ops
