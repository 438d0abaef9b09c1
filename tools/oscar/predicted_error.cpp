// Model of the error. A transformed row y = x A has D channels of about equal variance s^2; two uniform bits fitted by
// least squares leave kRowError s^2 a channel, uncorrelated. Without feedback the weighted error is kRowError s^2
// tr(N), N = A^-1 S A^-T; with feedback the channels' errors are steered, and tr(N) becomes the sum of the pivots d of
// N = (I + T) diag(d) (I + T)^T.

#include "predicted_error.hpp"

#include <Eigen/Dense>
#include <algorithm>

namespace oscar::tool {
namespace {

using Matrix = Eigen::MatrixXd;

// Error of a Gaussian row of 128 channels as a share of its variance (measured; 64 channels differ by a few percent).
constexpr double kRowError = 0.117;           // least-squares step and offset
constexpr double kMinMaxError = 0.252;        // min/max of the whole row
constexpr double kMinMaxClip96Error = 0.156;  // after the published clip of keys
constexpr double kMinMaxClip92Error = 0.128;  // and of values
constexpr double kFeedbackDamping = 0.05;

Matrix square(const std::vector<double>& values, int d) {
  return Eigen::Map<const Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(values.data(), d, d);
}
Matrix square(const std::vector<float>& values, int d) {
  return Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(values.data(), d, d)
      .cast<double>();
}
Eigen::VectorXd vector(const std::vector<double>& values) {
  return Eigen::Map<const Eigen::VectorXd>(values.data(), static_cast<Eigen::Index>(values.size()));
}

// Sum of the pivots of U diag(d) U^T with U unit upper triangular: eliminates from the last channel to the first.
double pivot_sum(Matrix n) {
  const Eigen::Index d = n.rows();
  n.diagonal().array() += kFeedbackDamping * n.trace() / static_cast<double>(d);
  double sum = 0;
  for (Eigen::Index i = d - 1; i >= 0; --i) {
    const double pivot = n(i, i);
    if (pivot <= 0) break;
    sum += pivot;
    const Eigen::VectorXd column = n.col(i).head(i);
    n.topLeftCorner(i, i) -= column * column.transpose() / pivot;
  }
  return sum;
}

double row_error(const SideRotation& side, Quantizer quantizer) {
  if (quantizer != Quantizer::kMinMax) return kRowError;
  if (side.clip_ratio <= 0 || side.clip_ratio >= 1) return kMinMaxError;
  return side.clip_ratio > 0.94F ? kMinMaxClip96Error : kMinMaxClip92Error;
}

// Expected error energy of one side. `row_covariance`: of what is encoded about its mean, which the row's own zero
// point takes off where the transform puts it there.
double error_energy(const SideRotation& side, Quantizer quantizer, const Matrix& row_covariance, const Matrix& weight) {
  const auto d = static_cast<int>(weight.rows());
  const Matrix a = side.transform.empty() ? Matrix(Matrix::Identity(d, d)) : square(side.transform, d);
  const Matrix inverse = side.inverse_transposed.empty() ? Matrix(Matrix::Identity(d, d))
                                                         : Matrix(square(side.inverse_transposed, d).transpose());
  const double variance = (a.transpose() * row_covariance * a).trace() / d;
  const Matrix metric = inverse * weight * inverse.transpose();
  return row_error(side, quantizer) * variance *
         (quantizer == Quantizer::kFeedback ? pivot_sum(metric) : metric.trace());
}

// The same over the signal's energy; `signal`: covariance of the original rows.
double side_error(const SideRotation& side, Quantizer quantizer, const Matrix& row_covariance, const Matrix& signal,
                  const Matrix& weight) {
  const double signal_energy = (signal * weight).trace();
  return signal_energy > 0 ? error_energy(side, quantizer, row_covariance, weight) / signal_energy : 0;
}

// Covariance of k_j - (mean of its block) about the mean of that, over the sampled positions; and of k itself.
struct KeyMoments {
  Matrix residual, keys;
};
KeyMoments key_moments(const HeadStatistics& head, const HeadRotation& rotation, const RopeSpec& rope) {
  const int d = head.head_dim;
  const double n = std::max(1.0, head.num_keys);
  Matrix moment = square(head.key_moment, d) / n;
  Eigen::VectorXd key_mean = Eigen::VectorXd::Zero(d);
  Eigen::VectorXd removed = Eigen::VectorXd::Zero(d);
  Matrix residual = moment;
  std::vector<float> mean(static_cast<std::size_t>(d));
  for (std::size_t b = 0; b < head.block_count.size(); ++b) {
    if (head.block_count[b] == 0) continue;
    const Eigen::VectorXd sum =
        Eigen::Map<const Eigen::VectorXd>(head.block_key_sum.data() + b * static_cast<std::size_t>(d), d);
    block_mean(rotation, rope, d, static_cast<std::int64_t>(b) * kBlockTokens, mean.data());
    const Eigen::VectorXd m = Eigen::Map<const Eigen::VectorXf>(mean.data(), d).cast<double>();
    residual += (head.block_count[b] * m * m.transpose() - sum * m.transpose() - m * sum.transpose()) / n;
    key_mean += sum / n;
    removed += head.block_count[b] * m / n;
  }
  const Eigen::VectorXd residual_mean = key_mean - removed;
  return {residual - residual_mean * residual_mean.transpose(), moment - key_mean * key_mean.transpose()};
}

}  // namespace

std::vector<PredictedError> predict_errors(const ModelStatistics& statistics, const RotationSet& set) {
  std::vector<PredictedError> errors;
  for (const auto& [index, layer] : set.layers) {
    const auto found = statistics.layers.find(index);
    if (found == statistics.layers.end() || found->second.heads.size() != layer.heads.size() || layer.heads.empty())
      continue;
    PredictedError error{.layer = index};
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      const HeadStatistics& head = found->second.heads[h];
      const int d = head.head_dim;
      const KeyMoments keys = key_moments(head, layer.heads[h], layer.rope);
      error.key +=
          side_error(layer.heads[h].key, set.quantizer(), keys.residual, keys.keys, square(head.query_moment, d));
      const double n = std::max(1.0, head.num_keys);
      const Eigen::VectorXd value_mean = vector(head.value_sum) / n;
      const Matrix values = square(head.value_moment, d) / n;
      const Matrix weight = head.output_gram.empty() ? Matrix(Matrix::Identity(d, d)) : square(head.output_gram, d);
      error.value += side_error(layer.heads[h].value, set.quantizer(), values - value_mean * value_mean.transpose(),
                                values, weight);
    }
    const auto num_heads = static_cast<double>(layer.heads.size());
    error.key /= num_heads;
    error.value /= num_heads;
    errors.push_back(error);
  }
  return errors;
}

std::map<int, std::vector<double>> predict_key_errors(const ModelStatistics& statistics, const RotationSet& set) {
  std::map<int, std::vector<double>> errors;
  for (const auto& [index, layer] : set.layers) {
    const auto found = statistics.layers.find(index);
    if (found == statistics.layers.end() || found->second.heads.size() != layer.heads.size()) continue;
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      const HeadStatistics& head = found->second.heads[h];
      const Matrix queries = square(head.query_moment, head.head_dim) / std::max(1.0, head.num_queries);
      errors[index].push_back(error_energy(layer.heads[h].key, set.quantizer(),
                                           key_moments(head, layer.heads[h], layer.rope).residual, queries));
    }
  }
  return errors;
}

}  // namespace oscar::tool
