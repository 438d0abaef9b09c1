#include "rotation/balanced.hpp"

#include <Eigen/Cholesky>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>

namespace oscar {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using RowMajorF = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Rows reach the 16-bit cache with a relative rounding error of variance (2^-8)^2 / 12 = 1.3e-6: a covariance below
// this share of the energy is noise.
constexpr double kNoiseShare = 1e-6;
constexpr double kLeastRegularizer = 1e-9;  // keeps Cholesky defined for a singular C
constexpr double kLeastEigenvalue = 1e-12;  // of the largest
constexpr double kLeastSpread = 1e-12;      // variance of a row's mean, share of the mean variance of a channel

double mean_eigenvalue(const MatrixXd& matrix) { return matrix.trace() / static_cast<double>(matrix.rows()); }

MatrixXd plus_identity(const MatrixXd& matrix, double value) {
  return matrix + value * MatrixXd::Identity(matrix.rows(), matrix.cols());
}

// A covariance that is mere noise, or zero, becomes that of white noise; any other stays as it is.
MatrixXd above_noise(const MatrixXd& covariance, double energy, double regularizer) {
  const double noise = kNoiseShare * energy;
  const double mean = mean_eigenvalue(covariance);
  if (noise > regularizer * mean) return plus_identity(covariance, noise);
  return mean == 0 ? MatrixXd::Identity(covariance.rows(), covariance.cols()) : covariance;
}

// The Householder reflection, or its negative, that takes the unit row u to +e_0. Of the two reflections in question
// the one whose vector does not cancel.
MatrixXd reflection_to_first(const VectorXd& unit) {
  const double sign = unit[0] < 0 ? -1 : 1;
  VectorXd normal = unit;
  normal[0] += sign;
  const MatrixXd reflection = MatrixXd::Identity(unit.size(), unit.size()) -
                              2 / normal.squaredNorm() * normal * normal.transpose();  // u -> -sign e_0
  return -sign * reflection;
}

std::vector<float> rounded(const MatrixXd& matrix) {
  const RowMajorF values = matrix.cast<float>();
  return {values.data(), values.data() + values.size()};
}

// T of M = (I + T) diag (I + T)^T: the Cholesky factor of M read from its last row and column on.
std::optional<MatrixXd> feedback_of(const MatrixXd& metric) {
  const Eigen::LLT<MatrixXd> reversed(metric.reverse());
  if (reversed.info() != Eigen::Success) return std::nullopt;
  const MatrixXd factor = MatrixXd(reversed.matrixL()).reverse();
  const MatrixXd unit_factor = factor * factor.diagonal().cwiseInverse().asDiagonal();
  return unit_factor.triangularView<Eigen::StrictlyUpper>();
}

}  // namespace

std::optional<SideRotation> balanced_transform(const BalancedInput& input, const MatrixXd& hadamard) {
  const auto width = static_cast<double>(input.mean.size());
  const double regularizer = std::max(input.regularizer, kLeastRegularizer);
  const MatrixXd covariance = above_noise(input.covariance, input.energy, regularizer);
  const bool has_metric = input.metric.trace() > 0;
  const MatrixXd metric = has_metric ? input.metric : MatrixXd::Identity(hadamard.rows(), hadamard.cols());

  // With C = L L^T the symmetric root is L times an orthogonal matrix, which U absorbs: L serves as well as C^(1/2).
  const Eigen::LLT<MatrixXd> cholesky(plus_identity(covariance, regularizer * mean_eigenvalue(covariance)));
  if (cholesky.info() != Eigen::Success) return std::nullopt;
  const MatrixXd factor = cholesky.matrixL();
  const MatrixXd cost = factor.transpose() * plus_identity(metric, regularizer * mean_eigenvalue(metric)) * factor;
  const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(cost);
  if (solver.info() != Eigen::Success) return std::nullopt;
  const VectorXd eigenvalues = solver.eigenvalues().reverse();  // falling
  const MatrixXd directions = solver.eigenvectors().rowwise().reverse();
  const VectorXd stretch = eigenvalues.cwiseMax(kLeastEigenvalue * eigenvalues[0]).array().pow(input.beta);

  MatrixXd transform = cholesky.matrixU().solve(directions * stretch.asDiagonal());
  MatrixXd inverse = stretch.cwiseInverse().asDiagonal() * (directions.transpose() * factor.transpose());
  const VectorXd mean = transform.transpose() * input.mean;
  MatrixXd mix = hadamard;
  if (mean.norm() > 0) mix = reflection_to_first(mean / mean.norm()) * hadamard;
  transform *= mix;
  inverse = mix.transpose() * inverse;

  SideRotation side;
  side.transform = rounded(transform);
  side.inverse_transposed = rounded(inverse.transpose());
  const VectorXd mean_weights = transform.rowwise().mean();  // x . mean_weights is the mean of y = x A
  side.offset_center = static_cast<float>(input.mean.dot(mean_weights));
  const double channel_variance = (covariance * transform).cwiseProduct(transform).sum() / width;
  const double offset_variance = mean_weights.dot(covariance * mean_weights);
  side.offset_spread = static_cast<float>(std::sqrt(std::max(offset_variance, kLeastSpread * channel_variance)));
  if (!input.with_feedback) return side;

  MatrixXd error_metric = inverse * metric * inverse.transpose();
  error_metric =
      plus_identity((error_metric + error_metric.transpose()) / 2, input.damping * mean_eigenvalue(error_metric));
  const std::optional<MatrixXd> feedback = feedback_of(error_metric);
  if (!feedback) return std::nullopt;
  side.metric = rounded(error_metric);
  side.feedback = rounded(*feedback);
  return side;
}

}  // namespace oscar
