#include "reference/codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <oscar/codec.hpp>

namespace oscar::reference {
namespace {

constexpr double kStep = 0.9957;      // distance of neighbouring levels
constexpr double kStartScale = 1.05;  // feedback starts from a slightly wide scale
constexpr double kMinScale = 1e-8;
constexpr double kSingular = 1e-4;  // determinant of the refit, relative to its two diagonal terms
constexpr int kNumSweeps = 2;

// Nearest of the levels -1.5, -.5, .5, 1.5 (times kStep); a tie goes to the lower code.
std::uint8_t nearest_code(double u) { return static_cast<std::uint8_t>((u > -kStep) + (u > 0) + (u > kStep)); }

double level(int code) { return (code - 1.5) * kStep; }

struct MeanAndScale {
  double mean = 0;
  double scale = 0;
};

MeanAndScale mean_and_deviation(const std::vector<double>& y) {
  double sum = 0, squares = 0;
  for (const double value : y) sum += value;
  const double mean = sum / static_cast<double>(y.size());
  for (const double value : y) squares += (value - mean) * (value - mean);
  return {mean, std::max(std::sqrt(squares / static_cast<double>(y.size())), kMinScale)};
}

int round_half_even(double value) { return static_cast<int>(std::nearbyint(value)); }

// Stores (mean, scale) in two bytes and returns what the decoder will read.
MeanAndScale store_parameters(const SideRotation& side, MeanAndScale exact, EncodedRow& row) {
  const double center = side.offset_center, spread = side.offset_spread;
  row.offset_code = round_half_even(std::clamp(20 * (exact.mean - center) / spread, -128.0, 127.0));
  row.scale_code = -128;
  while (row.scale_code < 127 && exact.scale > std::exp2((row.scale_code + 0.5) / 16)) ++row.scale_code;
  return {center + row.offset_code * spread / 20, std::exp2(row.scale_code / 16.0)};
}

std::vector<std::uint8_t> nearest_codes(const std::vector<double>& y, MeanAndScale fit) {
  std::vector<std::uint8_t> codes;
  for (const double value : y) codes.push_back(nearest_code((value - fit.mean) / fit.scale));
  return codes;
}

EncodedRow encode_least_squares(const SideRotation& side, const std::vector<double>& y) {
  EncodedRow row;
  const double num = static_cast<double>(y.size());
  const double mean = mean_and_deviation(y).mean;
  MeanAndScale fit = mean_and_deviation(y);
  for (int round = 0; round < 2; ++round) {
    row.codes = nearest_codes(y, fit);
    double level_mean = 0, cross = 0, square = 0;
    for (const int code : row.codes) level_mean += level(code) / num;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double centered = level(row.codes[i]) - level_mean;
      cross += (y[i] - mean) * centered;
      square += centered * centered;
    }
    if (square < kSingular) continue;  // one code for the whole row: any scale fits
    fit.scale = std::max(cross / square, kMinScale);
    fit.mean = mean - fit.scale * level_mean;
  }
  row.codes = nearest_codes(y, store_parameters(side, fit, row));
  return row;
}

// Rounds channel by channel; each channel's error moves the later ones by T, so that the error costs least in M.
std::vector<std::uint8_t> feedback_codes(const SideRotation& side, const std::vector<double>& y, MeanAndScale start) {
  const std::size_t num = y.size();
  std::vector<std::uint8_t> codes(num);
  std::vector<double> error(num);
  for (std::size_t i = 0; i < num; ++i) {
    const double u = (y[i] - start.mean) / start.scale;
    double shifted = u;
    for (std::size_t j = 0; j < i; ++j) shifted -= double{side.feedback[j * num + i]} * error[j];
    codes[i] = nearest_code(shifted);
    error[i] = level(codes[i]) - u;
  }
  return codes;
}

// (m, s) that minimise (m 1 + s l - y) M (m 1 + s l - y)^T; `start` when the levels l are constant.
MeanAndScale refit(const SideRotation& side, const std::vector<double>& y, const std::vector<std::uint8_t>& codes,
                   MeanAndScale start) {
  const std::size_t num = y.size();
  double ones_ones = 0, ones_level = 0, level_level = 0, ones_y = 0, level_y = 0;
  for (std::size_t i = 0; i < num; ++i) {
    for (std::size_t j = 0; j < num; ++j) {
      const double metric = side.metric[i * num + j];
      ones_ones += metric;
      ones_level += metric * level(codes[j]);
      level_level += level(codes[i]) * metric * level(codes[j]);
      ones_y += metric * y[j];
      level_y += level(codes[i]) * metric * y[j];
    }
  }
  const double determinant = ones_ones * level_level - ones_level * ones_level;
  if (!(determinant > kSingular * (ones_ones * level_level))) return start;
  return {(level_level * ones_y - ones_level * level_y) / determinant,
          std::max((ones_ones * level_y - ones_level * ones_y) / determinant, kMinScale)};
}

// Coordinate descent over the codes against M, the parameters fixed.
void sweep(const SideRotation& side, const std::vector<double>& y, MeanAndScale stored,
           std::vector<std::uint8_t>& codes) {
  const std::size_t num = y.size();
  for (std::size_t i = 0; i < num; ++i) {
    double gradient = 0;
    for (std::size_t j = 0; j < num; ++j) {
      gradient += double{side.metric[j * num + i]} * (level(codes[j]) - (y[j] - stored.mean) / stored.scale);
    }
    codes[i] = nearest_code(level(codes[i]) - gradient / double{side.metric[i * num + i]});
  }
}

EncodedRow encode_feedback(const SideRotation& side, const std::vector<double>& y) {
  EncodedRow row;
  MeanAndScale start = mean_and_deviation(y);
  start.scale = std::max(start.scale * kStartScale, kMinScale);
  row.codes = feedback_codes(side, y, start);
  const MeanAndScale stored = store_parameters(side, refit(side, y, row.codes, start), row);
  for (int i = 0; i < kNumSweeps; ++i) sweep(side, y, stored, row.codes);
  return row;
}

EncodedRow encode_min_max(const SideRotation& side, const std::vector<double>& y) {
  std::vector<double> clipped = y;
  if (side.clip_ratio > 0) {
    std::vector<double> sorted;
    for (const double value : y) sorted.push_back(std::abs(value));
    std::sort(sorted.begin(), sorted.end());
    // float product: .9f x 160 is 144, as .9 x 160 is
    const auto index = static_cast<std::size_t>(side.clip_ratio * static_cast<float>(y.size()));
    const double threshold = sorted[std::min(index, y.size() - 1)];
    for (double& value : clipped) value = std::clamp(value, -threshold, threshold);
  }
  const auto [low, high] = std::minmax_element(clipped.begin(), clipped.end());
  EncodedRow row;
  row.scale = std::max(*high - *low, 1e-8) / 3;
  row.zero = -*low / row.scale;
  for (const double value : clipped) {
    row.codes.push_back(static_cast<std::uint8_t>(std::clamp(value / row.scale + row.zero + 0.5, 0.0, 3.0)));
  }
  return row;
}

}  // namespace

