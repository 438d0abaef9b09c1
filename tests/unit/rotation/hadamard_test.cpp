#include "rotation/hadamard.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "unit/rotation/matrices.hpp"

namespace oscar {
namespace {

constexpr double kTolerance = 1e-13;  // sums of at most 256 products of 1 / sqrt(width)

TEST(Hadamard, EveryHeadWidthButOneHasAnOrthonormalOne) {
  for (int width = 16; width <= 256; width += 16) {
    const auto matrix = hadamard(width);
    ASSERT_EQ(matrix.has_value(), width != 208) << width;
    if (!matrix) continue;
    const double entry = 1 / std::sqrt(width);
    EXPECT_LT(test::largest(*matrix * matrix->transpose() - test::identity(width)), kTolerance) << width;
    EXPECT_LT(test::largest(matrix->cwiseAbs() - Eigen::MatrixXd::Constant(width, width, entry)), kTolerance) << width;
    EXPECT_TRUE((matrix->row(0).array() > 0).all()) << width << ": first row";
    EXPECT_TRUE((matrix->col(0).array() > 0).all()) << width << ": first column";
  }
}

TEST(Hadamard, PowersOfTwoAreSylvesters) {
  const auto matrix = hadamard(4).value();
  Eigen::Matrix4d expected;
  expected << 1, 1, 1, 1, 1, -1, 1, -1, 1, 1, -1, -1, 1, -1, -1, 1;
  EXPECT_LT(test::largest(matrix - expected / 2), kTolerance);
  EXPECT_TRUE(is_power_of_two(128));
  EXPECT_FALSE(is_power_of_two(96));
  EXPECT_FALSE(is_power_of_two(0));
}

TEST(Hadamard, ImpossibleWidthsHaveNone) {
  for (const int width : {-4, 0, 3, 6, 10, 208}) EXPECT_FALSE(hadamard(width)) << width;
}

}  // namespace
}  // namespace oscar
