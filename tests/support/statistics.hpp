#pragma once
// Statistics of a small made-up model, from random samples.

#include <cmath>
#include <oscar/covariance.hpp>
#include <stdexcept>
#include <string>

#include "support/samples.hpp"

namespace oscar::test {

struct SmallModel {
  int num_layers = 2;
  int num_qo_heads = 4;
  int num_kv_heads = 2;
  int head_dim = 16;
  int num_tokens = 200;
  unsigned seed = 1;
};

inline ModelGeometry geometry_of(const SmallModel& model) {
  ModelGeometry geometry;
  geometry.architecture = "qwen2";
  geometry.name = "Small";
  geometry.context_length = 4096;
  geometry.fingerprint = "0123456789abcdef0123456789abcdef";
  for (int i = 0; i < model.num_layers; ++i) {
    geometry.layers.push_back({LayerKind::kFull, model.num_qo_heads, model.num_kv_heads, model.head_dim, 0});
  }
  return geometry;
}

inline Samples samples_of(const SmallModel& model, int layer) {
  return random_samples(model.seed * 100 + static_cast<unsigned>(layer), model.num_tokens, model.num_qo_heads,
                        model.num_kv_heads, model.head_dim, rope_of(model.head_dim));
}

// W^T W of a random output projection of a head.
inline std::vector<double> random_gram(unsigned seed, int width) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 1 / std::sqrt(width));
  const auto size = static_cast<std::size_t>(width);
  std::vector<double> weights(size * size * 4);
  for (double& weight : weights) weight = normal(random);
  std::vector<double> gram(size * size);
  for (std::size_t r = 0; r < 4 * size; ++r) {
    for (std::size_t i = 0; i < size; ++i) {
      for (std::size_t j = 0; j < size; ++j) gram[i * size + j] += weights[r * size + i] * weights[r * size + j];
    }
  }
  return gram;
}

inline ModelStatistics statistics_of(const SmallModel& model) {
  ModelStatistics statistics;
  statistics.geometry = geometry_of(model);
  for (int i = 0; i < model.num_layers; ++i) {
    const Samples samples = samples_of(model, i);
    const Status status = accumulate(statistics.layers[i], samples.block());
    if (!status) throw std::runtime_error(status.error().message);
    for (HeadStatistics& head : statistics.layers[i].heads) {
      head.output_gram = random_gram(model.seed + static_cast<unsigned>(i), model.head_dim);
    }
  }
  statistics.num_tokens = model.num_tokens;
  statistics.corpus_hash = "cafe";
  return statistics;
}

}  // namespace oscar::test
