#include "rotation/published.hpp"

#include <gtest/gtest.h>

#include "rotation/hadamard.hpp"
#include "unit/rotation/matrices.hpp"

namespace oscar {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using test::largest;

constexpr double kTolerance = 1e-12;

// Column j of x P is column perm[j] of x.
std::vector<int> permutation_of(const MatrixXd& matrix) {
  std::vector<int> perm;
  for (Eigen::Index j = 0; j < matrix.cols(); ++j) {
    Eigen::Index row = 0;
    EXPECT_EQ(matrix.col(j).sum(), 1);
    EXPECT_EQ(matrix.col(j).maxCoeff(&row), 1);
    perm.push_back(static_cast<int>(row));
  }
  return perm;
}

TEST(BitReversal, OfAscendingEigenvaluesIsAConstantOfTheWidth) {
  EXPECT_EQ(permutation_of(bit_reversal(VectorXd::LinSpaced(8, 1, 8))), (std::vector<int>{7, 3, 5, 1, 6, 2, 4, 0}));
  EXPECT_EQ(permutation_of(bit_reversal(VectorXd::LinSpaced(16, 0.1, 3))),
            (std::vector<int>{15, 7, 11, 3, 13, 5, 9, 1, 14, 6, 10, 2, 12, 4, 8, 0}));
}

TEST(BitReversal, FollowsTheOrderOfTheEigenvalues) {
  VectorXd eigenvalues(4);
  eigenvalues << 3, 9, 1, 5;  // falling: 1, 3, 0, 2; reversed indices of 0..3: 0, 2, 1, 3
  EXPECT_EQ(permutation_of(bit_reversal(eigenvalues)), (std::vector<int>{1, 0, 3, 2}));
}

TEST(Compose, EveryCompositionIsTheProductOfItsName) {
  std::mt19937 random(3);
  const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(test::random_moment(random, 64, 16));
  const MatrixXd& r = solver.eigenvectors();
  const VectorXd& e = solver.eigenvalues();
  const MatrixXd h = hadamard(16).value();
  const MatrixXd p = bit_reversal(e);
  const struct {
    Composition composition;
    MatrixXd expected;
  } cases[] = {
      {Composition::kPlain, r},          {Composition::kPbr, p},           {Composition::kBr, r * p},
      {Composition::kBrH128, r * p * h}, {Composition::kRH, r * h},        {Composition::kHPbr, h * p},
      {Composition::kHRPbr, h * r * p},  {Composition::kHPbrR, h * p * r}, {Composition::kRHPbr, r * h * p},
  };
  for (const auto& each : cases) {
    const MatrixXd got = compose(each.composition, r, e);
    EXPECT_LT(largest(got - each.expected), kTolerance) << static_cast<int>(each.composition);
    EXPECT_LT(largest(got * got.transpose() - test::identity(16)), kTolerance) << static_cast<int>(each.composition);
  }
}

TEST(PublishedRotation, SpreadsTheSpectrumEvenly) {
  std::mt19937 random(4);
  const MatrixXd moment = test::random_moment(random, 400, 64);
  const MatrixXd rotation = published_rotation(moment);
  const VectorXd energies = (rotation.transpose() * moment * rotation).diagonal();
  const double mean = moment.trace() / 64;
  EXPECT_LT(largest(energies - VectorXd::Constant(64, mean)), kTolerance * mean * 64);
}

}  // namespace
}  // namespace oscar
