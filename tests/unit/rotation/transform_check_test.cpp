#include "rotation/transform_check.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace oscar {
namespace {

TEST(TransformCheck, TheResidualIsTheLargestElementOffTheIdentity) {
  const std::vector<float> turn{0, 1, -1, 0};
  EXPECT_EQ(residual(turn, turn, 2), 0);
  const std::vector<float> stretched{2, 0, 0, 1};
  EXPECT_EQ(residual(stretched, stretched, 2), 3);  // 2 * 2 - 1
  const std::vector<float> inverse{0.5F, 0, 0, 1};
  EXPECT_EQ(residual(stretched, inverse, 2), 0);
  const std::vector<float> sheared{1, 0.25F, 0, 1};
  EXPECT_EQ(residual(sheared, std::vector<float>{1, 0, 0, 1}, 2), 0.25);
}

TEST(TransformCheck, NotANumberIsNeverWithinALimit) {
  const std::vector<float> broken{1, std::numeric_limits<float>::quiet_NaN(), 0, 1};
  EXPECT_TRUE(std::isnan(residual(broken, broken, 2)));
}

TEST(TransformCheck, TheConditionIsTheRatioOfSingularValues) {
  EXPECT_DOUBLE_EQ(condition_number(std::vector<float>{0, 8, -2, 0}, 2), 4);
  EXPECT_GT(condition_number(std::vector<float>{1, 1, 1, 1}, 2), 1e6);
}

}  // namespace
}  // namespace oscar
