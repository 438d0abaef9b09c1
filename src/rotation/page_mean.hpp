#pragma once
// The page mean of keys and the moments of what is left of them, in closed form from the statistics.
// Notation: R_p turns a row by p positions; block B holds positions 64 B .. 64 B + 63; mu0 is the mean key of block 0.

#include <Eigen/Core>
#include <cstdint>
#include <oscar/covariance.hpp>
#include <vector>

namespace oscar {

// b [D]: mean of the keys taken back to position 0.
Eigen::VectorXd pre_rope_mean(const HeadStatistics& head);

// mu0 [D]: mean over t < 64 of b R_t.
Eigen::VectorXd page_mean(const Eigen::VectorXd& pre_rope_mean, const RopeSpec& rope);

// Positions by which the statistics of a text are moved: `count` multiples of 64, spread evenly from 0 to
// max_context - length, where `length` is that of the text. Only 0 when max_context does not exceed it.
std::vector<std::int64_t> calibration_offsets(std::int64_t max_context, std::int64_t length, int count);

// Mean [D] and uncentred second moment [D, D] of r_j = k_j - mu0 R_{64 floor(j / 64)} over the text's own positions.
struct Moments {
  Eigen::VectorXd mean;
  Eigen::MatrixXd moment;
};
Moments residual_moments(const HeadStatistics& head, const RopeSpec& rope, const Eigen::VectorXd& page_mean);

// The same sums had the text stood `offset` further on, averaged over the offsets: mean of m R_o and of R_o^T E R_o.
Moments average_over_offsets(const Moments& moments, const RopeSpec& rope, const std::vector<std::int64_t>& offsets);

}  // namespace oscar
