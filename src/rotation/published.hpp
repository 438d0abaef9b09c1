#pragma once
// The published method's rotations (arXiv 2605.17757): eigenvectors R of a second moment, Hadamard H and the
// bit-reversal permutation P, composed in nine ways. Widths are powers of two. Rows are vectors: x' = x R ...

#include <Eigen/Core>

namespace oscar {

// Named as in the published rotation files.
enum class Composition { kPlain, kPbr, kBr, kBrH128, kRH, kHPbr, kHRPbr, kHPbrR, kRHPbr };

// P: column br(i) of x P is column s[i] of x, s = channels by falling eigenvalue, br = reversal of log2(D) bits.
Eigen::MatrixXd bit_reversal(const Eigen::VectorXd& eigenvalues);

// plain R, pbr P, br R P, br_h128 R P H, r_h R H, h_pbr H P, h_r_pbr H R P, h_pbr_r H P R, r_h_pbr R H P (the default).
Eigen::MatrixXd compose(Composition composition, const Eigen::MatrixXd& eigenvectors,
                        const Eigen::VectorXd& eigenvalues);

// r_h_pbr of the eigenvectors of a symmetric second moment [D, D], eigenvalues ascending.
Eigen::MatrixXd published_rotation(const Eigen::MatrixXd& moment);

}  // namespace oscar
