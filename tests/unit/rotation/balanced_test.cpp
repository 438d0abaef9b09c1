#include "rotation/balanced.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "rotation/hadamard.hpp"
#include "unit/rotation/matrices.hpp"

namespace oscar {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using test::largest;
using test::square;

// Elements are stored as float32 (relative 6e-8), and products of two such matrices are as good as their condition
// number, here at most a few hundred, allows.
constexpr double kFloatTolerance = 1e-4;

BalancedInput random_input(int width, unsigned seed, bool with_feedback) {
  std::mt19937 random(seed);
  BalancedInput input;
  input.covariance = test::random_moment(random, 8 * width, width);
  input.mean = 3 * test::gaussian_matrix(random, width, 1);
  input.metric = test::random_moment(random, 8 * width, width);
  input.energy = (input.covariance.trace() + input.mean.squaredNorm()) / width;
  input.beta = with_feedback ? 0.125 : 0.25;
  input.with_feedback = with_feedback;
  return input;
}

SideRotation fit(const BalancedInput& input) {
  const auto side = balanced_transform(input, hadamard(static_cast<int>(input.mean.size())).value());
  if (!side) throw std::runtime_error("no transform");
  return *side;
}

void expect_sound(const SideRotation& side, int width) {
  const MatrixXd transform = square(side.transform, width);
  const MatrixXd inverse_transposed = square(side.inverse_transposed, width);
  ASSERT_TRUE(transform.allFinite());
  ASSERT_TRUE(inverse_transposed.allFinite());
  EXPECT_LT(largest(transform * inverse_transposed.transpose() - test::identity(width)), kFloatTolerance);
  EXPECT_TRUE(std::isfinite(side.offset_center));
  EXPECT_GT(side.offset_spread, 0);
  if (side.metric.empty()) return;
  const MatrixXd factor = test::identity(width) + square(side.feedback, width);
  EXPECT_TRUE(factor.isUpperTriangular(0));
  const MatrixXd pivots = factor.inverse() * square(side.metric, width) * factor.inverse().transpose();
  const VectorXd diagonal = pivots.diagonal();
  EXPECT_GT(diagonal.minCoeff(), 0);
  EXPECT_LT(largest(pivots - MatrixXd(diagonal.asDiagonal())), kFloatTolerance * diagonal.maxCoeff());
}

TEST(BalancedTransform, EveryWidthGivesAnInverseAndAFactor) {
  for (const int width : {16, 48, 64, 80, 96, 112, 128, 144, 256}) {
    SCOPED_TRACE(width);
    for (const bool with_feedback : {false, true}) {
      const SideRotation side = fit(random_input(width, 21, with_feedback));
      expect_sound(side, width);
      EXPECT_EQ(side.feedback.empty(), !with_feedback);
      EXPECT_EQ(side.metric.empty(), !with_feedback);
    }
  }
}

TEST(BalancedTransform, PutsTheMeanOnTheAllOnesAxis) {
  for (const int width : {64, 80}) {
    const BalancedInput input = random_input(width, 22, false);
    const SideRotation side = fit(input);
    const VectorXd mean = square(side.transform, width).transpose() * input.mean;
    EXPECT_LT(largest(mean - VectorXd::Constant(width, mean.mean())), kFloatTolerance * std::abs(mean.mean()));
    EXPECT_GT(side.offset_center, 0);
    EXPECT_NEAR(side.offset_center, mean.mean(), kFloatTolerance * mean.mean());
  }
}

// In y = x A the covariance times the metric has the spectrum of C S, and before the mixing both are diagonal:
// lambda^(2 beta) and lambda^(1 - 2 beta). beta = 1/4 makes them equal: A^T C A = A^-1 S A^-T.
TEST(BalancedTransform, QuarterPowerBalancesSpreadAndCost) {
  BalancedInput input = random_input(32, 23, false);
  input.regularizer = 0;
  const SideRotation side = fit(input);
  const MatrixXd a = square(side.transform, 32);
  const MatrixXd spread = a.transpose() * input.covariance * a;
  const MatrixXd inverse = square(side.inverse_transposed, 32).transpose();
  const MatrixXd cost = inverse * input.metric * inverse.transpose();
  EXPECT_LT(largest(spread - cost), kFloatTolerance * largest(spread));
}

// A = C^(-1/2) U diag(lambda^beta) Q with Q orthogonal, so A A^T is free of every arbitrary sign and order.
TEST(BalancedTransform, IsTheFormulaWithTheSymmetricRoot) {
  const int width = 48;
  const BalancedInput input = random_input(width, 24, true);
  const MatrixXd c = input.covariance + 1e-3 * input.covariance.trace() / width * test::identity(width);
  const MatrixXd s = input.metric + 1e-3 * input.metric.trace() / width * test::identity(width);
  const Eigen::SelfAdjointEigenSolver<MatrixXd> c_solver(c);
  const MatrixXd root = c_solver.operatorSqrt();
  const MatrixXd inverse_root = c_solver.operatorInverseSqrt();
  const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(root * s * root);
  const MatrixXd stretch = solver.eigenvalues().array().pow(2 * 0.125).matrix().asDiagonal();
  const MatrixXd expected =
      inverse_root * solver.eigenvectors() * stretch * solver.eigenvectors().transpose() * inverse_root;
  const MatrixXd a = square(fit(input).transform, width);
  EXPECT_LT(largest(a * a.transpose() - expected), kFloatTolerance * largest(expected));
}

TEST(BalancedTransform, MetricIsDampedAndUnregularised) {
  const int width = 16;
  const BalancedInput input = random_input(width, 25, true);
  const SideRotation side = fit(input);
  const MatrixXd inverse = square(side.inverse_transposed, width).transpose();
  const MatrixXd plain = inverse * input.metric * inverse.transpose();
  const MatrixXd expected = plain + 0.05 * plain.trace() / width * test::identity(width);
  EXPECT_LT(largest(square(side.metric, width) - expected), kFloatTolerance * largest(expected));
}

TEST(BalancedTransform, SpreadIsThatOfTheRowsMean) {
  const int width = 64;
  const BalancedInput input = random_input(width, 26, true);
  const SideRotation side = fit(input);
  const MatrixXd a = square(side.transform, width);
  const VectorXd ones = VectorXd::Ones(width);
  const double expected = std::sqrt((ones.transpose() * a.transpose() * input.covariance * a * ones)(0)) / width;
  EXPECT_NEAR(side.offset_spread, expected, kFloatTolerance * expected);
}

TEST(BalancedTransform, DegenerateMomentsGiveSoundTransforms) {
  const int width = 32;
  const BalancedInput good = random_input(width, 27, true);
  std::mt19937 random(28);
  const MatrixXd rank_one = test::random_moment(random, 1, width);
  const auto check = [&](const char* name, const auto& change) {
    SCOPED_TRACE(name);
    BalancedInput input = good;
    change(input);
    expect_sound(fit(input), width);
  };
  check("zero mean", [](BalancedInput& i) { i.mean.setZero(); });
  check("mean already in place", [](BalancedInput& i) {
    i.mean.setZero();
    i.mean[0] = 1;
  });
  check("rank-deficient covariance", [&](BalancedInput& i) { i.covariance = rank_one; });
  check("rank-deficient metric", [&](BalancedInput& i) { i.metric = rank_one; });
  check("no metric", [](BalancedInput& i) { i.metric.setZero(); });
  check("constant rows", [](BalancedInput& i) { i.covariance.setZero(); });
  check("constant rows up to rounding", [](BalancedInput& i) { i.covariance = -1e-15 * i.covariance; });
  check("zero rows", [](BalancedInput& i) {
    i.covariance.setZero();
    i.mean.setZero();
    i.energy = 0;
  });
  check("all zero", [](BalancedInput& i) {
    i.covariance.setZero();
    i.mean.setZero();
    i.metric.setZero();
    i.energy = 0;
  });
  check("large rows", [](BalancedInput& i) {
    i.covariance *= 1e8;
    i.mean *= 1e4;
    i.energy *= 1e8;
  });
  check("small rows", [](BalancedInput& i) {
    i.covariance *= 1e-8;
    i.mean *= 1e-4;
    i.energy *= 1e-8;
  });
}

TEST(BalancedTransform, AnIndefiniteMomentHasNone) {
  BalancedInput input = random_input(16, 29, true);
  input.covariance(3, 3) = -1000;
  EXPECT_FALSE(balanced_transform(input, hadamard(16).value()));
}

}  // namespace
}  // namespace oscar
