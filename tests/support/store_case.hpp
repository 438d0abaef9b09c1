#pragma once
// Random rotations, rows and slots for the CUDA store: used by its CPU test and by the files that its GPU check reads.

#include <Eigen/Dense>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <oscar/cache.hpp>
#include <random>
#include <vector>

namespace oscar::test {

using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline constexpr int kStoreHeads = 2;
inline constexpr int kStorePages = 40;
inline constexpr double kLambdaSpread = 1.2;  // of log eigenvalues: about three decades, as the fitted metrics have

inline std::mt19937_64 generator(7);

inline RowMajor gaussian(int rows, int columns) {
  std::normal_distribution<double> normal;
  return RowMajor::NullaryExpr(rows, columns, [&] { return normal(generator); });
}

inline std::vector<float> to_floats(const RowMajor& matrix) {
  const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> floats = matrix.cast<float>();
  return {floats.data(), floats.data() + floats.size()};
}

// A metric of a turned, uneven spectrum and its feedback: M = (I + T) diag (I + T)^T with T strictly upper.
inline SideRotation random_side(int head_dim, float clip_ratio) {
  const RowMajor basis = Eigen::HouseholderQR<RowMajor>(gaussian(head_dim, head_dim)).householderQ();
  const Eigen::VectorXd lambda = (kLambdaSpread * gaussian(head_dim, 1)).array().exp();
  RowMajor metric = basis * lambda.asDiagonal() * basis.transpose();
  metric += 0.05 * lambda.mean() * RowMajor::Identity(head_dim, head_dim);
  const RowMajor reversed = metric.reverse();
  const RowMajor lower = Eigen::LLT<RowMajor>(reversed).matrixL();
  RowMajor upper = lower.reverse();
  for (int j = 0; j < head_dim; ++j) upper.col(j) /= upper(j, j);
  upper.diagonal().setZero();
  SideRotation side;
  side.transform = to_floats(gaussian(head_dim, head_dim) / std::sqrt(head_dim));
  side.metric = to_floats(metric);
  side.feedback = to_floats(upper);
  side.offset_center = 0.03f;
  side.offset_spread = 0.4f;
  side.clip_ratio = clip_ratio;
  return side;
}

struct StoreToken {
  int page, slot, position;
};

// Prefill: whole pages, pieces that begin and end inside pages, padding; decode: single tokens.
inline std::vector<StoreToken> tokens_of(bool prefill) {
  std::vector<StoreToken> tokens;
  int page = 0;
  const auto sequence = [&](int first, int count, int shift) {
    for (int i = first; i < first + count; ++i) tokens.push_back({page + i / 64 - first / 64, i % 64, shift + i});
    page += (first + count - 1) / 64 - first / 64 + 1;
  };
  if (prefill) {
    sequence(0, 200, 0);
    sequence(37, 100, 4096 + 64 * 3);
    for (int i = 0; i < 5; ++i) tokens.push_back({-1, 0, 9});
    sequence(63, 2, 64 * 100);
    sequence(0, 64, 1 << 17);
    sequence(5, 1, 0);
  } else {
    for (int i = 0; i < 13; ++i) sequence(i * 7 % 64, 1, 64 * 300 * i);
    tokens[4].page = -1;
  }
  return tokens;
}

inline float rounded_to_bf16(double value) {
  std::uint32_t word;
  const float rounded = static_cast<float>(value);
  std::memcpy(&word, &rounded, 4);
  word = (word + 0x7fffu + ((word >> 16) & 1u)) & 0xffff0000u;
  float result;
  std::memcpy(&result, &word, 4);
  return result;
}

inline std::vector<float> random_rows(std::size_t num_tokens, int head_dim, bool stored_first) {
  std::normal_distribution<double> normal;
  std::vector<float> rows(num_tokens * kStoreHeads * head_dim);
  for (float& value : rows) value = rounded_to_bf16(1.5 * normal(generator) + 0.2);
  const std::size_t width = static_cast<std::size_t>(kStoreHeads * head_dim);
  if (!stored_first || num_tokens < 60) return rows;
  for (std::size_t j = 0; j < width; ++j) {  // rows at the edges of the arithmetic
    rows[10 * width + j] = 0.0f;
    rows[11 * width + j] = rounded_to_bf16(1e-30 * rows[11 * width + j]);
    rows[12 * width + j] = rounded_to_bf16(1e6 * rows[12 * width + j]);
    rows[13 * width + j] = j % 2 == 0 ? 1.0f : -1.0f;
    rows[14 * width + j] = j == 3 ? 100.0f : 0.0f;
  }
  return rows;
}

// A layer of kStoreHeads heads; the second value head does not clip.
inline LayerRotation random_layer(int head_dim) {
  LayerRotation layer;
  layer.rope.order = RopeOrder::kHalves;
  layer.rope.rotary_dim = head_dim;
  for (int i = 0; i < head_dim / 2; ++i) layer.rope.inv_freq.push_back(std::pow(1e6, -2.0 * i / head_dim));
  for (int head = 0; head < kStoreHeads; ++head) {
    HeadRotation rotation;
    rotation.key = random_side(head_dim, .96f);
    rotation.value = random_side(head_dim, head == 0 ? .92f : 0.0f);
    const RowMajor mean = gaussian(1, head_dim);
    rotation.page_mean.assign(mean.data(), mean.data() + head_dim);
    layer.heads.push_back(rotation);
  }
  return layer;
}

}  // namespace oscar::test
