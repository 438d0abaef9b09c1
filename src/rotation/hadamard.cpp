#include "rotation/hadamard.hpp"

#include <bit>
#include <cmath>
#include <unsupported/Eigen/KroneckerProduct>

namespace oscar {
namespace {

using Eigen::MatrixXd;

bool is_prime(int number) {
  for (int divisor = 2; divisor * divisor <= number; ++divisor) {
    if (number % divisor == 0) return false;
  }
  return number > 1;
}

// Q[i, j] = Legendre symbol of i - j modulo the prime q: +1 for squares, -1 for the others, 0 on the diagonal.
MatrixXd jacobsthal(int q) {
  Eigen::VectorXd symbol = Eigen::VectorXd::Constant(q, -1);
  symbol[0] = 0;
  for (int root = 1; root < q; ++root) symbol[root * root % q] = 1;
  MatrixXd matrix(q, q);
  for (int i = 0; i < q; ++i) {
    for (int j = 0; j < q; ++j) matrix(i, j) = symbol[(i - j + q) % q];
  }
  return matrix;
}

// Q with a border: first row 1, first column `left`, 0 in the corner.
MatrixXd bordered(int q, double left) {
  MatrixXd matrix = MatrixXd::Zero(q + 1, q + 1);
  matrix.row(0).tail(q).setOnes();
  matrix.col(0).tail(q).setConstant(left);
  matrix.bottomRightCorner(q, q) = jacobsthal(q);
  return matrix;
}

// Entries +-1. First construction: order q + 1, q = 3 mod 4. Second: order 2 (q + 1), q = 1 mod 4. q prime.
std::optional<MatrixXd> paley(int order) {
  const int first = order - 1;
  if (first % 4 == 3 && is_prime(first)) return bordered(first, -1) + MatrixXd::Identity(order, order);
  const int second = order / 2 - 1;
  if (order % 2 == 0 && second % 4 == 1 && is_prime(second)) {
    const Eigen::Matrix2d off_diagonal{{1, 1}, {1, -1}};
    const Eigen::Matrix2d diagonal{{1, -1}, {-1, -1}};
    MatrixXd matrix = Eigen::kroneckerProduct(bordered(second, 1), off_diagonal);
    matrix += Eigen::kroneckerProduct(MatrixXd::Identity(order / 2, order / 2), diagonal);
    return matrix;
  }
  return std::nullopt;
}

}  // namespace

bool is_power_of_two(int width) { return width > 0 && std::has_single_bit(static_cast<unsigned>(width)); }

std::optional<MatrixXd> hadamard(int width) {
  if (width < 1) return std::nullopt;
  MatrixXd matrix = MatrixXd::Ones(1, 1);
  if (!is_power_of_two(width)) {
    const int order = 4 * (width >> std::countr_zero(static_cast<unsigned>(width)));  // 4 x the odd part
    const std::optional<MatrixXd> base = width % order == 0 ? paley(order) : std::nullopt;
    if (!base) return std::nullopt;
    // Signs of columns and rows are free; these make the first row and column positive.
    matrix = *base * base->row(0).asDiagonal();
    matrix = matrix.col(0).eval().asDiagonal() * matrix;
  }
  const Eigen::Matrix2d doubling{{1, 1}, {1, -1}};
  while (matrix.rows() < width) matrix = Eigen::kroneckerProduct(doubling, matrix).eval();
  return matrix / std::sqrt(width);
}

}  // namespace oscar
