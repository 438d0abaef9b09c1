#include "rotation/page_mean.hpp"

#include <gtest/gtest.h>

#include <oscar/rotation.hpp>

#include "support/samples.hpp"
#include "unit/rotation/matrices.hpp"

namespace oscar {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using test::largest;
using test::random_samples;
using test::rope_of;
using test::Samples;

constexpr double kTolerance = 1e-10;  // sums of a few thousand rows, and angles to 30000, in double

VectorXd moved(const RopeSpec& rope, const VectorXd& row, double by) {
  return test::vector(test::turned(rope, {row.data(), row.data() + row.size()}, by));
}

TEST(CalibrationOffsets, AreMultiplesOf64SpreadEvenlyToTheEnd) {
  const std::vector<std::int64_t> offsets = calibration_offsets(8192, 1536, 16);
  ASSERT_EQ(offsets.size(), 16U);
  EXPECT_EQ(offsets.front(), 0);
  EXPECT_EQ(offsets[1], 64 * (104 / 15));
  EXPECT_EQ(offsets.back(), 8192 - 1536);
  EXPECT_EQ(calibration_offsets(8192, 1536, 1), std::vector<std::int64_t>{0});
  EXPECT_EQ(calibration_offsets(1536, 1536, 16), std::vector<std::int64_t>{0});
  EXPECT_EQ(calibration_offsets(100, 1536, 16), std::vector<std::int64_t>{0});
}

// Every mean and moment from the rows themselves: taken back, residual formed, moved to every offset, then averaged.
TEST(PageMean, ClosedFormEqualsTheSumsOverRows) {
  for (const int rotary_dim : {32, 16, 0}) {  // full, partial, none
    SCOPED_TRACE(testing::Message() << "rotary_dim " << rotary_dim);
    const RopeSpec rope = rope_of(rotary_dim);
    const Samples samples = random_samples(5, 300, 2, 1, 32, rope);
    LayerStatistics layer;
    ASSERT_TRUE(accumulate(layer, samples.block()));
    const HeadStatistics& head = layer.heads[0];
    const std::vector<std::int64_t> offsets = calibration_offsets(30000, 320, 16);

    const auto key = [&](int t) -> VectorXd {
      return Eigen::Map<const Eigen::VectorXf>(samples.k.data() + t * 32, 32).cast<double>();
    };
    VectorXd b = VectorXd::Zero(32);
    for (int t = 64; t < 300; ++t) b += moved(rope, key(t), -t) / (300 - 64);
    VectorXd mu0 = VectorXd::Zero(32);
    for (int t = 0; t < 64; ++t) mu0 += moved(rope, b, t) / 64;
    VectorXd mean = VectorXd::Zero(32);
    MatrixXd moment = MatrixXd::Zero(32, 32);
    for (const std::int64_t offset : offsets) {
      for (int t = 64; t < 300; ++t) {
        const VectorXd residual = moved(rope, key(t) - moved(rope, mu0, t / 64 * 64), static_cast<double>(offset));
        const double share = 1.0 / (300 - 64) / static_cast<double>(offsets.size());
        mean += share * residual;
        moment += share * residual * residual.transpose();
      }
    }

    EXPECT_LT(largest(pre_rope_mean(head) - b), kTolerance);
    EXPECT_LT(largest(page_mean(b, rope) - mu0), kTolerance);
    const Moments got = average_over_offsets(residual_moments(head, rope, page_mean(b, rope)), rope, offsets);
    EXPECT_LT(largest(got.mean - mean), kTolerance);
    EXPECT_LT(largest(got.moment - moment), kTolerance * largest(moment));
  }
}

TEST(BlockMean, IsThePageMeanTurnedToTheStartOfTheBlock) {
  const RopeSpec rope = rope_of(16);  // of 32 channels
  HeadRotation head;
  for (int c = 0; c < 32; ++c) head.page_mean.push_back(0.5 + c);
  for (const std::int64_t position : {0, 63, 64, 8127}) {
    std::vector<float> got(32);
    block_mean(head, rope, 32, position, got.data());
    const std::vector<double> expected = test::turned(rope, head.page_mean, static_cast<double>(position / 64 * 64));
    for (std::size_t c = 0; c < 32; ++c) EXPECT_EQ(got[c], static_cast<float>(expected[c])) << position << ", " << c;
  }
}

TEST(BlockMean, IsZeroWithoutAPageMean) {
  std::vector<float> got(32, 7);
  block_mean(HeadRotation{}, rope_of(32), 32, 1000, got.data());
  EXPECT_EQ(got, std::vector<float>(32, 0));
}

}  // namespace
}  // namespace oscar
