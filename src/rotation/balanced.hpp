#pragma once
// The balanced transform: rows become white, then every direction is stretched by a power of what its error costs, the
// mean goes to the all-ones axis (where the row's offset takes it up), and a Hadamard matrix spreads the rest.

#include <Eigen/Core>
#include <optional>
#include <oscar/rotation.hpp>

namespace oscar {

struct BalancedInput {
  Eigen::MatrixXd covariance;  // C [D, D] of the rows, centred
  Eigen::VectorXd mean;        // mu [D] of the rows
  Eigen::MatrixXd metric;      // S [D, D]: an error e of a row costs e S e^T
  double energy = 0;           // mean square of a channel as the 16-bit cache holds it, page mean included
  double beta = 0.25;          // exponent of the stretch: 1/4 is best without feedback, 1/8 with it
  double regularizer = 1e-3;   // added to C and S for the transform, share of their mean eigenvalue
  double damping = 0.05;       // added to the metric of the feedback, share of its mean eigenvalue
  bool with_feedback = false;  // also fill feedback and metric
};

// A = C^(-1/2) U diag(lambda^beta) P_mu H, where C^(1/2) S C^(1/2) = U diag(lambda) U^T; H = hadamard [D, D].
// M = A^(-1) S A^(-T) + damping tr / D I = (I + T) diag (I + T)^T, T strictly upper. All in double, rounded to float32.
// C may be singular or zero and S zero: then the transform is finite and invertible all the same.
// Empty when C or S is so far from positive semidefinite that no factor exists.
std::optional<SideRotation> balanced_transform(const BalancedInput& input, const Eigen::MatrixXd& hadamard);

}  // namespace oscar
