// The fit against vectors of an independent implementation, on moments of real models.

#include <gtest/gtest.h>

#include <cmath>

#include "rotation/balanced.hpp"
#include "rotation/hadamard.hpp"
#include "rotation/page_mean.hpp"
#include "rotation/published.hpp"
#include "support/golden.hpp"
#include "support/samples.hpp"
#include "unit/rotation/matrices.hpp"

namespace oscar {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using test::GoldenFile;
using test::largest;
using test::square;

constexpr int kWidth = 64;
constexpr double kDoubleTolerance = 1e-12;
// The golden A, T and M are float32 (6e-8 of an element); products of A add up 64 of them.
constexpr double kFloatTolerance = 5e-6;
// Sigma is stored in float32: an eigenvector errs by 6e-8 of the largest eigenvalue over its distance to the next one.
constexpr double kEigenTolerance = 2e-6;
constexpr double kVectorTolerance = 1e-3;

class Bp64Golden : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  GoldenFile file_{std::get<0>(GetParam())};
  MatrixXd matrix(const std::string& name) const { return square(file_.read<double>(side_ + name), kWidth); }
  VectorXd vector(const std::string& name) const { return test::vector(file_.read<double>(side_ + name)); }
  double scalar(const std::string& name) const { return file_.read<double>(side_ + name).at(0); }
  std::string side_ = std::get<1>(GetParam());
};

TEST_P(Bp64Golden, TheFitHasTheGoldenInvariants) {
  const BalancedInput input{
      .covariance = matrix("C"), .mean = vector("mean"), .metric = matrix("S"), .beta = 0.125, .with_feedback = true};
  const auto side = balanced_transform(input, hadamard(kWidth).value());
  ASSERT_TRUE(side);
  const MatrixXd a = square(side->transform, kWidth);
  const MatrixXd golden_a = matrix("A");

  // A is unique up to an orthogonal matrix on the right that fixes the all-ones axis.
  const MatrixXd gram = golden_a * golden_a.transpose();
  EXPECT_LT(largest(a * a.transpose() - gram), kFloatTolerance * largest(gram));
  const MatrixXd inverse_transposed = square(side->inverse_transposed, kWidth);
  const MatrixXd golden_inverse_transposed = matrix("A_inv_t");
  const MatrixXd inverse_gram = golden_inverse_transposed * golden_inverse_transposed.transpose();
  EXPECT_LT(largest(inverse_transposed * inverse_transposed.transpose() - inverse_gram),
            kFloatTolerance * largest(inverse_gram));
  const VectorXd ones = VectorXd::Ones(kWidth);
  EXPECT_LT(largest(a * ones - golden_a * ones), kFloatTolerance * largest(golden_a) * kWidth);
  const VectorXd mean = a.transpose() * input.mean;
  EXPECT_LT(largest(mean - VectorXd::Constant(kWidth, mean.mean())), kFloatTolerance * largest(mean) * kWidth);

  EXPECT_NEAR(side->offset_center, scalar("c0"), kFloatTolerance * std::abs(scalar("c0")) + kFloatTolerance);
  EXPECT_NEAR(side->offset_spread, scalar("sd"), kFloatTolerance * scalar("sd"));

  const VectorXd spectrum = (a.transpose() * input.covariance * a).selfadjointView<Eigen::Lower>().eigenvalues();
  const VectorXd golden_spectrum =
      (golden_a.transpose() * input.covariance * golden_a).selfadjointView<Eigen::Lower>().eigenvalues();
  EXPECT_LT(largest(spectrum - golden_spectrum), kFloatTolerance * largest(golden_spectrum));

  const VectorXd metric = square(side->metric, kWidth).selfadjointView<Eigen::Lower>().eigenvalues();
  const VectorXd golden_metric = matrix("M").selfadjointView<Eigen::Lower>().eigenvalues();
  EXPECT_LT(largest(metric - golden_metric), kFloatTolerance * largest(golden_metric));
}

// The factorisation alone has no freedom: the golden M gives the golden T, through the relation that defines both.
TEST_P(Bp64Golden, TheFeedbackFactorsTheMetricAsTheGoldenOneDoes) {
  const auto pivots = [](const MatrixXd& feedback, const MatrixXd& metric) -> MatrixXd {
    const MatrixXd inverse = (test::identity(kWidth) + feedback).inverse();
    return inverse * metric * inverse.transpose();
  };
  const auto off_diagonal = [](const MatrixXd& m) { return largest(m - MatrixXd(m.diagonal().asDiagonal())); };
  const MatrixXd golden = pivots(matrix("T"), matrix("M"));
  EXPECT_LT(off_diagonal(golden), kFloatTolerance * largest(golden));
  const BalancedInput input{
      .covariance = matrix("C"), .mean = vector("mean"), .metric = matrix("S"), .beta = 0.125, .with_feedback = true};
  const auto side = balanced_transform(input, hadamard(kWidth).value());
  ASSERT_TRUE(side);
  const MatrixXd ours = pivots(square(side->feedback, kWidth), square(side->metric, kWidth));
  EXPECT_LT(off_diagonal(ours), kFloatTolerance * largest(ours));
  // The product of the pivots is det M, whatever A's free rotation.
  EXPECT_NEAR(ours.diagonal().array().log().sum(), golden.diagonal().array().log().sum(), 1e-3);
}

