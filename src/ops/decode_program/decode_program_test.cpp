// A program against the calls that it stands for, bit by bit.
#include "ops/decode_program/decode_program.h"

#include <gtest/gtest.h>

#include "ops/check.h"
#include "tensor/graph.h"

namespace sps::ops {
namespace {

struct Shape {
  int64_t rows, d, ffn, vocab, blocks;
  int64_t padding = 0;  // of all rows
};

// What several passes read.
struct Weights {
  std::vector<Matrix> qkv, out, gate_up, down, gain;
  Matrix head;

  explicit Weights(const Shape& s) {
    const auto weights = [&](int64_t rows, int64_t cols, const std::string& name) {
      return Matrix(DType::bf16, rows, cols, cols + s.padding)
          .randomise(1, name, 1 / std::sqrt(double(cols)));
    };
    for (int64_t i = 0; i < s.blocks; ++i) {
      qkv.push_back(weights(s.d + s.d / 2 + 3, s.d, fmt::format("qkv{}", i)));
      out.push_back(weights(s.d, s.d, fmt::format("out{}", i)));
      gate_up.push_back(weights(2 * s.ffn, s.d, fmt::format("gate_up{}", i)));
      down.push_back(weights(s.d, s.ffn, fmt::format("down{}", i)));
      for (int j = 0; j < 2; ++j)
        gain.push_back(Matrix(DType::f32, 1, s.d).randomise(1, fmt::format("gain{}.{}", i, j), 0.2, 1));
    }
    head = weights(s.vocab, s.d, "head");
  }
};

// Rows that pass through a few blocks without attention, and out through a head for some of them.
struct Numbers {
  const Weights& w;
  Matrix residual, q, rest, h, logits, n, rstd, pair, delta, picked;
  std::vector<int32_t> pick;

  Numbers(const Shape& s, const Weights& weights) : w(weights) {
    const auto matrix = [&](DType dtype, int64_t rows, int64_t cols) {
      return Matrix(dtype, rows, cols, cols + s.padding);
    };
    residual = matrix(DType::f32, s.rows, s.d).randomise(1, "residual");
    q = matrix(DType::bf16, s.rows, s.d), rest = Matrix(DType::bf16, s.rows, s.d / 2 + 3);
    h = matrix(DType::bf16, s.rows, s.ffn);
    for (int64_t r = 0; r < s.rows; ++r)
      if (r % 3 != 1) pick.push_back(int32_t(r));
    const auto picks = int64_t(pick.size());
    logits = Matrix(DType::f32, picks, s.vocab);
    n = Matrix(DType::bf16, s.rows, s.d), rstd = Matrix(DType::f32, s.rows, 1);
    picked = Matrix(DType::f32, picks, s.d);
    pair = Matrix(DType::bf16, s.rows, 2 * s.ffn), delta = Matrix(DType::bf16, s.rows, s.d);
  }
};

// One pass: as calls, or into a program. `launch_after`: stages of a launch.
void pass(OnDevice& on, const Numbers& m, DecodeProgram* program, int64_t launch_after) {
  const Exec& ex = on.exec();
  int64_t stages = 0;
  const auto added = [&](bool done) {
    EXPECT_TRUE(done);
    if (++stages % launch_after == 0) program->launch();
  };
  const auto normed = [&](size_t gain) {
    return DecodeRows(on(m.residual), on(m.w.gain[gain]), 1e-5F, on(m.n), on(m.rstd));
  };
  for (size_t i = 0; i < m.w.qkv.size(); ++i) {
    const DecodeRows first = normed(2 * i), second = normed(2 * i + 1);
    if (program != nullptr) {
      added(program->linear(first, on(m.w.qkv[i]), on(m.q), on(m.rest)));
      added(program->linear_add(on(m.q), on(m.w.out[i]), on(m.residual)));
      added(program->linear_swiglu(second, on(m.w.gate_up[i]), on(m.h)));
      added(program->linear_add(on(m.h), on(m.w.down[i]), on(m.residual)));
    } else {
      decode_linear(ex, first, on(m.w.qkv[i]), on(m.q), on(m.rest));
      decode_linear_add(ex, on(m.q), on(m.w.out[i]), on(m.delta), on(m.residual));
      decode_linear_swiglu(ex, second, on(m.w.gate_up[i]), on(m.pair), on(m.h));
      decode_linear_add(ex, on(m.h), on(m.w.down[i]), on(m.delta), on(m.residual));
    }
  }
  const auto picks = int64_t(m.pick.size());
  DecodeRows last(on(m.residual), on(m.w.gain[0]), 1e-5F, on(m.n).rows_from(0, picks),
                  on(m.rstd).rows_from(0, picks));
  last.pick = on.ids(m.pick), last.s = on(m.picked);
  if (program == nullptr) return decode_linear(ex, last, on(m.w.head), on(m.logits));
  added(program->linear(last, on(m.w.head), on(m.logits)));
  program->launch();
}

void compare(const Shape& s, int64_t launch_after, int passes, bool mail = true) {
  SCOPED_TRACE(fmt::format("{} rows, width {}, ffn {}, vocabulary {}, {} blocks, padding {}", s.rows, s.d,
                           s.ffn, s.vocab, s.blocks, s.padding));
  const Weights weights(s);
  const Numbers start(s, weights), calls(s, weights), program(s, weights);
  {
    OnDevice on(Device::cuda);
    for (int i = 0; i < passes; ++i) pass(on, calls, nullptr, 1);
  }
  {
    OnDevice on(Device::cuda);
    DecodeProgram stages(on.exec(), 4 * s.blocks + 1, mail);
    // Tensors come to the GPU outside of the recording.
    for (const Matrix* m : {&program.residual, &program.q, &program.rest, &program.h, &program.logits,
                            &program.n, &program.rstd, &program.picked, &weights.head})
      on(*m);
    for (const auto* list : {&weights.qkv, &weights.out, &weights.gate_up, &weights.down, &weights.gain})
      for (const Matrix& m : *list) on(m);
    on.ids(program.pick);
    StreamGraph graph;
    graph.record(on.exec(), [&] { pass(on, program, &stages, launch_after); });
    stages.upload();
    if (launch_after > 4 * s.blocks) {  // it is one launch
      EXPECT_GT(stages.launches().all, 0);
      EXPECT_EQ(stages.launches().by_mail, mail ? stages.launches().all : 0);
    }
    for (int i = 0; i < passes; ++i) graph.start(on.exec());
    synchronize(on.exec());
  }
  EXPECT_EQ(bits(program.rest), bits(calls.rest));
  EXPECT_EQ(bits(program.h), bits(calls.h));
  EXPECT_EQ(bits(program.q), bits(calls.q));
  EXPECT_EQ(bits(program.residual), bits(calls.residual));
  EXPECT_EQ(bits(program.logits), bits(calls.logits));
  EXPECT_NE(bits(program.residual), bits(start.residual));  // something has happened
}

class DecodeProgramTest : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0 || !DecodeProgram::usable(open_gpu())) GTEST_SKIP() << "no GPU with this kernel";
  }
};

