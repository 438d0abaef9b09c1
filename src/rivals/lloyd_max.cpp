#include "rivals/lloyd_max.hpp"

#include <Eigen/QR>
#include <algorithm>
#include <cmath>
#include <oscar/codec.hpp>
#include <random>

#include "rivals/half.hpp"

namespace oscar::rivals {
namespace {

double density(double x) { return std::exp(-x * x / 2) * 0.3989422804014327; }  // 1 / sqrt(2 pi)
double below(double x) { return 0.5 * std::erfc(-x * 0.7071067811865476); }     // 1 / sqrt(2)

}  // namespace

std::vector<float> lloyd_max_levels(int bits) {
  // Each level the mean of the part of the Gaussian that is nearest to it, until nothing moves.
  constexpr int kRounds = 3000;  // 8 bits settle last
  const int count = 1 << bits;
  std::vector<double> levels(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) levels[static_cast<std::size_t>(i)] = 3.0 * (2 * i + 1 - count) / count;
  for (int round = 0; round < kRounds; ++round) {
    double low = -INFINITY;
    for (std::size_t i = 0; i < levels.size(); ++i) {
      const double high = i + 1 < levels.size() ? (levels[i] + levels[i + 1]) / 2 : INFINITY;
      levels[i] = (density(low) - density(high)) / (below(high) - below(low));
      low = high;
    }
  }
  return {levels.begin(), levels.end()};
}

std::vector<float> random_rotation(int head_dim, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  Eigen::MatrixXd gaussian(head_dim, head_dim);
  for (double& value : gaussian.reshaped()) value = normal(random);
  const Eigen::HouseholderQR<Eigen::MatrixXd> qr(gaussian);
  Eigen::MatrixXd rotation = qr.householderQ();
  for (int i = 0; i < head_dim; ++i) {
    if (qr.matrixQR()(i, i) < 0) rotation.col(i) *= -1;  // else Q would not be evenly drawn
  }
  const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> rows = rotation.cast<float>();
  return {rows.data(), rows.data() + rows.size()};
}

TurboRows::TurboRows(int head_dim, int bits, std::uint64_t seed, Isa isa)
    : head_dim_(head_dim),
      bits_(bits),
      isa_(isa),
      rotation_(random_rotation(head_dim, seed)),
      levels_(lloyd_max_levels(bits)) {}

double TurboRows::bits_per_element() const { return bits_ + 16.0 / head_dim_; }

void TurboRows::read_back(std::int64_t /*first*/, int num_rows, float* rows) const {
  const auto dim = static_cast<std::size_t>(head_dim_);
  std::vector<float> rotated(static_cast<std::size_t>(num_rows) * dim), thresholds;
  for (std::size_t i = 1; i < levels_.size(); ++i) thresholds.push_back((levels_[i - 1] + levels_[i]) / 2);
  transform_rows(rotation_.data(), head_dim_, rows, num_rows, rotated.data(), isa_);
  for (int row = 0; row < num_rows; ++row) {
    float* y = rotated.data() + static_cast<std::size_t>(row) * dim;
    double energy = 0;
    for (std::size_t i = 0; i < dim; ++i) energy += double{y[i]} * y[i];
    const float size = round_to_half(static_cast<float>(std::sqrt(energy / head_dim_)));
    for (std::size_t i = 0; i < dim; ++i) {
      const auto code = std::ranges::lower_bound(thresholds, size > 0 ? y[i] / size : 0) - thresholds.begin();
      y[i] = levels_[static_cast<std::size_t>(code)] * size;
    }
  }
  inverse_transform_rows(rotation_.data(), head_dim_, rotated.data(), num_rows, rows, isa_);
}

void PublishedLloydMaxRows::read_back(std::int64_t /*first*/, int num_rows, float* rows) const {
  constexpr float kThreshold = 0.98106527f;                   // between the outer and the inner Lloyd-Max level
  constexpr float kStep = 2.0f * 1.50955856f / 3.0f * 1.16f;  // of a row of unit deviation
  constexpr double kVarianceFloor = 1e-8;
  const auto dim = static_cast<std::size_t>(head_dim_);
  std::vector<float> rotated(static_cast<std::size_t>(num_rows) * dim), sizes(dim);
  transform_rows(side_.transform.data(), head_dim_, rows, num_rows, rotated.data(), isa_);
  for (int row = 0; row < num_rows; ++row) {
    float* y = rotated.data() + static_cast<std::size_t>(row) * dim;
    for (std::size_t i = 0; i < dim; ++i) sizes[i] = std::abs(y[i]);
    std::ranges::sort(sizes);
    const float clip = sizes[std::min(static_cast<std::size_t>(side_.clip_ratio * static_cast<float>(dim)), dim - 1)];
    double mean = 0, variance = 0;
    for (std::size_t i = 0; i < dim; ++i) mean += (y[i] = std::clamp(y[i], -clip, clip)) / static_cast<double>(dim);
    for (std::size_t i = 0; i < dim; ++i) variance += (y[i] - mean) * (y[i] - mean) / static_cast<double>(dim);
    const auto middle = static_cast<float>(mean);
    const auto deviation = static_cast<float>(std::sqrt(variance + kVarianceFloor));
    for (std::size_t i = 0; i < dim; ++i) {
      const float u = (y[i] - middle) / deviation;
      const int code = (u >= -kThreshold) + (u >= 0) + (u >= kThreshold);
      y[i] = middle + (static_cast<float>(code) - 1.5f) * kStep * deviation;
    }
  }
  inverse_transform_rows(side_.inverse_transposed.data(), head_dim_, rotated.data(), num_rows, rows, isa_);
}

}  // namespace oscar::rivals
