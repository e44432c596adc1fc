#include "ops/embedding/embedding.h"

#include "ops/check.h"

namespace sps::ops {
namespace {

// Ids with many repeats: half of them among the first three.
std::vector<int32_t> random_ids(int64_t rows, int64_t vocab) {
  const Rng rng(7, "ids");
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < rows; ++r) {
    const uint64_t range = r % 2 == 0 ? uint64_t(std::min<int64_t>(3, vocab)) : uint64_t(vocab);
    ids.push_back(int32_t(rng.below(uint64_t(r), range)));
  }
  return ids;
}

struct Shape {
  int64_t rows, vocab, d;
};
constexpr Shape kShapes[] = {{1, 1, 1},      {3, 5, 8},        {32, 7, 40}, {100, 40, 48},   {257, 320, 200},
                             {64, 300, 513}, {1000, 320, 192}, {70, 1, 24}, {65, 70000, 16}, {40, 9, 1064}};

// The operations under test, on operands in host memory. `padding` beyond the width makes the rows' starts
// suit wide accesses (8) or not.
void forward_on(Device device, std::span<const int32_t> ids, const Matrix& table, const Matrix* vector,
                const Matrix& y) {
  OnDevice on(device);
  embedding_forward(on.exec(), on.ids(ids), on(table), vector ? on(*vector) : Tensor{}, on(y));
}
void backward_on(Device device, std::span<const int32_t> ids, const Matrix& dy, const Matrix& dtable,
                 const Matrix* dvector) {
  OnDevice on(device);
  embedding_backward(on.exec(), on.ids(ids), on(dy), on(dtable), dvector ? on(*dvector) : Tensor{});
}

TEST(Embedding, LooksUpAndAddsTheVector) {
  for (const Device device : test_devices())
    for (const Shape s : kShapes)
      for (const int64_t padding : {2, 8}) {
        const auto ids = random_ids(s.rows, s.vocab);
        Matrix table(DType::f32, s.vocab, s.d, s.d + padding), vector(DType::f32, 1, s.d),
            y(DType::f32, s.rows, s.d, s.d + 3 * padding);
        table.randomise(1, "table");
        vector.randomise(1, "vector");
        forward_on(device, ids, table, nullptr, y);
        for (int64_t r = 0; r < s.rows; ++r)
          for (int64_t c = 0; c < s.d; ++c) ASSERT_EQ(y.get(r, c), table.get(ids[size_t(r)], c));
        Matrix want(DType::f64, s.rows, s.d);
        forward_on(device, ids, table, &vector, y);
        embedding_forward({}, ids, table.to(DType::f64), vector.to(DType::f64), want);
        SPS_EXPECT_CLOSE(y, want, 0x1p-23);  // one addition of floats
      }
}

TEST(Embedding, GradientMatchesCentralDifferences) {
  const Shape s{20, 9, 5};
  const auto ids = random_ids(s.rows, s.vocab);
  Matrix table(DType::f64, s.vocab, s.d), vector(DType::f64, 1, s.d), y(DType::f64, s.rows, s.d);
  Matrix dy(DType::f64, s.rows, s.d), dtable(DType::f64, s.vocab, s.d), dvector(DType::f64, 1, s.d);
  table.randomise(2, "table");
  vector.randomise(2, "vector");
  dy.randomise(2, "dy");
  embedding_backward({}, ids, dy, dtable, dvector);
  const auto loss = [&] {
    embedding_forward({}, ids, table, vector, y);
    double sum = 0;
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t c = 0; c < s.d; ++c) sum += dy.get(r, c) * y.get(r, c);
    return sum;
  };
  expect_gradient(loss, table, dtable, "dtable");
  expect_gradient(loss, vector, dvector, "dvector");
}

TEST(Embedding, BackwardAddsToWhatIsThere) {
  for (const Device device : test_devices())
    for (const Shape s : kShapes)
      for (const int64_t padding : {1, 8})
        for (const bool with_vector : {true, false}) {
          const auto ids = random_ids(s.rows, s.vocab);
          Matrix dy(DType::f32, s.rows, s.d, s.d + 4 * padding),
              dtable(DType::f32, s.vocab, s.d, s.d + padding), dvector(DType::f32, 1, s.d);
          dy.randomise(3, "dy");
          dtable.randomise(3, "dtable");
          dvector.randomise(3, "dvector");
          Matrix want = dtable.to(DType::f64), want_vector = dvector.to(DType::f64);
          embedding_backward({}, ids, dy.to(DType::f64), want, with_vector ? *want_vector : Tensor{});
          backward_on(device, ids, dy, dtable, with_vector ? &dvector : nullptr);
          SPS_EXPECT_CLOSE(dtable, want, tolerance(DType::f32));
          SPS_EXPECT_CLOSE(dvector, want_vector, tolerance(DType::f32));
        }
}