// A test for each, so that slow tools can take some.
class DecodeProgramOfShapes : public DecodeProgramTest, public testing::WithParamInterface<Shape> {};
TEST_P(DecodeProgramOfShapes, GivesTheBitsOfTheCalls) {
  compare(GetParam(), 1000, 3);
}
std::vector<Shape> shapes() {
  std::vector<Shape> all = {{4, 2048, 2112, 1000, 2, 16}, {1, 4096, 1024, 1000, 1}};
  for (const int64_t rows : {1, 2, 3, 5, 8})
    for (const Shape& s : {Shape{rows, 64, 128, 5, 1}, Shape{rows, 192, 320, 100, 3, 8},
                           Shape{rows, 1024, 3072, 5003, 3}, Shape{rows, 1600, 4800, 3000, 2}})
      all.push_back(s);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, DecodeProgramOfShapes, testing::ValuesIn(shapes()), [](const auto& shape) {
  const Shape& s = shape.param;
  return fmt::format("{}x{}x{}", s.rows, s.d, s.ffn);
});

TEST_F(DecodeProgramTest, GivesThemWithoutMail) {
  compare({2, 192, 320, 100, 3, 8}, 1000, 3, false);
  compare({1, 1024, 3072, 5003, 3}, 1000, 3, false);
}

TEST_F(DecodeProgramTest, MayBeCutIntoLaunches) {
  for (const int64_t after : {1, 2, 3, 7}) compare({2, 1024, 3072, 1000, 3}, after, 3);
}

// Stages follow each other thousands of times: a block that runs ahead would be seen.
TEST_F(DecodeProgramTest, GivesThemAgainAndAgain) {
  compare({1, 1024, 3072, 1000, 4}, 1000, 1000);
  compare({1, 1024, 3072, 1000, 4}, 1000, 1000, false);
  compare({2, 256, 512, 300, 30}, 1000, 300);
}

TEST_F(DecodeProgramTest, LeavesOutWhatItCannotDo) {
  OnDevice on(Device::cuda);
  const Exec& ex = on.exec();
  const auto tries = [&](DType dtype, int64_t rows, int64_t in, int64_t padding, DecodeProgram& program) {
    const Matrix x(dtype, rows, in, in + padding), w(dtype, 16, in, in + padding), y(dtype, rows, 16);
    OnDevice here(Device::cuda);
    return program.linear(here(x), here(w), here(y));
  };
  DecodeProgram program(ex, 2);
  EXPECT_FALSE(tries(DType::f32, 1, 64, 0, program));
  EXPECT_FALSE(tries(DType::bf16, kMostProgramRows + 1, 64, 0, program));
  EXPECT_FALSE(tries(DType::bf16, 2, 64, 3, program));
  EXPECT_FALSE(tries(DType::bf16, 2, 72, 0, program));
  EXPECT_FALSE(tries(DType::bf16, 8, 1 << 16, 0, program));
  program.launch();  // nothing
  EXPECT_TRUE(tries(DType::bf16, 1, 64, 0, program));
  EXPECT_TRUE(tries(DType::bf16, 8, 64, 0, program));
  EXPECT_FALSE(tries(DType::bf16, 8, 64, 0, program));  // no room
}

}  // namespace
}  // namespace sps::ops
