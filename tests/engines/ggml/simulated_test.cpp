// Simulated caches inside llama.cpp: exact rows within the windows, what the method reads back elsewhere.

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <oscar/codec.hpp>
#include <oscar/ggml.hpp>
#include <set>

#include "llama_fixture.hpp"

namespace oscar::testing {
namespace {

constexpr const char* kModel = "smollm2.gguf";
constexpr int kContext = 512;
constexpr int kSink = 4, kRecent = 64;
constexpr int kPrompt = 300, kScored = 24;  // the prompt is no multiple of a group
constexpr double kNoise = 0.008;            // of llama.cpp itself, as int2_test.cpp explains; mean over a few tokens

class SimulatedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = load_model(kModel);
    ASSERT_NE(model_, nullptr);
    tokens_ = passage_tokens(model_, kPrompt + kScored);
    const auto geometry = read_gguf_geometry(model_path(kModel));
    ASSERT_TRUE(geometry.has_value()) << geometry.error().message;
    const auto rotation = fit_rotation(*geometry, Method::kHadamard);
    ASSERT_TRUE(rotation.has_value()) << rotation.error().message;
    rotation_ = *rotation;
    layer_ = geometry->layers.front();
  }

  // A cache that keeps every row, the prompt read exactly.
  ContextPtr with_prompt() {
    ggml::CacheConfig config;
    config.rotation = rotation_;
    config.sink = kSink;
    config.recent = kRecent;
    config.keep_exact_rows = true;
    config.encode_on_store = false;
    cache_ = *ggml::configure(config);
    ContextPtr context(llama_init_from_model(model_, context_params(kContext)));
    cache_->set_exact_all(true);
    prefill(context.get(), {tokens_.begin(), tokens_.begin() + kPrompt});
    cache_->set_exact_all(false);
    cache_->set_exact_batch(false);
    cache_->set_encode_on_store(true);
    return context;
  }
  std::vector<Logits> scored(llama_context* context) {
    return decode(context, {tokens_.begin() + kPrompt, tokens_.end()}, kPrompt);
  }
  // With every row read as it was written; the cache then has the prompt again, and its own way of reading.
  std::vector<Logits> scored_exactly(llama_context* context) {
    cache_->set_exact_all(true);
    const auto exact = scored(context);
    llama_memory_seq_rm(llama_get_memory(context), 0, kPrompt, -1);
    cache_->set_exact_all(false);
    return exact;
  }
  static double mean_divergence(const std::vector<Logits>& reference, const std::vector<Logits>& logits) {
    double sum = 0;
    for (std::size_t i = 0; i < reference.size(); ++i) sum += divergence(reference[i], logits[i]);
    return reference.size() == logits.size() ? sum / static_cast<double>(reference.size()) : INFINITY;
  }
  void expect_no_error() const { EXPECT_TRUE(cache_->status().has_value()) << cache_->status().error().message; }
  int width() const { return layer_.num_kv_heads * layer_.head_dim; }

  llama_model* model_ = nullptr;
  std::vector<llama_token> tokens_;
  LayerGeometry layer_;
  std::shared_ptr<const RotationSet> rotation_;
  std::shared_ptr<ggml::Cache> cache_;
};

TEST_F(SimulatedTest, AMethodThatLosesNothingIsTheExactCache) {
  const ContextPtr context = with_prompt();
  ASSERT_NE(context, nullptr);
  const auto exact = scored_exactly(context.get());
  const auto keep = std::make_shared<ggml::Simulation>();
  keep->read_back = [](int, std::int32_t, int, float*, float*) {};
  ASSERT_TRUE(cache_->simulate(keep, kPrompt).has_value());
  EXPECT_LT(mean_divergence(exact, scored(context.get())), kNoise);
  expect_no_error();
}

