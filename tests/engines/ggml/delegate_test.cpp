// Delegating mode: the hooks are right when a cache in our buffer, served by ggml's own CPU code, gives llama.cpp's own
// logits to the last bit.

#include <gtest/gtest.h>

#include <oscar/ggml.hpp>

#include "llama_fixture.hpp"

namespace oscar::testing {
namespace {

constexpr int kContext = 256;
constexpr int kPrompt = 140;  // two ubatches of 128
constexpr int kDecoded = 16;

class DelegateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = load_model("smollm2.gguf");
    ASSERT_NE(model_, nullptr);
    tokens_ = passage_tokens(model_, kPrompt + kDecoded);
    ASSERT_EQ(tokens_.size(), kPrompt + kDecoded);
  }

  ContextPtr stock(int sequences = 1, int num_threads = 1) const {
    llama_context_params params = stock_params(kContext * sequences, num_threads);
    params.n_seq_max = sequences;
    return ContextPtr(llama_init_from_model(model_, params));
  }
  ContextPtr delegating(int sequences = 1, int num_threads = 1) {
    const auto cache = ggml::configure({.mode = ggml::CacheMode::kDelegate, .num_threads = num_threads});
    EXPECT_TRUE(cache.has_value());
    cache_ = *cache;
    llama_context_params params = context_params(kContext * sequences, num_threads);
    params.n_seq_max = sequences;
    return ContextPtr(llama_init_from_model(model_, params));
  }
  std::vector<llama_token> prompt() const { return {tokens_.begin(), tokens_.begin() + kPrompt}; }

  // The tokens after the prompt, one a call.
  std::vector<Logits> decode_slowly(llama_context* context, int first = kPrompt, int sequence = 0) const {
    std::vector<Logits> logits;
    for (int i = 0; i < kDecoded; ++i) {
      for (Logits& row : decode(context, {tokens_[kPrompt + i]}, first + i, sequence)) logits.push_back(std::move(row));
    }
    return logits;
  }

  llama_model* model_ = nullptr;
  std::vector<llama_token> tokens_;
  std::shared_ptr<ggml::Cache> cache_;
};

class DelegateThreadsTest : public DelegateTest, public ::testing::WithParamInterface<int> {};

TEST_P(DelegateThreadsTest, PromptAndDecodeEqualStockToTheBit) {
  const ContextPtr expected = stock(1, GetParam()), actual = delegating(1, GetParam());
  ASSERT_NE(expected, nullptr);
  ASSERT_NE(actual, nullptr);
  EXPECT_EQ(prefill(expected.get(), prompt()), prefill(actual.get(), prompt()));
  EXPECT_EQ(decode_slowly(expected.get()), decode_slowly(actual.get()));
  EXPECT_TRUE(cache_->status().has_value());
}
INSTANTIATE_TEST_SUITE_P(Threads, DelegateThreadsTest, ::testing::Values(1, 2));

TEST_F(DelegateTest, RemovedTokensAreWrittenAgain) {
  const ContextPtr context = delegating();
  ASSERT_NE(context, nullptr);
  prefill(context.get(), prompt());
  const auto first = decode_slowly(context.get());
  ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(context.get()), 0, kPrompt, -1));
  EXPECT_EQ(first, decode_slowly(context.get()));
}

TEST_F(DelegateTest, SavedStateGoesOnInAnotherContext) {
  const ContextPtr context = delegating();
  ASSERT_NE(context, nullptr);
  prefill(context.get(), prompt());
  std::vector<std::uint8_t> state(llama_state_get_size(context.get()));
  ASSERT_EQ(llama_state_get_data(context.get(), state.data(), state.size()), state.size());

  const ContextPtr other = delegating();
  ASSERT_NE(other, nullptr);
  ASSERT_EQ(llama_state_set_data(other.get(), state.data(), state.size()), state.size());
  EXPECT_EQ(decode_slowly(context.get()), decode_slowly(other.get()));
}

TEST_F(DelegateTest, CopiedSequenceGoesOn) {
  const ContextPtr expected = stock(2), actual = delegating(2);
  ASSERT_NE(expected, nullptr);
  ASSERT_NE(actual, nullptr);
  for (llama_context* context : {expected.get(), actual.get()}) {
    prefill(context, prompt());
    llama_memory_seq_cp(llama_get_memory(context), 0, 1, -1, -1);
  }
  EXPECT_EQ(decode_slowly(expected.get(), kPrompt, 1), decode_slowly(actual.get(), kPrompt, 1));
  EXPECT_TRUE(cache_->status().has_value());
}

TEST_F(DelegateTest, ShiftedContextEqualsStockToTheBit) {
  const ContextPtr expected = stock(), actual = delegating();
  ASSERT_NE(expected, nullptr);
  ASSERT_NE(actual, nullptr);
  constexpr int kKept = 4, kDropped = 40;
  for (llama_context* context : {expected.get(), actual.get()}) {
    prefill(context, prompt());
    llama_memory_t memory = llama_get_memory(context);
    ASSERT_TRUE(llama_memory_seq_rm(memory, 0, kKept, kKept + kDropped));
    llama_memory_seq_add(memory, 0, kKept + kDropped, -1, -kDropped);
  }
  EXPECT_EQ(decode_slowly(expected.get(), kPrompt - kDropped), decode_slowly(actual.get(), kPrompt - kDropped));
}

TEST_F(DelegateTest, UsageIsThePrediction) {
  const ContextPtr context = delegating(2);
  ASSERT_NE(context, nullptr);
  ModelGeometry geometry;
  geometry.layers.assign(30, {.kind = LayerKind::kFull, .num_qo_heads = 9, .num_kv_heads = 3, .head_dim = 64});
  const auto predicted = ggml::predict_usage(geometry, nullptr, {.mode = ggml::CacheMode::kDelegate}, kContext, 2);
  ASSERT_TRUE(predicted.has_value());
  EXPECT_EQ(cache_->usage().buffer_bytes, predicted->buffer_bytes);
  EXPECT_EQ(cache_->usage().delegated_bytes, predicted->delegated_bytes);
  EXPECT_EQ(cache_->usage().delegated_layers, 30);
}

TEST_F(DelegateTest, AnUnconfiguredContextKeepsAnOrdinaryCache) {
  const ContextPtr expected = stock();
  const ContextPtr actual(llama_init_from_model(model_, context_params(kContext)));
  ASSERT_NE(actual, nullptr);
  EXPECT_EQ(prefill(expected.get(), prompt()), prefill(actual.get(), prompt()));
}

TEST_F(DelegateTest, TheRunningGgmlIsTheTestedOne) { EXPECT_EQ(ggml::version_warning(), ""); }

}  // namespace
}  // namespace oscar::testing
