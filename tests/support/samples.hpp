#pragma once
// Random rows that look like a model's: queries and keys with a mean that RoPE turns, channels of different scale.

#include <cmath>
#include <oscar/samples.hpp>
#include <random>
#include <vector>

namespace oscar::test {

inline RopeSpec rope_of(int rotary_dim, double theta = 1e4) {
  RopeSpec rope;
  rope.order = rotary_dim > 0 ? RopeOrder::kHalves : RopeOrder::kNone;
  rope.rotary_dim = rotary_dim;
  for (int p = 0; p < rotary_dim / 2; ++p) rope.inv_freq.push_back(std::pow(theta, -2.0 * p / rotary_dim));
  return rope;
}

// RoPE of one double row in halves order, straight from its definition.
inline std::vector<double> turned(const RopeSpec& rope, std::vector<double> row, double position) {
  const std::size_t half = rope.order == RopeOrder::kNone ? 0 : rope.inv_freq.size();
  for (std::size_t p = 0; p < half; ++p) {
    const double angle = position * rope.inv_freq[p];
    const double first = row[p];
    const double second = row[p + half];
    row[p] = first * std::cos(angle) - second * std::sin(angle);
    row[p + half] = first * std::sin(angle) + second * std::cos(angle);
  }
  return row;
}

struct Samples {
  int num_tokens = 0;
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  std::int64_t first_position = 0;
  RopeSpec rope;
  std::vector<float> q, k, v;

  // The tokens from `first` on, `count` of them; borrows.
  SampleBlock block(int first, int count) const {
    SampleBlock block;
    block.first_position = first_position + first;
    block.num_tokens = count;
    block.num_qo_heads = num_qo_heads;
    block.num_kv_heads = num_kv_heads;
    block.head_dim = head_dim;
    block.q = q.data() + static_cast<std::ptrdiff_t>(first) * num_qo_heads * head_dim;
    block.k = k.data() + static_cast<std::ptrdiff_t>(first) * num_kv_heads * head_dim;
    block.v = v.data() + static_cast<std::ptrdiff_t>(first) * num_kv_heads * head_dim;
    block.rope = &rope;
    return block;
  }
  SampleBlock block() const { return block(0, num_tokens); }
};

inline Samples random_samples(unsigned seed, int num_tokens, int num_qo_heads, int num_kv_heads, int head_dim,
                              const RopeSpec& rope, std::int64_t first_position = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Samples samples{num_tokens, num_qo_heads, num_kv_heads, head_dim, first_position, rope, {}, {}, {}};
  const auto fill = [&](std::vector<float>& rows, int num_heads, double mean_size, bool turns) {
    const auto width = static_cast<std::size_t>(head_dim);
    std::vector<std::vector<double>> means;
    std::vector<double> scales;
    for (int h = 0; h < num_heads; ++h) {
      means.emplace_back(width);
      for (double& value : means.back()) value = mean_size * normal(random);
    }
    for (std::size_t c = 0; c < width; ++c) scales.push_back(std::exp(normal(random) / 2));
    for (int t = 0; t < num_tokens; ++t) {
      for (int h = 0; h < num_heads; ++h) {
        std::vector<double> row = means[static_cast<std::size_t>(h)];
        for (std::size_t c = 0; c < width; ++c) row[c] += scales[c] * normal(random);
        if (turns) row = turned(rope, row, static_cast<double>(first_position + t));
        for (const double value : row) rows.push_back(static_cast<float>(value));
      }
    }
  };
  fill(samples.q, num_qo_heads, 0.5, true);
  fill(samples.k, num_kv_heads, 2.0, true);
  fill(samples.v, num_kv_heads, 0.25, false);
  return samples;
}

}  // namespace oscar::test