// Sorted by id, these begin and end everywhere in a list of 32 rows: before it, in it and after it, at its
// first and last row, and over several lists. Sums of whole numbers are exact in any order.
TEST(Embedding, RunsOfEqualIdsOfEveryLength) {
  for (const Device device : test_devices())
    for (const std::vector<int64_t>& runs : {std::vector<int64_t>{32, 32},
                                             {31, 1, 1, 31},
                                             {33, 31},
                                             {1, 63, 1},
                                             {5, 100, 7, 64, 3},
                                             {129},
                                             {16, 16, 96}}) {
      std::vector<int32_t> ids;
      for (size_t id = 0; id < runs.size(); ++id) ids.insert(ids.end(), size_t(runs[id]), int32_t(id));
      const auto rows = int64_t(ids.size());
      std::vector<int32_t> mixed;  // every seventh row after another: the sort has something to do
      for (int64_t start = 0; start < 7; ++start)
        for (int64_t r = start; r < rows; r += 7) mixed.push_back(ids[size_t(r)]);
      Matrix dy(DType::f32, rows, 8), dtable(DType::f32, int64_t(runs.size()), 8),
          want(DType::f64, dtable->rows, 8);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < 8; ++c) dy.set(r, c, double(r * 8 + c));
      backward_on(device, mixed, dy, dtable, nullptr);
      embedding_backward({}, mixed, dy.to(DType::f64), want, {});
      EXPECT_EQ(relative_error(dtable, want), 0);
    }
}

// 1 and 2^-24 are such that every other order of addition gives another float.
TEST(Embedding, EqualIdsAddInRowOrder) {
  for (const Device device : test_devices()) {
    const std::vector<int32_t> ids = {1, 0, 1, 1, 1};
    Matrix dy(DType::f32, 5, 200), dtable(DType::f32, 2, 200);
    const double rows[] = {0x1p-24, 5, 1, 0x1p-24, -1};
    for (int64_t r = 0; r < 5; ++r)
      for (int64_t c = 0; c < 200; ++c) dy.set(r, c, rows[r]);
    backward_on(device, ids, dy, dtable, nullptr);
    float in_order = 0;
    for (const int r : {0, 2, 3, 4}) in_order += float(rows[r]);
    for (int64_t c = 0; c < 200; ++c) ASSERT_EQ(dtable.get(1, c), double(in_order));
  }
}

TEST(Embedding, SameBitsForAnyThreads) {
  for (const Shape s : {Shape{2000, 320, 192}, Shape{1500, 50, 513}}) {
    const auto ids = random_ids(s.rows, s.vocab);
    Matrix dy(DType::f32, s.rows, s.d), vector(DType::f32, 1, s.d), table(DType::f32, s.vocab, s.d);
    dy.randomise(4, "dy");
    vector.randomise(4, "vector");
    table.randomise(4, "table");
    expect_same_bits_for_any_threads([&] {
      Matrix y(DType::f32, s.rows, s.d), dtable(DType::f32, s.vocab, s.d), dvector(DType::f32, 1, s.d);
      embedding_forward({}, ids, table, vector, y);
      embedding_backward({}, ids, dy, dtable, dvector);
      return bits(y) + bits(dtable) + bits(dvector);
    });
  }
}

TEST(Embedding, SameBitsEveryTime) {
  for (const Device device : test_devices()) {
    const auto ids = random_ids(3000, 50);
    Matrix dy(DType::f32, 3000, 72);
    dy.randomise(4, "dy");
    const auto run = [&] {
      Matrix dtable(DType::f32, 50, 72), dvector(DType::f32, 1, 72);
      backward_on(device, ids, dy, dtable, &dvector);
      return bits(dtable) + bits(dvector);
    };
    const std::string once = run();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(run() == once);
  }
}

TEST(EmbeddingDeathTest, RefusesAnIdOutsideTheTable) {
  Matrix table(DType::f32, 4, 8), y(DType::f32, 1, 8);
  EXPECT_DEATH(embedding_forward({}, std::vector<int32_t>{4}, table, {}, y), "id < table.rows");
  EXPECT_DEATH(embedding_forward({}, std::vector<int32_t>{-1}, table, {}, y), "id >= 0");
}

}  // namespace
}  // namespace sps::ops
