#include "tensor/tensor.h"
#include "base/error.h"

#include <gtest/gtest.h>

#include <vector>

namespace sps {
namespace {

TEST(DType, SizesAndNames) {
  EXPECT_EQ(dtype_size(DType::f64), 8u);
  EXPECT_EQ(dtype_size(DType::f32), 4u);
  EXPECT_EQ(dtype_size(DType::i32), 4u);
  EXPECT_EQ(dtype_size(DType::bf16), 2u);
  for (const DType d : {DType::f64, DType::f32, DType::bf16, DType::i32})
    EXPECT_EQ(dtype_from_name(dtype_name(d)), d);
}

TEST(DType, UnknownNameIsTheUsersMistake) {
  for (const char* name : {"", "float32", "F32", "bf16 "}) {
    try {
      dtype_from_name(name);
      FAIL() << "'" << name << "' was taken";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      EXPECT_NE(std::string(e.what()).find(fmt::format("'{}'", name)), std::string::npos) << e.what();
    }
  }
}

class TensorViews : public testing::Test {
 protected:
  TensorViews() {
    for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i] = float(i);
    t_ = view(numbers_.data(), 4, 6);
  }
  std::vector<float> numbers_ = std::vector<float>(24);
  Tensor t_;
};

TEST_F(TensorViews, View) {
  EXPECT_EQ(t_.dtype, DType::f32);
  EXPECT_EQ(t_.stride, 6);
  EXPECT_EQ(t_.count(), 24);
  EXPECT_TRUE(t_.dense());
  EXPECT_TRUE(bool(t_));
  EXPECT_EQ(t_.row<float>(2)[3], 15);
  const std::vector<double> constant(3);
  EXPECT_EQ(view(constant.data(), 1, 3).dtype, DType::f64);
}

TEST_F(TensorViews, RowsAndColumns) {
  const Tensor part = t_.rows_from(1, 2).cols_from(2, 3);
  EXPECT_EQ(part.rows, 2);
  EXPECT_EQ(part.cols, 3);
  EXPECT_EQ(part.stride, 6);
  EXPECT_FALSE(part.dense());
  EXPECT_EQ(part.row<float>(0)[0], 8);
  EXPECT_EQ(part.row<float>(1)[2], 16);
  EXPECT_TRUE(part.rows_from(0, 1).dense()) << "one row has no gaps";
  EXPECT_TRUE(t_.rows_from(4, 0).empty());
  EXPECT_TRUE(t_.cols_from(6, 0).empty());
}

TEST_F(TensorViews, OffsetsCountBytesOfTheType) {
  std::vector<bf16> halves(12);
  std::vector<double> doubles(12);
  EXPECT_EQ(view(halves.data(), 3, 4).rows_from(2, 1).cols_from(1, 1).as<bf16>(), halves.data() + 9);
  EXPECT_EQ(view(doubles.data(), 3, 4).rows_from(2, 1).cols_from(1, 1).as<double>(), doubles.data() + 9);
}

TEST_F(TensorViews, ReshapedAndRepeated) {
  const Tensor wide = t_.reshaped(2, 12);
  EXPECT_EQ(wide.row<float>(1)[0], 12);
  EXPECT_EQ(wide.stride, 12);
  const Tensor same = t_.rows_from(3, 1).repeated(5);
  EXPECT_EQ(same.rows, 5);
  for (int64_t r = 0; r < 5; ++r) EXPECT_EQ(same.row<float>(r), t_.row<float>(3));
}

// Planning arenas hand out tensors without memory; views of those have none either.
TEST(Tensor, ViewsOfNothingPointNowhere) {
  const Tensor t{nullptr, 10, 10, 10, DType::f32, Device::cpu};
  EXPECT_EQ(t.rows_from(3, 2).data, nullptr);
  EXPECT_EQ(t.cols_from(3, 2).data, nullptr);
  EXPECT_TRUE(Tensor{}.empty());
  EXPECT_FALSE(bool(Tensor{}));
}

TEST_F(TensorViews, OffsetsBeyondFourGigabytes) {
  const Tensor t{numbers_.data(),  int64_t{1} << 20, int64_t{1} << 14,
                 int64_t{1} << 14, DType::f32,       Device::cpu};
  const Tensor last = t.rows_from(t.rows - 1, 1);
  EXPECT_EQ(static_cast<std::byte*>(last.data) - reinterpret_cast<std::byte*>(numbers_.data()),
            ((int64_t{1} << 20) - 1) << 16);
}

using TensorDeathTest = TensorViews;

TEST_F(TensorDeathTest, ViewsOutsideAbort) {
  EXPECT_DEATH(t_.rows_from(3, 2), "internal error");
  EXPECT_DEATH(t_.rows_from(-1, 1), "internal error");
  EXPECT_DEATH(t_.cols_from(0, 7), "internal error");
  EXPECT_DEATH(t_.as<double>(), "internal error");
  EXPECT_DEATH(t_.reshaped(5, 5), "internal error");
  EXPECT_DEATH(t_.cols_from(0, 3).reshaped(2, 6), "internal error");
  EXPECT_DEATH(t_.repeated(2), "internal error");
}

}  // namespace
}  // namespace sps
