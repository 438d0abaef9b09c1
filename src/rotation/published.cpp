#include "rotation/published.hpp"

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "rotation/hadamard.hpp"

namespace oscar {

Eigen::MatrixXd bit_reversal(const Eigen::VectorXd& eigenvalues) {
  const auto width = static_cast<int>(eigenvalues.size());
  std::vector<int> order(static_cast<std::size_t>(width));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return eigenvalues[a] > eigenvalues[b]; });
  const int num_bits = std::countr_zero(static_cast<unsigned>(width));
  Eigen::MatrixXd permutation = Eigen::MatrixXd::Zero(width, width);
  for (int i = 0; i < width; ++i) {
    int reversed = 0;
    for (int bit = 0; bit < num_bits; ++bit) reversed |= (i >> bit & 1) << (num_bits - 1 - bit);
    permutation(order[static_cast<std::size_t>(i)], reversed) = 1;
  }
  return permutation;
}

Eigen::MatrixXd compose(Composition composition, const Eigen::MatrixXd& eigenvectors,
                        const Eigen::VectorXd& eigenvalues) {
  const Eigen::MatrixXd& r = eigenvectors;
  const Eigen::MatrixXd p = bit_reversal(eigenvalues);
  const Eigen::MatrixXd h = hadamard(static_cast<int>(eigenvalues.size())).value();
  switch (composition) {
    case Composition::kPlain: return r;
    case Composition::kPbr: return p;
    case Composition::kBr: return r * p;
    case Composition::kBrH128: return r * p * h;
    case Composition::kRH: return r * h;
    case Composition::kHPbr: return h * p;
    case Composition::kHRPbr: return h * r * p;
    case Composition::kHPbrR: return h * p * r;
    case Composition::kRHPbr: break;
  }
  return r * h * p;
}

Eigen::MatrixXd published_rotation(const Eigen::MatrixXd& moment) {
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver((moment + moment.transpose()) / 2);
  return compose(Composition::kRHPbr, solver.eigenvectors(), solver.eigenvalues());
}

}  // namespace oscar
