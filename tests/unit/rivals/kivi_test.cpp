// KIVI's grouping, its half-precision ends, and the property that gives it its name: a constant channel costs nothing.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "rivals/half.hpp"
#include "rivals/kivi.hpp"
#include "support/rows.hpp"

namespace oscar::rivals {
namespace {

constexpr int kDim = 64;
constexpr int kRows = 96;  // three groups of tokens

TEST(Half, RoundsToTheNearestEvenHalf) {
  EXPECT_EQ(round_to_half(1.0f + 0x1p-11f), 1.0f);                     // a tie, to even
  EXPECT_EQ(round_to_half(1.0f + 3 * 0x1p-11f), 1.0f + 2 * 0x1p-10f);  // a tie, to even again
  EXPECT_EQ(round_to_half(-0.1f), -0.0999755859375f);
  EXPECT_EQ(round_to_half(0x1.8p-24f), 0x1p-23f);  // subnormal, a tie
  EXPECT_EQ(round_to_half(1e-9f), 0.0f);
  EXPECT_EQ(round_to_half(1e6f), 65504.0f);
}

TEST(Kivi, ConstantChannelsAreReadBackExactly) {
  // Channels that differ by orders of magnitude: one scale a row would lose the small ones.
  std::mt19937 random(1);
  std::vector<float> channel = test::gaussian(random, kDim, 0, 30);
  for (float& value : channel) value = round_to_half(value);
  std::vector<float> rows;
  for (int i = 0; i < kRows; ++i) rows.insert(rows.end(), channel.begin(), channel.end());
  const std::vector<float> expected = rows;
  KiviKeys(kDim).read_back(0, kRows, rows.data());
  EXPECT_EQ(rows, expected);
}

TEST(Kivi, ValuesOfOneNumberATokenAndGroupAreReadBackExactly) {
  std::vector<float> rows;
  for (int i = 0; i < kRows; ++i) rows.insert(rows.end(), kDim, static_cast<float>(i) / 4);
  const std::vector<float> expected = rows;
  KiviValues(kDim).read_back(0, kRows, rows.data());
  EXPECT_EQ(rows, expected);
}

TEST(Kivi, AKeyIsOffByHalfAStepOfItsChannelsGroupAtMost) {
  constexpr double kHalfRounding = 1e-2;  // of the range: both ends are halves
  std::mt19937 random(2);
  const std::vector<float> exact = test::gaussian(random, kRows * kDim, 3, 2);
  std::vector<float> rows = exact;
  KiviKeys(kDim).read_back(0, kRows, rows.data());
  for (int group = 0; group < kRows; group += kKiviGroup) {
    for (int c = 0; c < kDim; ++c) {
      float low = INFINITY, high = -INFINITY;
      for (int i = group; i < group + kKiviGroup; ++i) {
        low = std::min(low, exact[static_cast<std::size_t>(i * kDim + c)]);
        high = std::max(high, exact[static_cast<std::size_t>(i * kDim + c)]);
      }
      for (int i = group; i < group + kKiviGroup; ++i) {
        const auto at = static_cast<std::size_t>(i * kDim + c);
        ASSERT_LE(std::abs(rows[at] - exact[at]), (high - low) * (1.0 / 6 + kHalfRounding)) << i << ", " << c;
      }
    }
  }
}

TEST(Kivi, CountsCodesAndBothEndsOfEveryGroup) {
  EXPECT_DOUBLE_EQ(KiviKeys(kDim).bits_per_element(), 3);
  EXPECT_DOUBLE_EQ(KiviValues(kDim).bits_per_element(), 3);
  EXPECT_DOUBLE_EQ(KiviValues(48).bits_per_element(), 2 + 32.0 / 24);  // two groups of 48 channels
}

}  // namespace
}  // namespace oscar::rivals