TEST_P(Bp64Golden, TheCovarianceIsTheCentredMoment) {
  const VectorXd mean = vector("mean");
  const MatrixXd expected = matrix("moment") - mean * mean.transpose();
  EXPECT_LT(largest(matrix("C") - expected), kDoubleTolerance * largest(expected));
}

INSTANTIATE_TEST_SUITE_P(Layers, Bp64Golden,
                         testing::Combine(testing::Values("bp64_smollm2_layer0", "bp64_smollm2_layer15"),
                                          testing::Values("k.", "v.")));

class PageMeanGolden : public testing::TestWithParam<const char*> {};

TEST_P(PageMeanGolden, PageAndBlockMeansFollowFromThePreRopeMean) {
  const GoldenFile file(GetParam());
  RopeSpec rope;
  rope.order = RopeOrder::kHalves;
  rope.rotary_dim = kWidth;
  rope.inv_freq = file.read<double>("inv_freq");
  const VectorXd mu0 = page_mean(test::vector(file.read<double>("k.b")), rope);
  EXPECT_LT(largest(mu0 - test::vector(file.read<double>("k.mu0"))), kDoubleTolerance * largest(mu0));

  HeadRotation head;
  head.page_mean = file.read<double>("k.mu0");
  const auto starts = file.read<std::int32_t>("block_start");
  const auto golden = file.read<double>("k.block_mean");
  for (std::size_t block = 0; block < starts.size(); ++block) {
    for (const std::int64_t within : {0, 63}) {
      std::vector<float> mean(kWidth);
      block_mean(head, rope, kWidth, starts[block] + within, mean.data());
      for (std::size_t c = 0; c < kWidth; ++c) {
        // Angles of up to 8064 radians: two double evaluations differ by 1e-12, a float32 may round either way.
        const auto expected = static_cast<float>(golden[block * kWidth + c]);
        EXPECT_NEAR(mean[c], expected, std::abs(expected) * 1.2e-7F) << starts[block] << ", channel " << c;
      }
    }
  }
  const auto offsets = file.read<std::int32_t>("offsets");
  const auto ours = calibration_offsets(8192, 1536, 16);
  EXPECT_EQ(std::vector<std::int64_t>(offsets.begin(), offsets.end()), ours);
}

INSTANTIATE_TEST_SUITE_P(Layers, PageMeanGolden, testing::Values("bp64_smollm2_layer0", "bp64_smollm2_layer15"));

class PublishedGolden : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(PublishedGolden, RotationIsEigenvectorsHadamardPermutation) {
  const GoldenFile file(std::get<0>(GetParam()));
  const std::string side = std::get<1>(GetParam());
  const MatrixXd sigma = square(file.read<double>("sigma_" + side), kWidth);
  const VectorXd golden_values = test::vector(file.read<double>("eig_" + side));
  const MatrixXd golden = square(file.read<double>("rot_" + side), kWidth);
  const double top = golden_values[kWidth - 1];
  const MatrixXd undo = (hadamard(kWidth).value() * bit_reversal(golden_values)).transpose();
  const MatrixXd golden_vectors = golden * undo;
  const MatrixXd vectors = published_rotation(sigma) * undo;

  // Sigma = R diag(e) R^T, with the golden R and with ours.
  EXPECT_LT(largest(golden_vectors * golden_values.asDiagonal() * golden_vectors.transpose() - sigma),
            kEigenTolerance * top);
  EXPECT_LT(largest(vectors * golden_values.asDiagonal() * vectors.transpose() - sigma), kEigenTolerance * top);
  int num_compared = 0;
  for (int i = 0; i < kWidth; ++i) {
    const double below = i > 0 ? golden_values[i] - golden_values[i - 1] : top;
    const double above = i + 1 < kWidth ? golden_values[i + 1] - golden_values[i] : top;
    if (std::min(below, above) < 1e-3 * top) continue;  // not told apart well enough
    ++num_compared;
    EXPECT_NEAR(std::abs(vectors.col(i).dot(golden_vectors.col(i))), 1, kVectorTolerance) << "eigenvector " << i;
  }
  EXPECT_GE(num_compared, 5);
}

INSTANTIATE_TEST_SUITE_P(Layers, PublishedGolden,
                         testing::Combine(testing::Values("smollm2_layer0", "smollm2_layer15", "smollm2_layer29"),
                                          testing::Values("k", "v")));

}  // namespace
}  // namespace oscar