TEST_F(SimulatedTest, TheProductsOwnCodecReadsLikeItsPages) {
  const ContextPtr context = with_prompt();
  ASSERT_NE(context, nullptr);
  ASSERT_TRUE(cache_->encode_again(rotation_, kPrompt).has_value());
  const auto pages = scored(context.get());
  llama_memory_seq_rm(llama_get_memory(context.get()), 0, kPrompt, -1);

  const auto simulation = std::make_shared<ggml::Simulation>();
  simulation->read_back = [this](int layer, std::int32_t, int num_rows, float* k, float* v) {
    const int dim = layer_.head_dim;
    const auto read_back = [&](const SideRotation& side, float* row) {
      std::vector<float> y(static_cast<std::size_t>(dim));
      std::vector<std::uint8_t> codes(y.size());
      RowParameters parameters;
      transform_rows(side.transform.data(), dim, row, 1, y.data(), Isa::kScalar);
      encode_rows(side, Quantizer::kMinMax, dim, y.data(), 1, codes.data(), &parameters, Isa::kScalar);
      decode_rows(side, ParameterFormat::kFloatPair, dim, codes.data(), &parameters, 1, y.data());
      inverse_transform_rows(side.inverse_transposed.data(), dim, y.data(), 1, row, Isa::kScalar);
    };
    for (int i = 0; i < num_rows; ++i) {
      for (int h = 0; h < layer_.num_kv_heads; ++h) {
        const HeadRotation& head = rotation_->layers.at(layer).heads[static_cast<std::size_t>(h)];
        read_back(head.key, k + i * width() + h * dim);
        read_back(head.value, v + i * width() + h * dim);
      }
    }
  };
  ASSERT_TRUE(cache_->simulate(simulation, kPrompt).has_value());
  const auto simulated = scored(context.get());
  llama_memory_seq_rm(llama_get_memory(context.get()), 0, kPrompt, -1);
  EXPECT_LT(mean_divergence(pages, simulated), kNoise);

  cache_->set_exact_all(true);
  EXPECT_GT(mean_divergence(scored(context.get()), simulated), 3 * kNoise);  // min/max costs far more than the noise
  expect_no_error();
}

TEST_F(SimulatedTest, GroupsComeWholeAndAligned) {
  constexpr int kGroup = 32;
  const ContextPtr context = with_prompt();
  ASSERT_NE(context, nullptr);
  const auto simulation = std::make_shared<ggml::Simulation>();
  std::mutex mutex;
  std::multiset<std::pair<int, int>> seen;  // first token and count, of layer 0
  simulation->group_tokens = kGroup;
  simulation->read_back = [&](int layer, std::int32_t first, int num_rows, float*, float*) {
    if (layer != 0) return;
    const std::lock_guard lock(mutex);
    seen.emplace(first, num_rows);
  };
  ASSERT_TRUE(cache_->simulate(simulation, kPrompt).has_value());
  const std::multiset<std::pair<int, int>> prompt = {{0, 64}, {64, 64}, {128, 64}, {192, 64}, {256, 44}};
  EXPECT_EQ(seen, prompt);
  seen.clear();
  scored(context.get());
  // The group that the prompt left unfinished begins at 288. llama.cpp hands the rows over in one batch.
  const std::multiset<std::pair<int, int>> after = {{288, kPrompt + kScored - 288}};
  EXPECT_EQ(seen, after);
  expect_no_error();
}

TEST_F(SimulatedTest, WhatAQueryReadsOutsideItsWindowIsSimulated) {
  // Rows of zeros outside the windows: with windows over everything nothing changes, with small ones all does.
  const ContextPtr context = with_prompt();
  ASSERT_NE(context, nullptr);
  const auto exact = scored_exactly(context.get());
  const auto zeros = std::make_shared<ggml::Simulation>();
  zeros->read_back = [this](int, std::int32_t, int num_rows, float* k, float* v) {
    std::fill_n(k, num_rows * width(), 0.0f);
    std::fill_n(v, num_rows * width(), 0.0f);
  };
  ASSERT_TRUE(cache_->simulate(zeros, kPrompt).has_value());
  ASSERT_TRUE(cache_->set_window(kSink, kContext).has_value());
  EXPECT_LT(mean_divergence(exact, scored(context.get())), kNoise);
  llama_memory_seq_rm(llama_get_memory(context.get()), 0, kPrompt, -1);
  ASSERT_TRUE(cache_->set_window(kSink, kRecent).has_value());
  EXPECT_GT(mean_divergence(exact, scored(context.get())), 10 * kNoise);
  expect_no_error();
}

TEST_F(SimulatedTest, NeedsEveryRowKept) {
  ggml::CacheConfig config;
  config.rotation = rotation_;
  config.simulation = std::make_shared<ggml::Simulation>();
  const auto refused = ggml::configure(config);
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().message.find("keep_exact_rows"), std::string::npos);
}

}  // namespace
}  // namespace oscar::testing
