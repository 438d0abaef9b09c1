// The encoder at other widths against the product's own at two bits, and errors that fall with bits.

#include "rivals/feedback.hpp"

#include <gtest/gtest.h>

#include <oscar/codec.hpp>

#include "reference/codec.hpp"
#include "support/rows.hpp"

namespace oscar::rivals {
namespace {

constexpr int kDim = 64;
constexpr int kRows = 400;

class FeedbackRowsTest : public ::testing::Test {
 protected:
  FeedbackRowsTest() {
    head_.key = head_.value = test::random_side(random_, kDim);
    rows_ = test::gaussian(random_, kRows * kDim, 0.1f, 1.3f);
  }

  FeedbackRows encoder(const FeedbackOptions& options) const {
    return FeedbackRows(head_, rope_, false, kDim, options, Isa::kScalar);
  }

  // Mean error of transformed rows in the side's metric.
  double metric_error(const std::vector<float>& read) const {
    double sum = 0;
    for (std::size_t i = 0; i < kRows; ++i) {
      const auto begin = static_cast<std::ptrdiff_t>(i * kDim);
      const std::vector<double> y(rows_.begin() + begin, rows_.begin() + begin + kDim);
      const std::vector<double> y_hat(read.begin() + begin, read.begin() + begin + kDim);
      sum += reference::metric_error(head_.key, y, y_hat);
    }
    return sum / kRows;
  }
  double error_of(const FeedbackOptions& options) const {
    std::vector<float> read = rows_;
    const FeedbackRows rows = encoder(options);
    for (std::size_t i = 0; i < kRows; ++i) rows.read_back_transformed(read.data() + i * kDim);
    return metric_error(read);
  }

  std::mt19937 random_{5};
  HeadRotation head_;
  RopeSpec rope_;
  std::vector<float> rows_;
};

TEST_F(FeedbackRowsTest, TwoBitsAreTheProductsCodec) {
  constexpr double kSumOrder = 1e-3;  // of the error: another order of sums turns a few ties
  constexpr double kShareEqual = 0.95;
  std::vector<std::uint8_t> codes(rows_.size());
  std::vector<RowParameters> parameters(kRows);
  std::vector<float> product(rows_.size()), read = rows_;
  encode_rows(head_.value, Quantizer::kFeedback, kDim, rows_.data(), kRows, codes.data(), parameters.data(),
              Isa::kScalar);
  decode_rows(head_.value, ParameterFormat::kLog8, kDim, codes.data(), parameters.data(), kRows, product.data());
  const FeedbackRows rows = encoder({});
  int equal = 0;
  for (std::size_t i = 0; i < kRows; ++i) {
    float* row = read.data() + i * kDim;
    rows.read_back_transformed(row);
    float largest = 0;
    for (std::size_t c = 0; c < kDim; ++c) largest = std::max(largest, std::abs(row[c] - product[i * kDim + c]));
    equal += largest < 1e-4f ? 1 : 0;
  }
  EXPECT_GT(equal, kShareEqual * kRows);
  EXPECT_NEAR(metric_error(read), metric_error(product), kSumOrder * metric_error(product));
}

TEST_F(FeedbackRowsTest, EveryBitMoreIsWorthAFactor) {
  // A Gaussian's own: .363, .119, .0374, .0115 of its variance for evenly spaced levels.
  const double one = error_of({.bits = 1}), two = error_of({.bits = 2}), three = error_of({.bits = 3}),
               four = error_of({.bits = 4});
  EXPECT_GT(one, 2 * two);
  EXPECT_GT(two, 2.5 * three);
  EXPECT_GT(three, 2.5 * four);
}

TEST_F(FeedbackRowsTest, WithoutAZeroPointARowAboutZeroIsReadAlike) {
  for (float& value : rows_) value -= 0.1f;
  EXPECT_LT(error_of({.zero_point = false}), 1.1 * error_of({}));
  // and a row far from zero is not
  for (float& value : rows_) value += 2;
  head_.key.offset_center = head_.value.offset_center = 2;
  EXPECT_GT(error_of({.zero_point = false}), 2 * error_of({}));
}

TEST_F(FeedbackRowsTest, CountsItsBits) {
  EXPECT_DOUBLE_EQ(encoder({}).bits_per_element(), 2.25);
  EXPECT_DOUBLE_EQ(encoder({.bits = 3}).bits_per_element(), 3.25);
  EXPECT_DOUBLE_EQ(encoder({.zero_point = false}).bits_per_element(), 2.125);
}

}  // namespace
}  // namespace oscar::rivals
