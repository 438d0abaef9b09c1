// The predicted error of a rotation against what the encoder leaves on rows of the same distribution.

#include <gtest/gtest.h>

#include <cmath>
#include <oscar/codec.hpp>
#include <oscar/covariance.hpp>
#include <oscar/rotation.hpp>
#include <random>

#include "predicted_error.hpp"

namespace oscar::tool {
namespace {

constexpr int kHeadDim = 64;
constexpr int kNumTokens = 1024;
// The prediction takes rows for Gaussian, codes for uncorrelated and the sample's moments for the truth.
constexpr double kModelError = 0.15;

struct Sample {
  ModelStatistics statistics;
  std::vector<float> values;         // [kNumTokens, kHeadDim]
  std::vector<double> channel_size;  // [kHeadDim], of the metric too
};

// One layer and head; channels of unequal size, values with a mean.
Sample make_sample() {
  Sample sample;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> q(kNumTokens * kHeadDim);
  std::vector<float> k(kNumTokens * kHeadDim);
  sample.values.resize(kNumTokens * kHeadDim);
  for (int c = 0; c < kHeadDim; ++c) sample.channel_size.push_back(1.0 + 0.1 * c);
  for (std::size_t i = 0; i < q.size(); ++i) {
    const auto size = static_cast<float>(sample.channel_size[i % kHeadDim]);
    q[i] = normal(random);
    k[i] = normal(random) * size;
    sample.values[i] = normal(random) * size + 0.5F;
  }
  RopeSpec rope{.order = RopeOrder::kHalves, .rotary_dim = kHeadDim, .inv_freq = {}};
  for (int p = 0; p < kHeadDim / 2; ++p) rope.inv_freq.push_back(std::pow(10000.0, -2.0 * p / kHeadDim));
  ModelStatistics& s = sample.statistics;
  s.geometry.architecture = "test";
  s.geometry.context_length = 4096;
  s.geometry.fingerprint = std::string(32, '0');
  s.geometry.layers = {{.kind = LayerKind::kFull, .num_qo_heads = 1, .num_kv_heads = 1, .head_dim = kHeadDim}};
  s.num_tokens = kNumTokens;
  const SampleBlock block{.layer = 0,
                          .first_position = 0,
                          .num_tokens = kNumTokens,
                          .num_qo_heads = 1,
                          .num_kv_heads = 1,
                          .head_dim = kHeadDim,
                          .q = q.data(),
                          .k = k.data(),
                          .v = sample.values.data(),
                          .rope = &rope};
  EXPECT_TRUE(accumulate(s.layers[0], block));
  auto& gram = s.layers[0].heads[0].output_gram;
  gram.assign(kHeadDim * kHeadDim, 0.0);
  for (int c = 0; c < kHeadDim; ++c) gram[static_cast<std::size_t>(c) * (kHeadDim + 1)] = 1.0 / sample.channel_size[c];
  return sample;
}

// Error energy over signal energy that the encoder leaves on the values, in the metric of the sample.
double measured_value_error(const Sample& sample, const RotationSet& set) {
  const SideRotation& side = set.layers.at(0).heads[0].value;
  std::vector<float> y(sample.values.size());
  std::vector<float> decoded(y.size());
  std::vector<float> back(y.size());
  std::vector<std::uint8_t> codes(y.size());
  std::vector<RowParameters> parameters(kNumTokens);
  transform_rows(side.transform.data(), kHeadDim, sample.values.data(), kNumTokens, y.data(), Isa::kScalar);
  encode_rows(side, set.quantizer(), kHeadDim, y.data(), kNumTokens, codes.data(), parameters.data(), Isa::kScalar);
  decode_rows(side, set.parameter_format(), kHeadDim, codes.data(), parameters.data(), kNumTokens, decoded.data());
  inverse_transform_rows(side.inverse_transposed.data(), kHeadDim, decoded.data(), kNumTokens, back.data(),
                         Isa::kScalar);
  double error = 0;
  double signal = 0;
  for (std::size_t i = static_cast<std::size_t>(kSkippedSinkTokens) * kHeadDim; i < back.size(); ++i) {
    const double weight = 1.0 / sample.channel_size[i % kHeadDim];
    const double difference = static_cast<double>(back[i]) - static_cast<double>(sample.values[i]);
    error += weight * difference * difference;
    signal += weight * static_cast<double>(sample.values[i]) * static_cast<double>(sample.values[i]);
  }
  return error / signal;
}

class PredictedErrorTest : public ::testing::TestWithParam<Method> {};

TEST_P(PredictedErrorTest, AgreesWithTheEncoderOnGaussianValues) {
  const Sample sample = make_sample();
  FitOptions options;
  options.method = GetParam();
  const auto set = fit_rotation(sample.statistics, options);
  ASSERT_TRUE(set) << set.error().message;
  const auto predicted = predict_errors(sample.statistics, **set);
  ASSERT_EQ(predicted.size(), 1U);
  EXPECT_GT(predicted[0].key, 0);
  const double measured = measured_value_error(sample, **set);
  EXPECT_NEAR(predicted[0].value / measured, 1, kModelError)
      << "predicted " << predicted[0].value << ", measured " << measured;
}

INSTANTIATE_TEST_SUITE_P(Methods, PredictedErrorTest,
                         ::testing::Values(Method::kOurs, Method::kOursFast, Method::kPublishedPerHead),
                         [](const auto& info) {
                           std::string name(method_name(info.param));
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace oscar::tool
