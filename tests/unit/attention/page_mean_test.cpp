#include "attention/page_mean.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace oscar::test {
namespace {

constexpr int kDim = 64, kPairs = 28;  // channels 56..63 do not turn

LayerRotation layer_with_mean() {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  LayerRotation layer;
  layer.rope = {.order = RopeOrder::kHalves, .rotary_dim = 2 * kPairs, .inv_freq = {}};
  for (int p = 0; p < kPairs; ++p) layer.rope.inv_freq.push_back(std::pow(1e5, -1.0 * p / kPairs));
  layer.heads.resize(1);
  for (int c = 0; c < kDim; ++c) layer.heads[0].page_mean.push_back(10 * normal(random));
  return layer;
}

std::vector<float> expected_mean(const LayerRotation& layer, std::int64_t block) {
  const std::vector<double>& mu = layer.heads[0].page_mean;
  std::vector<float> mean(mu.begin(), mu.end());
  for (std::size_t p = 0; p < kPairs; ++p) {
    const double angle = layer.rope.inv_freq[p] * static_cast<double>(64 * block);
    mean[p] = static_cast<float>(mu[p] * std::cos(angle) - mu[p + kPairs] * std::sin(angle));
    mean[p + kPairs] = static_cast<float>(mu[p + kPairs] * std::cos(angle) + mu[p] * std::sin(angle));
  }
  return mean;
}

// Two roundings to float of numbers below 50.
constexpr float kTolerance = 8e-6f;

TEST(BlockMeanCursor, SteppingTo131072PositionsStaysExact) {
  const LayerRotation layer = layer_with_mean();
  attention::BlockMeanCursor cursor(layer, layer.heads[0], kDim);
  ASSERT_TRUE(cursor.has_mean());
  std::vector<float> mean(kDim);
  for (std::int64_t block = 0; block <= 131072 / 64; ++block) {
    cursor.mean(block, mean.data());
    const std::vector<float> expected = expected_mean(layer, block);
    for (std::size_t c = 0; c < kDim; ++c)
      ASSERT_NEAR(mean[c], expected[c], kTolerance) << "block " << block << " channel " << c;
  }
}

TEST(BlockMeanCursor, JumpsAnywhere) {
  const LayerRotation layer = layer_with_mean();
  attention::BlockMeanCursor cursor(layer, layer.heads[0], kDim);
  std::vector<float> mean(kDim);
  for (const std::int64_t block : {5, 5, 6, 2047, 1, 0, 100, 101, 99}) {
    cursor.mean(block, mean.data());
    const std::vector<float> expected = expected_mean(layer, block);
    for (std::size_t c = 0; c < kDim; ++c)
      ASSERT_NEAR(mean[c], expected[c], kTolerance) << "block " << block << " channel " << c;
  }
}

TEST(BlockMeanCursor, AHeadWithoutMeanSaysSo) {
  LayerRotation layer = layer_with_mean();
  layer.heads[0].page_mean.clear();
  EXPECT_FALSE(attention::BlockMeanCursor(layer, layer.heads[0], kDim).has_mean());
}

}  // namespace
}  // namespace oscar::test
