// A whole model's simulator: names, bits, errors that fall from ours to ours-k4, and what each needs.

#include "rivals/simulator.hpp"

#include <gtest/gtest.h>

#include <oscar/cache.hpp>
#include <oscar/covariance.hpp>

#include "support/rows.hpp"
#include "support/statistics.hpp"

namespace oscar::rivals {
namespace {

constexpr int kRows = 128;

class SimulatorTest : public ::testing::Test {
 protected:
  SimulatorTest() {
    const ModelStatistics statistics = test::statistics_of(model_);
    geometry_ = statistics.geometry;
    inputs_.geometry = &geometry_;
    FitOptions fit;
    ours_ = *fit_rotation(statistics, fit);
    fit.method = Method::kPublished;
    published_ = *fit_rotation(statistics, fit);
    for (int layer = 0; layer < model_.num_layers; ++layer) inputs_.key_errors[layer] = {1.0 + layer, 5.0 + layer};
  }

  std::shared_ptr<const Simulator> make(std::string_view name) {
    inputs_.rotation = find_rival(name)->rotation == Method::kPublished ? published_ : ours_;
    const auto made = Simulator::make(name, inputs_);
    EXPECT_TRUE(made.has_value()) << made.error().message;
    return *made;
  }

  // Squared distance of the keys read back, summed over layers.
  double key_error(std::string_view name) {
    const auto simulator = make(name);
    double sum = 0;
    for (int layer = 0; layer < model_.num_layers; ++layer) {
      const Samples samples = test::samples_of(model_, layer);
      std::vector<float> k(samples.k.begin(), samples.k.begin() + kRows * width()), v(k.size());
      const std::vector<float> exact = k;
      simulator->read_back(layer, 0, kRows, k.data(), v.data());
      for (std::size_t i = 0; i < k.size(); ++i) sum += (double{k[i]} - exact[i]) * (double{k[i]} - exact[i]);
    }
    return sum;
  }
  int width() const { return model_.num_kv_heads * model_.head_dim; }

  using Samples = test::Samples;
  test::SmallModel model_;  // 2 layers of 2 KV heads, head_dim 16
  ModelGeometry geometry_;
  std::shared_ptr<const RotationSet> ours_, published_;
  RivalInputs inputs_;
};

TEST_F(SimulatorTest, BitsAreCodesAndParameters) {
  EXPECT_DOUBLE_EQ(make("kivi")->bits_per_element(), (3 + 2 + 32.0 / 16) / 2);  // 16 channels are half a group
  EXPECT_DOUBLE_EQ(make("turbo2")->bits_per_element(), 3);
  EXPECT_DOUBLE_EQ(make("turbo3")->bits_per_element(), 4);
  EXPECT_DOUBLE_EQ(make("published-lloyd-max")->bits_per_element(), 6);
  EXPECT_DOUBLE_EQ(make("ours-k3")->bits_per_element(), 3.5);
  EXPECT_DOUBLE_EQ(make("ours-k4")->bits_per_element(), 4);
  EXPECT_DOUBLE_EQ(make("ours-mix25")->bits_per_element(), 3.125);  // one key head of four has a bit more
  EXPECT_DOUBLE_EQ(make("ours-1.6")->bits_per_element(), 2.5);
  EXPECT_DOUBLE_EQ(make("ours-nom")->bits_per_element(), 2.75);
}

TEST_F(SimulatorTest, WindowsAreCountedAsThePagesCountThem) {
  KvSpec spec;
  spec.num_kv_heads = model_.num_kv_heads;
  spec.head_dim = model_.head_dim;
  const auto turbo = make("turbo2");
  for (const std::int64_t context : {100, 8192, 131072}) {
    const double windows = spec.bits_per_element(context) - spec.page_bits_per_element();
    EXPECT_NEAR(turbo->bits_per_element(64, 256, context), turbo->bits_per_element() + windows, 1e-12) << context;
  }
}

TEST_F(SimulatorTest, MoreBitsForKeysLeaveLessError) {
  const double two = key_error("ours-1.6"), mixed = key_error("ours-mix25"), three = key_error("ours-k3"),
               four = key_error("ours-k4");
  EXPECT_LT(mixed, two);
  EXPECT_LT(three, mixed);
  EXPECT_LT(four, three);
  EXPECT_LT(key_error("turbo3"), key_error("turbo2"));
}

TEST_F(SimulatorTest, EveryRivalReadsBackSomethingNearTheRows) {
  const Samples samples = test::samples_of(model_, 0);
  double energy = 0;
  for (int i = 0; i < kRows * width(); ++i) energy += 2 * double{samples.k[i]} * samples.k[i];  // two layers alike
  for (const Rival& rival : rivals()) EXPECT_LT(key_error(rival.name), 0.5 * energy) << rival.name;
}

TEST_F(SimulatorTest, OnlyTheWholeGroupsOfKiviReachAcrossTokens) {
  EXPECT_EQ(make("kivi")->group_tokens(), 32);
  EXPECT_EQ(make("ours-k3")->group_tokens(), 1);
}

TEST_F(SimulatorTest, WhatIsMissingIsNamed) {
  EXPECT_EQ(Simulator::make("nothing", inputs_).error().code, ErrorCode::kInvalidArgument);
  inputs_.rotation = published_;
  EXPECT_NE(Simulator::make("ours-k3", inputs_).error().message.find("method ours"), std::string::npos);
  inputs_.rotation = ours_;
  inputs_.key_errors.clear();
  EXPECT_NE(Simulator::make("ours-mix25", inputs_).error().message.find("key error"), std::string::npos);
}

}  // namespace
}  // namespace oscar::rivals
