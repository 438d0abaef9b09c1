#pragma once
// Between the row-major vectors of the public types and Eigen.

#include <Eigen/Dense>
#include <random>
#include <vector>

namespace oscar::test {

template <typename T>
Eigen::MatrixXd square(const std::vector<T>& values, int width) {
  return Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(values.data(), width,
                                                                                             width)
      .template cast<double>();
}

template <typename T>
Eigen::VectorXd vector(const std::vector<T>& values) {
  return Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, 1>>(values.data(), static_cast<Eigen::Index>(values.size()))
      .template cast<double>();
}

inline std::vector<double> row_major(const Eigen::MatrixXd& matrix) {
  const Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> rows = matrix;
  return {rows.data(), rows.data() + rows.size()};
}

inline double largest(const Eigen::MatrixXd& matrix) { return matrix.cwiseAbs().maxCoeff(); }

inline Eigen::MatrixXd identity(int width) { return Eigen::MatrixXd::Identity(width, width); }

inline Eigen::MatrixXd gaussian_matrix(std::mt19937& random, int rows, int columns) {
  std::normal_distribution<double> normal;
  return Eigen::MatrixXd::NullaryExpr(rows, columns, [&] { return normal(random); });
}

// X^T X / n with channels of different scale; rank-deficient when num_rows < width.
inline Eigen::MatrixXd random_moment(std::mt19937& random, int num_rows, int width) {
  Eigen::MatrixXd rows = gaussian_matrix(random, num_rows, width);
  rows = rows * gaussian_matrix(random, width, 1).col(0).array().exp().matrix().asDiagonal();
  return rows.transpose() * rows / num_rows;
}

}  // namespace oscar::test
