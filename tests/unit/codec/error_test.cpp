// Three errors a quantizer, each against a named maximum: of the round trip, against the double reference, and of dot
// products. Gaussian rows of 128, the figures of the literature's min/max store and of least squares.

#include <gtest/gtest.h>

#include <cmath>
#include <oscar/codec.hpp>
#include <string>

#include "reference/codec.hpp"
#include "support/isas.hpp"
#include "support/rows.hpp"

namespace oscar {
namespace {

constexpr int kHeadDim = 128;
constexpr int kNumRows = 2000;
constexpr double kTolerance =
    0.002;  // of the round trip: two standard errors of min/max over kNumRows rows, more of the others
constexpr double kDotShare = 1.1;         // dot products err by sqrt(round trip / head_dim), and a tenth
constexpr double kReferenceError = 1e-4;  // share of the variance; a code that differs costs about 1e-4 of its row

struct Expected {
  const char* name;
  Quantizer quantizer;
  float clip_ratio;
  double round_trip;  // share of the row's variance
};
constexpr Expected kTable[] = {
    {"min_max", Quantizer::kMinMax, 0, .250},
    {"min_max_clip_96", Quantizer::kMinMax, .96f, .156},
    {"min_max_clip_92", Quantizer::kMinMax, .92f, .1275},
    {"least_squares", Quantizer::kLeastSquares, 0, .113},  // .117 before the refits
    {"feedback", Quantizer::kFeedback, 0, .1145},
};
void PrintTo(const Expected& expected, std::ostream* out) { *out << expected.name; }

// Plain least squares and no feedback: M = 1, T = 0.
SideRotation identity_side(float clip_ratio) {
  SideRotation side;
  side.feedback.assign(kHeadDim * kHeadDim, 0);
  side.metric.assign(kHeadDim * kHeadDim, 0);
  for (int i = 0; i < kHeadDim; ++i) side.metric[i * kHeadDim + i] = 1;
  side.offset_spread = 1 / std::sqrt(static_cast<float>(kHeadDim));  // deviation of a row's mean
  side.clip_ratio = clip_ratio;
  return side;
}

class QuantizerError : public testing::TestWithParam<Expected> {};

TEST_P(QuantizerError, StaysBelowTheThreeMaxima) {
  const Expected& expected = GetParam();
  const SideRotation side = identity_side(expected.clip_ratio);
  const ParameterFormat format =
      expected.quantizer == Quantizer::kMinMax ? ParameterFormat::kFloatPair : ParameterFormat::kLog8;
  std::mt19937 random(11);
  const std::vector<float> y = test::gaussian(random, std::size_t{kNumRows} * kHeadDim);
  const std::vector<float> q = test::gaussian(random, y.size());
  for (const Isa isa : test::isas_to_test()) {
    std::vector<std::uint8_t> codes(y.size());
    std::vector<RowParameters> parameters(kNumRows);
    std::vector<float> y_hat(y.size());
    encode_rows(side, expected.quantizer, kHeadDim, y.data(), kNumRows, codes.data(), parameters.data(), isa);
    decode_rows(side, format, kHeadDim, codes.data(), parameters.data(), kNumRows, y_hat.data());
    double round_trip = 0, dot_error = 0, reference_error = 0;
    for (int row = 0; row < kNumRows; ++row) {
      const std::vector<double> exact(y.begin() + row * kHeadDim, y.begin() + (row + 1) * kHeadDim);
      const std::vector<double> reference =
          reference::decode(side, format, reference::encode(side, expected.quantizer, exact));
      double dot = 0;
      for (int j = 0; j < kHeadDim; ++j) {
        const int i = row * kHeadDim + j;
        const double error = double{y_hat[i]} - exact[j];
        round_trip += error * error;
        dot += error * q[i];
        reference_error += (y_hat[i] - reference[j]) * (y_hat[i] - reference[j]);
      }
      dot_error += dot * dot / kHeadDim;
    }
    const double num = static_cast<double>(y.size());
    std::cout << expected.name << " " << isa_name(isa) << ": round trip " << round_trip / num << ", dot product "
              << std::sqrt(dot_error / num) << ", against the reference " << reference_error / num << "\n";
    EXPECT_NEAR(round_trip / num, expected.round_trip, kTolerance) << isa_name(isa);
    EXPECT_LE(std::sqrt(dot_error / num), kDotShare * std::sqrt(expected.round_trip / kHeadDim)) << isa_name(isa);
    EXPECT_LE(reference_error / num, kReferenceError) << isa_name(isa);
  }
}
INSTANTIATE_TEST_SUITE_P(Gaussian, QuantizerError, testing::ValuesIn(kTable),
                         [](const auto& param) { return std::string(param.param.name); });

// What the metric is for: with correlated errors feedback beats rounding by least squares.
TEST(QuantizerError, FeedbackCostsLessInTheMetricThanLeastSquares) {
  constexpr double kGain = 0.8;
  std::mt19937 random(12);
  SideRotation side = test::random_side(random, kHeadDim);
  side.offset_center = 0;
  double errors[2] = {0, 0};
  for (int row = 0; row < 200; ++row) {
    const std::vector<float> y = test::gaussian(random, kHeadDim);
    const std::vector<double> exact(y.begin(), y.end());
    for (const Quantizer quantizer : {Quantizer::kLeastSquares, Quantizer::kFeedback}) {
      std::vector<std::uint8_t> codes(kHeadDim);
      RowParameters parameters;
      std::vector<float> y_hat(kHeadDim);
      encode_rows(side, quantizer, kHeadDim, y.data(), 1, codes.data(), &parameters, Isa::kScalar);
      decode_rows(side, ParameterFormat::kLog8, kHeadDim, codes.data(), &parameters, 1, y_hat.data());
      errors[quantizer == Quantizer::kFeedback] += reference::metric_error(side, exact, {y_hat.begin(), y_hat.end()});
    }
  }
  EXPECT_LT(errors[1], kGain * errors[0]);
}

}  // namespace
}  // namespace oscar
