#include "rotation/transform_check.hpp"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>

namespace oscar {
namespace {

Eigen::MatrixXd matrix(std::span<const float> values, int width) {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<const RowMajor>(values.data(), width, width).cast<double>();
}

}  // namespace

double residual(std::span<const float> a, std::span<const float> b, int width) {
  const Eigen::MatrixXd product = matrix(a, width) * matrix(b, width).transpose();
  const Eigen::MatrixXd difference = product - Eigen::MatrixXd::Identity(width, width);
  return difference.allFinite() ? difference.cwiseAbs().maxCoeff() : std::numeric_limits<double>::quiet_NaN();
}

double condition_number(std::span<const float> transform, int width) {
  const Eigen::MatrixXd a = matrix(transform, width);
  const Eigen::VectorXd squares =
      Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd>(a.transpose() * a, Eigen::EigenvaluesOnly).eigenvalues();
  return std::sqrt(squares(width - 1) / std::max(squares(0), std::numeric_limits<double>::min()));
}

}  // namespace oscar
