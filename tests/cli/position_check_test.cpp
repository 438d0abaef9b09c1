// The check after calibration: flat for a sound fit, uneven for one whose keys turn otherwise than the model's.

#include "position_check.hpp"

#include <gtest/gtest.h>

#include "support/statistics.hpp"

namespace oscar::tool {
namespace {

class PositionCheckTest : public ::testing::Test {
 protected:
  PositionCheckTest() {
    model_.num_tokens = 600;
    FitOptions options;
    options.max_context = kMaxContext;
    set_ = *fit_rotation(test::statistics_of(model_), options);
  }
  PositionReport check(const RotationSet& set) const {
    PositionCheck check(set, model_.num_tokens, serial_executor());
    for (int layer = 0; layer < model_.num_layers; ++layer) {
      const test::Samples samples = test::samples_of(model_, layer);
      SampleBlock block = samples.block();
      block.layer = layer;
      EXPECT_TRUE(check.add(block).has_value());
    }
    return check.report();
  }

  static constexpr std::int64_t kMaxContext = 4096;
  test::SmallModel model_;
  std::shared_ptr<const RotationSet> set_;
};

TEST_F(PositionCheckTest, AFitOverAllPositionsIsFlat) {
  const PositionReport report = check(*set_);
  ASSERT_EQ(report.places.size(), 8U);
  EXPECT_EQ(report.places.front().position, 0);
  EXPECT_LE(report.places.back().position, kMaxContext - model_.num_tokens);
  for (const auto& place : report.places) {
    EXPECT_EQ(place.position % 64, 0);
    EXPECT_GT(place.error, 0);
  }
  EXPECT_LT(report.unevenness, PositionReport::kFlat);
}

TEST_F(PositionCheckTest, AMeanThatTurnsOtherwiseThanTheKeysIsFound) {
  RotationSet wrong = *set_;
  // A scaling of RoPE that the fit did not know of: nothing changes at position 0.
  for (auto& [index, layer] : wrong.layers) {
    for (double& frequency : layer.rope.inv_freq) frequency *= 1.5;
  }
  EXPECT_GT(check(wrong).unevenness, PositionReport::kFlat);
}

TEST_F(PositionCheckTest, AContextOfOneTextHasOnePlaceAndIsFlat) {
  RotationSet short_set = *set_;
  short_set.max_context = 100;
  const PositionReport report = check(short_set);
  EXPECT_EQ(report.places.size(), 1U);
  EXPECT_EQ(report.unevenness, 0);
}

TEST_F(PositionCheckTest, ALayerThatKeepsItsCacheIsPassedOver) {
  RotationSet one = *set_;
  one.layers.erase(1);
  EXPECT_GT(check(one).places.front().error, 0);
}

}  // namespace
}  // namespace oscar::tool
