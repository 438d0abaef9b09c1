#include "rotation/page_mean.hpp"

#include <cmath>
#include <oscar/rotation.hpp>

#include "covariance/rope_turn.hpp"

namespace oscar {
namespace {

using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::MatrixXd square(const std::vector<double>& values, int width) {
  return Eigen::Map<const RowMajor>(values.data(), width, width);
}

}  // namespace

Eigen::VectorXd pre_rope_mean(const HeadStatistics& head) {
  return Eigen::Map<const Eigen::VectorXd>(head.pre_rope_key_sum.data(), head.head_dim) / head.num_keys;
}

Eigen::VectorXd page_mean(const Eigen::VectorXd& pre_rope_mean, const RopeSpec& rope) {
  RopeTurn turn(rope);
  Eigen::VectorXd sum = Eigen::VectorXd::Zero(pre_rope_mean.size());
  for (int t = 0; t < kBlockTokens; ++t) {
    Eigen::VectorXd row = pre_rope_mean;
    turn.set_position(t);
    turn.turn(row.data());
    sum += row;
  }
  return sum / kBlockTokens;
}

std::vector<std::int64_t> calibration_offsets(std::int64_t max_context, std::int64_t length, int count) {
  const std::int64_t steps = (max_context - length) / kBlockTokens;
  if (steps <= 0 || count <= 1) return {0};
  std::vector<std::int64_t> offsets;
  for (int i = 0; i < count; ++i) offsets.push_back(kBlockTokens * (steps * i / (count - 1)));
  return offsets;
}

Moments residual_moments(const HeadStatistics& head, const RopeSpec& rope, const Eigen::VectorXd& page_mean) {
  const int width = head.head_dim;
  Moments moments{Eigen::VectorXd::Zero(width), square(head.key_moment, width)};
  RopeTurn turn(rope);
  for (std::size_t block = 0; block < head.block_count.size(); ++block) {
    const double count = head.block_count[block];
    if (count == 0) continue;
    Eigen::VectorXd mean = page_mean;
    turn.set_position(static_cast<double>(block) * kBlockTokens);
    turn.turn(mean.data());
    const Eigen::Map<const Eigen::VectorXd> sum(head.block_key_sum.data() + block * static_cast<std::size_t>(width),
                                                width);
    // sum (k - m)^T (k - m) = sum k^T k - s^T m - m^T s + n m^T m, with s - n m / 2 taking half of the last term each
    const Eigen::VectorXd half = sum - count / 2 * mean;
    moments.moment -= half * mean.transpose() + mean * half.transpose();
    moments.mean += sum - count * mean;
  }
  moments.mean /= head.num_keys;
  moments.moment /= head.num_keys;
  return moments;
}

Moments average_over_offsets(const Moments& moments, const RopeSpec& rope, const std::vector<std::int64_t>& offsets) {
  const Eigen::Index width = moments.mean.size();
  Moments sum{Eigen::VectorXd::Zero(width), Eigen::MatrixXd::Zero(width, width)};
  RopeTurn turn(rope);
  for (const std::int64_t offset : offsets) {
    turn.set_position(static_cast<double>(offset));
    Eigen::VectorXd mean = moments.mean;
    turn.turn(mean.data());
    sum.mean += mean;
    // R^T E R: columns are contiguous, so turn E's columns, transpose, and turn again (E is symmetric).
    Eigen::MatrixXd moved = moments.moment;
    for (Eigen::Index c = 0; c < width; ++c) turn.turn(moved.col(c).data());
    moved.transposeInPlace();
    for (Eigen::Index c = 0; c < width; ++c) turn.turn(moved.col(c).data());
    sum.moment += moved;
  }
  const auto count = static_cast<double>(offsets.size());
  sum.mean /= count;
  sum.moment /= count;
  return sum;
}

// On the path of every stored key: allocates nothing.
void block_mean(const HeadRotation& head, const RopeSpec& rope, int head_dim, std::int64_t position, float* out) {
  const std::vector<double>& mean = head.page_mean;
  for (int c = 0; c < head_dim; ++c)
    out[c] = mean.empty() ? 0.0f : static_cast<float>(mean[static_cast<std::size_t>(c)]);
  if (mean.empty() || rope.order == RopeOrder::kNone) return;
  const double start = static_cast<double>(position / kBlockTokens * kBlockTokens);
  const std::size_t half = rope.inv_freq.size();
  for (std::size_t p = 0; p < half; ++p) {
    const double cosine = std::cos(start * rope.inv_freq[p]), sine = std::sin(start * rope.inv_freq[p]);
    out[p] = static_cast<float>(mean[p] * cosine - mean[p + half] * sine);
    out[p + half] = static_cast<float>(mean[p + half] * cosine + mean[p] * sine);
  }
}

}  // namespace oscar