EncodedRow encode(const SideRotation& side, Quantizer quantizer, const std::vector<double>& y) {
  switch (quantizer) {
    case Quantizer::kMinMax: return encode_min_max(side, y);
    case Quantizer::kLeastSquares: return encode_least_squares(side, y);
    case Quantizer::kFeedback: return encode_feedback(side, y);
  }
  return {};
}

std::vector<double> decode(const SideRotation& side, ParameterFormat format, const EncodedRow& row) {
  std::vector<double> y_hat;
  for (const int code : row.codes) {
    if (format == ParameterFormat::kFloatPair) {
      y_hat.push_back((code - row.zero) * row.scale);
    } else {
      const double mean = double{side.offset_center} + row.offset_code * double{side.offset_spread} / 20;
      y_hat.push_back(mean + std::exp2(row.scale_code / 16.0) * level(code));
    }
  }
  return y_hat;
}

std::vector<double> transform(const std::vector<float>& matrix, const std::vector<double>& x) {
  const std::size_t num = x.size();
  std::vector<double> y(num, 0.0);
  for (std::size_t i = 0; i < num; ++i) {
    for (std::size_t j = 0; j < num; ++j) y[j] += x[i] * double{matrix[i * num + j]};
  }
  return y;
}

std::vector<double> inverse_transform(const std::vector<float>& inverse_transposed, const std::vector<double>& y) {
  const std::size_t num = y.size();
  std::vector<double> x(num, 0.0);
  for (std::size_t i = 0; i < num; ++i) {
    for (std::size_t j = 0; j < num; ++j) x[i] += y[j] * double{inverse_transposed[i * num + j]};
  }
  return x;
}

double metric_error(const SideRotation& side, const std::vector<double>& y, const std::vector<double>& y_hat) {
  const std::size_t num = y.size();
  double error = 0;
  for (std::size_t i = 0; i < num; ++i) {
    if (side.metric.empty()) {
      error += (y_hat[i] - y[i]) * (y_hat[i] - y[i]);
      continue;
    }
    for (std::size_t j = 0; j < num; ++j) {
      error += (y_hat[i] - y[i]) * double{side.metric[i * num + j]} * (y_hat[j] - y[j]);
    }
  }
  return error;
}

}  // namespace oscar::reference
