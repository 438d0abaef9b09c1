#pragma once
// Random rows and fitted-looking sides for the tests of codec and cache.

#include <cmath>
#include <oscar/rotation.hpp>
#include <random>
#include <vector>

namespace oscar::test {

inline std::vector<float> gaussian(std::mt19937& random, std::size_t num, float mean = 0, float deviation = 1) {
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<float> out(num);
  for (float& value : out) value = normal(random);
  return out;
}

// M = (I + T) diag (I + T)^T, T strictly upper, with the correlations and the falling diagonal of a real fit; a random
// transform (not orthogonal) with an unrelated inverse.
inline SideRotation random_side(std::mt19937& random, int head_dim) {
  const auto size = static_cast<std::size_t>(head_dim);
  const float width = 0.8f / std::sqrt(static_cast<float>(head_dim));
  SideRotation side;
  side.transform = gaussian(random, size * size, 0, width);
  side.inverse_transposed = gaussian(random, size * size, 0, width);
  side.feedback.assign(size * size, 0);
  for (std::size_t i = 0; i < size; ++i) {
    const std::vector<float> row = gaussian(random, size, 0, width);
    for (std::size_t j = i + 1; j < size; ++j) side.feedback[i * size + j] = row[j];
  }
  side.metric.resize(size * size);
  for (std::size_t i = 0; i < size; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (std::size_t k = i; k < size; ++k) {
        const double left = i == k ? 1 : side.feedback[i * size + k];
        const double right = j == k ? 1 : side.feedback[j * size + k];
        sum += left * right * (0.3 + 1.4 * static_cast<double>(k) / static_cast<double>(size));
      }
      side.metric[i * size + j] = side.metric[j * size + i] = static_cast<float>(sum);
    }
  }
  side.offset_center = 0.125f;
  side.offset_spread = 0.75f;
  side.clip_ratio = 0.92f;
  return side;
}

}  // namespace oscar::test
