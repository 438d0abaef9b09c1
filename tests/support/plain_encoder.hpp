#pragma once
// The float32 encoders exactly as docs/format.md, "Encoder arithmetic", words them: scalar, no blocking, no vectors.
// Tests require every instruction set to agree with these to the bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <oscar/codec.hpp>
#include <vector>

namespace oscar::test {

using Row = std::vector<float>;

inline constexpr float kPlainLevels[4] = {-1.5f * kStep2, -.5f * kStep2, .5f * kStep2, 1.5f * kStep2};

inline std::uint8_t plain_nearest(float u) { return static_cast<std::uint8_t>((u > -kStep2) + (u > 0) + (u > kStep2)); }

// S(a): eight partial sums over the channels j = k mod 8, then a fixed tree.
template <typename Term>
float interleaved_sum(std::size_t num, Term term) {
  float p[8] = {};
  for (std::size_t j = 0; j < num; ++j) p[j % 8] = p[j % 8] + term(j);
  return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}
inline float interleaved_dot(const Row& a, const Row& b) {
  return interleaved_sum(a.size(), [&](std::size_t j) { return a[j] * b[j]; });
}

inline Row plain_transform(const std::vector<float>& matrix, const Row& x) {
  Row y(x.size(), 0.0f);
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < x.size(); ++j) y[j] = y[j] + x[i] * matrix[i * x.size() + j];
  }
  return y;
}
inline Row plain_inverse_transform(const std::vector<float>& inverse_transposed, const Row& y) {
  Row x(y.size());
  for (std::size_t j = 0; j < x.size(); ++j) {
    x[j] = interleaved_sum(y.size(), [&](std::size_t i) { return y[i] * inverse_transposed[j * y.size() + i]; });
  }
  return x;
}

struct PlainRow {
  std::vector<std::uint8_t> codes;
  RowParameters parameters;
};

struct PlainFit {
  float mean, scale;
};

inline float larger(float value, float limit) { return value > limit ? value : limit; }

inline PlainFit plain_fit(const Row& y) {
  const float num = static_cast<float>(y.size());
  const float mean = interleaved_sum(y.size(), [&](std::size_t j) { return y[j]; }) / num;
  const float squares = interleaved_sum(y.size(), [&](std::size_t j) { return (y[j] - mean) * (y[j] - mean); });
  return {mean, std::sqrt(squares / num)};
}

inline Row plain_normalize(const Row& y, PlainFit fit) {
  Row u;
  for (const float value : y) u.push_back((value - fit.mean) / fit.scale);
  return u;
}

inline PlainFit plain_store(const SideRotation& side, PlainFit fit, RowParameters& parameters) {
  float offset = 20.0f * (fit.mean - side.offset_center) / side.offset_spread;
  offset = larger(offset, -128.0f);
  offset = offset < 127.0f ? offset : 127.0f;
  offset = std::nearbyintf(offset);
  parameters.offset_code = static_cast<std::int8_t>(offset);
  int scale_code = -128;
  while (scale_code < 127 && fit.scale > static_cast<float>(std::exp2((scale_code + 0.5) / 16))) ++scale_code;
  parameters.scale_code = static_cast<std::int8_t>(scale_code);
  return {side.offset_center + static_cast<float>(parameters.offset_code) * (side.offset_spread / 20.0f),
          static_cast<float>(std::exp2(scale_code / 16.0))};
}

inline PlainRow plain_least_squares(const SideRotation& side, const Row& y) {
  PlainRow row;
  PlainFit fit = plain_fit(y);
  fit.scale = larger(fit.scale, 1e-8f);
  const float mean = fit.mean;
  for (int round = 0; round < 2; ++round) {
    Row level;
    for (const float u : plain_normalize(y, fit)) level.push_back(kPlainLevels[plain_nearest(u)]);
    const float level_mean =
        interleaved_sum(y.size(), [&](std::size_t j) { return level[j]; }) / static_cast<float>(y.size());
    for (float& value : level) value = value - level_mean;
    const float square = interleaved_dot(level, level);
    if (!(square > 1e-4f)) continue;
    const float cross = interleaved_sum(y.size(), [&](std::size_t j) { return (y[j] - mean) * level[j]; });
    fit.scale = larger(cross / square, 1e-8f);
    fit.mean = mean - fit.scale * level_mean;
  }
  for (const float u : plain_normalize(y, plain_store(side, fit, row.parameters)))
    row.codes.push_back(plain_nearest(u));
  return row;
}

