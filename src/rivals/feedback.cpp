#include "rivals/feedback.hpp"

#include <algorithm>
#include <cmath>
#include <oscar/codec.hpp>

namespace oscar::rivals {
namespace {

// Distance of neighbouring levels that leaves a unit Gaussian the smallest error, by bits; kSteps[2] is the product's.
constexpr float kSteps[] = {0, 1.596f, kStep2, 0.586f, 0.3352f};
constexpr float kStartScale = 1.05f;  // feedback starts from a slightly wide scale
constexpr float kMinScale = 1e-8f;
constexpr double kSingular = 1e-4;  // determinant of the refit, relative to its two diagonal terms
constexpr int kNumSweeps = 2;
constexpr int kMaxHeadDim = 256;

// sum += factor * row
void add_scaled(float* sum, const float* row, float factor, int count) {
  for (int i = 0; i < count; ++i) sum[i] += factor * row[i];
}

}  // namespace

FeedbackRows::FeedbackRows(const HeadRotation& head, const RopeSpec& rope, bool is_key, int head_dim,
                           const FeedbackOptions& options, Isa isa)
    : head_(head),
      rope_(rope),
      is_key_(is_key),
      head_dim_(head_dim),
      options_(options),
      isa_(isa),
      side_(is_key ? head.key : head.value),
      row_sums_(static_cast<std::size_t>(head_dim)) {
  for (int i = 0; i < head_dim; ++i) add_scaled(row_sums_.data(), side_.metric.data() + i * head_dim, 1, head_dim);
  for (const float sum : row_sums_) total_ += sum;
}

void FeedbackRows::read_back(std::int64_t first, int num_rows, float* rows) const {
  const auto dim = static_cast<std::size_t>(head_dim_);
  std::vector<float> means(static_cast<std::size_t>(num_rows) * dim), y(means.size());
  if (is_key_ && !head_.page_mean.empty()) {
    for (int i = 0; i < num_rows; ++i) {
      float* mean = means.data() + static_cast<std::size_t>(i) * dim;
      if (i > 0 && (first + i) % kBlockTokens != 0) {
        std::copy_n(mean - dim, dim, mean);
      } else {
        block_mean(head_, rope_, head_dim_, first + i, mean);
      }
    }
  }
  for (std::size_t i = 0; i < means.size(); ++i) rows[i] -= means[i];
  transform_rows(side_.transform.data(), head_dim_, rows, num_rows, y.data(), isa_);
  for (int i = 0; i < num_rows; ++i) read_back_transformed(y.data() + static_cast<std::size_t>(i) * dim);
  inverse_transform_rows(side_.inverse_transposed.data(), head_dim_, y.data(), num_rows, rows, isa_);
  for (std::size_t i = 0; i < means.size(); ++i) rows[i] += means[i];
}

void FeedbackRows::read_back_transformed(float* y) const {
  float levels[kMaxHeadDim];
  const MeanAndScale first = start(y);
  round_with_feedback(y, first, levels);
  const MeanAndScale fit = stored(refit(y, levels, first));
  sweep(y, fit, levels);
  for (int i = 0; i < head_dim_; ++i) y[i] = fit.mean + fit.scale * levels[i];
}

// A tie goes to the lower level.
float FeedbackRows::nearest_level(float u) const {
  const float step = kSteps[options_.bits];
  const auto count = static_cast<float>(1 << options_.bits);
  const float code = std::clamp(std::ceil(u / step + count / 2) - 1, 0.0f, count - 1);
  return (code - (count - 1) / 2) * step;
}

FeedbackRows::MeanAndScale FeedbackRows::start(const float* y) const {
  double mean = 0, squares = 0;
  if (options_.zero_point) {
    for (int i = 0; i < head_dim_; ++i) mean += y[i];
    mean /= head_dim_;
  }
  for (int i = 0; i < head_dim_; ++i) squares += (y[i] - mean) * (y[i] - mean);
  const auto deviation = static_cast<float>(std::sqrt(squares / head_dim_));
  return {static_cast<float>(mean), std::max(kStartScale * deviation, kMinScale)};
}

void FeedbackRows::round_with_feedback(const float* y, MeanAndScale fit, float* levels) const {
  float shifted[kMaxHeadDim];
  for (int i = 0; i < head_dim_; ++i) shifted[i] = (y[i] - fit.mean) / fit.scale;
  for (int i = 0; i < head_dim_; ++i) {
    levels[i] = nearest_level(shifted[i]);
    const float error = levels[i] - (y[i] - fit.mean) / fit.scale;
    add_scaled(shifted + i + 1, side_.feedback.data() + i * head_dim_ + i + 1, -error, head_dim_ - i - 1);
  }
}

// The mean and scale (or the scale alone) that leave the least error in M; `fit` where the levels cannot tell.
FeedbackRows::MeanAndScale FeedbackRows::refit(const float* y, const float* levels, MeanAndScale fit) const {
  float weighted[kMaxHeadDim] = {};  // levels M
  for (int i = 0; i < head_dim_; ++i) add_scaled(weighted, side_.metric.data() + i * head_dim_, levels[i], head_dim_);
  double ones_level = 0, level_level = 0, ones_y = 0, level_y = 0;
  for (int i = 0; i < head_dim_; ++i) {
    ones_level += double{row_sums_[static_cast<std::size_t>(i)]} * levels[i];
    level_level += double{weighted[i]} * levels[i];
    ones_y += double{row_sums_[static_cast<std::size_t>(i)]} * (y[i] - fit.mean);
    level_y += double{weighted[i]} * (y[i] - fit.mean);
  }
  if (!options_.zero_point) {
    if (level_level > 0) fit.scale = std::max(static_cast<float>(level_y / level_level), kMinScale);
    return fit;
  }
  const double determinant = total_ * level_level - ones_level * ones_level;
  if (!(determinant > kSingular * (total_ * level_level))) return fit;
  return {fit.mean + static_cast<float>((level_level * ones_y - ones_level * level_y) / determinant),
          std::max(static_cast<float>((total_ * level_y - ones_level * ones_y) / determinant), kMinScale)};
}

FeedbackRows::MeanAndScale FeedbackRows::stored(MeanAndScale exact) const {
  MeanAndScale result;
  result.scale = std::exp2(std::clamp(std::round(16 * std::log2(exact.scale)), -128.0f, 127.0f) / 16);
  if (!options_.zero_point) return result;
  const float code =
      std::nearbyint(std::clamp(20 * (exact.mean - side_.offset_center) / side_.offset_spread, -128.0f, 127.0f));
  result.mean = side_.offset_center + code * (side_.offset_spread / 20);
  return result;
}

void FeedbackRows::sweep(const float* y, MeanAndScale fit, float* levels) const {
  float gradient[kMaxHeadDim] = {};
  for (int i = 0; i < head_dim_; ++i) {
    add_scaled(gradient, side_.metric.data() + i * head_dim_, levels[i] - (y[i] - fit.mean) / fit.scale, head_dim_);
  }
  for (int round = 0; round < kNumSweeps; ++round) {
    for (int i = 0; i < head_dim_; ++i) {
      const float* row = side_.metric.data() + i * head_dim_;
      const float changed = nearest_level(levels[i] - gradient[i] / row[i]) - levels[i];
      if (changed == 0) continue;
      levels[i] += changed;
      add_scaled(gradient, row, changed, head_dim_);
    }
  }
}

}  // namespace oscar::rivals