inline PlainRow plain_feedback(const SideRotation& side, const Row& y) {
  const std::size_t num = y.size();
  PlainRow row;
  PlainFit fit = plain_fit(y);
  fit.scale = larger(1.05f * fit.scale, 1e-8f);
  const Row u = plain_normalize(y, fit);
  Row level(num), error(num);
  for (std::size_t i = 0; i < num; ++i) {
    float shifted = u[i];
    for (std::size_t j = 0; j < i; ++j) shifted = shifted - side.feedback[j * num + i] * error[j];
    level[i] = kPlainLevels[plain_nearest(shifted)];
    error[i] = level[i] - u[i];
  }
  const Row row_sum = plain_transform(side.metric, Row(num, 1.0f));
  const Row weighted = plain_transform(side.metric, level);
  const float total = interleaved_sum(num, [&](std::size_t j) { return row_sum[j]; });
  const float ones_level = interleaved_dot(level, row_sum), level_level = interleaved_dot(level, weighted);
  const float ones_u = interleaved_dot(u, row_sum), level_u = interleaved_dot(u, weighted);
  const float determinant = total * level_level - ones_level * ones_level;
  if (determinant > 1e-4f * (total * level_level)) {
    fit.mean = fit.mean + fit.scale * ((level_level * ones_u - ones_level * level_u) / determinant);
    fit.scale = larger(fit.scale * ((total * level_u - ones_level * ones_u) / determinant), 1e-8f);
  }
  const Row stored = plain_normalize(y, plain_store(side, fit, row.parameters));
  Row residual(num);
  for (std::size_t j = 0; j < num; ++j) residual[j] = level[j] - stored[j];
  Row gradient = plain_transform(side.metric, residual);
  for (int sweep = 0; sweep < 2; ++sweep) {
    for (std::size_t i = 0; i < num; ++i) {
      const float next = kPlainLevels[plain_nearest(level[i] - gradient[i] * (1.0f / side.metric[i * num + i]))];
      const float change = next - level[i];
      level[i] = next;
      for (std::size_t j = 0; j < num; ++j) gradient[j] = gradient[j] + side.metric[i * num + j] * change;
    }
  }
  for (const float value : level) row.codes.push_back(plain_nearest(value));
  return row;
}

inline PlainRow plain_min_max(const SideRotation& side, const Row& y) {
  float clip = std::numeric_limits<float>::infinity();
  if (side.clip_ratio > 0) {
    Row magnitude;
    for (const float value : y) magnitude.push_back(std::abs(value));
    std::sort(magnitude.begin(), magnitude.end());
    const auto rank = static_cast<std::size_t>(side.clip_ratio * static_cast<float>(y.size()));
    clip = magnitude[std::min(rank, y.size() - 1)];
  }
  Row clipped;
  for (const float value : y) clipped.push_back(std::clamp(value, -clip, clip));
  const auto [low, high] = std::minmax_element(clipped.begin(), clipped.end());
  PlainRow row;
  row.parameters.scale = larger(*high - *low, 1e-8f) / 3.0f;
  row.parameters.zero = 0.0f - *low / row.parameters.scale;
  for (const float value : clipped) {
    const float code = value / row.parameters.scale + row.parameters.zero + 0.5f;
    row.codes.push_back(static_cast<std::uint8_t>(std::clamp(code, 0.0f, 3.0f)));
  }
  return row;
}

inline PlainRow plain_encode(const SideRotation& side, Quantizer quantizer, const Row& y) {
  switch (quantizer) {
    case Quantizer::kMinMax: return plain_min_max(side, y);
    case Quantizer::kLeastSquares: return plain_least_squares(side, y);
    case Quantizer::kFeedback: return plain_feedback(side, y);
  }
  return {};
}

}  // namespace oscar::test
