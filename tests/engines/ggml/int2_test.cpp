// The 2-bit cache inside llama.cpp, against llama.cpp's own 16-bit cache and against itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <oscar/ggml.hpp>

#include "llama_fixture.hpp"
#include "nodes.hpp"

namespace oscar::testing {
namespace {

constexpr const char* kModel = "smollm2.gguf";
constexpr int kContext = 1024;
constexpr int kSink = 64, kRecent = 256;
constexpr int kLong = 420;  // tokens past both windows: the last query reads 100 of them from pages
constexpr int kDecoded = 6;

// llama.cpp multiplies 8-bit roundings of its activations with 4-bit weights, so that the last bit of a sum decides a
// rounding somewhere and the logits move: decoding the same text in ubatches of 32 instead of 128 moves stock's own
// distributions by 0.0035 nats on average and 0.016 at most, switching flash attention off by 0.0039 and 0.026. Nothing
// below this can be asked.
constexpr double kNoise = 0.008;        // mean over a few tokens
constexpr double kLargestNoise = 0.05;  // of one token

class Int2Test : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = load_model(kModel);
    ASSERT_NE(model_, nullptr);
    tokens_ = passage_tokens(model_, kLong + kDecoded);
    const auto geometry = read_gguf_geometry(model_path(kModel));
    ASSERT_TRUE(geometry.has_value()) << geometry.error().message;
    geometry_ = *geometry;
    const auto rotation = fit_rotation(geometry_, Method::kHadamard);
    ASSERT_TRUE(rotation.has_value()) << rotation.error().message;
    rotation_ = *rotation;
  }

  ggml::CacheConfig config() const {
    ggml::CacheConfig config;
    config.rotation = rotation_;
    config.sink = kSink;
    config.recent = kRecent;
    return config;
  }
  ContextPtr stock(int context = kContext) const {
    return ContextPtr(llama_init_from_model(model_, stock_params(context)));
  }
  // The cache's handle is left in cache_.
  ContextPtr packed(const ggml::CacheConfig& config, llama_context_params params = context_params(kContext)) {
    const auto cache = ggml::configure(config);
    EXPECT_TRUE(cache.has_value());
    cache_ = *cache;
    return ContextPtr(llama_init_from_model(model_, params));
  }
  std::vector<llama_token> first_tokens(int count) const { return {tokens_.begin(), tokens_.begin() + count}; }
  // The tokens after the long prompt, one a call.
  std::vector<Logits> go_on(llama_context* context, int first = kLong, int sequence = 0) const {
    std::vector<Logits> logits;
    for (int i = 0; i < kDecoded; ++i) {
      for (Logits& row : decode(context, {tokens_[kLong + i]}, first + i, sequence)) logits.push_back(std::move(row));
    }
    return logits;
  }
  static double mean_divergence(const std::vector<Logits>& reference, const std::vector<Logits>& logits) {
    double sum = 0;
    for (std::size_t i = 0; i < reference.size(); ++i) sum += divergence(reference[i], logits[i]);
    return reference.size() == logits.size() ? sum / static_cast<double>(reference.size()) : INFINITY;
  }
  void expect_no_error() const { EXPECT_TRUE(cache_->status().has_value()) << cache_->status().error().message; }

  llama_model* model_ = nullptr;
  std::vector<llama_token> tokens_;
  ModelGeometry geometry_;
  std::shared_ptr<const RotationSet> rotation_;
  std::shared_ptr<ggml::Cache> cache_;
};

// Outputs of the first layer's attention, whose inputs do not depend on earlier attention.
struct FirstAttention {
  std::vector<float> output;
  static bool on_node(ggml_tensor* node, bool ask, void* self) {
    if (ggml::op_of(node) != ggml::Op::kFlashAttention) return false;
    if (ggml::parse_cache_name(ggml::root_of(node->src[1])->name)->layer != 0) return false;
    if (ask) return true;
    std::vector<float>& output = static_cast<FirstAttention*>(self)->output;
    const std::size_t begin = output.size();
    output.resize(begin + ggml_nelements(node));
    ggml_backend_tensor_get(node, output.data() + begin, 0, ggml_nbytes(node));
    return true;
  }
};

TEST_F(Int2Test, FirstAttentionOverExactRowsEqualsStock) {
  // llama.cpp rounds queries to F16 and, one query at a time, adds up values in F16: 2^-11 of the largest, a few times
  // over.
  constexpr double kTolerance = 4e-3;
  FirstAttention expected, actual;
  llama_context_params params = stock_params(kContext);
  params.cb_eval = FirstAttention::on_node;
  params.cb_eval_user_data = &expected;
  const ContextPtr reference(llama_init_from_model(model_, params));
  params = context_params(kContext);
  params.cb_eval = FirstAttention::on_node;
  params.cb_eval_user_data = &actual;
  const ContextPtr context = packed(config(), params);
  ASSERT_NE(context, nullptr);
  for (llama_context* c : {reference.get(), context.get()}) {
    prefill(c, first_tokens(200));
    for (int i = 200; i < 210; ++i) decode(c, {tokens_[i]}, i);
  }
  ASSERT_EQ(expected.output.size(), actual.output.size());
  EXPECT_LT(largest_difference(expected.output, actual.output),
            kTolerance * std::abs(*std::max_element(expected.output.begin(), expected.output.end())));
  expect_no_error();
}

TEST_F(Int2Test, TokensInsideTheWindowsAreReadExactly) {
  const ContextPtr expected = stock(), actual = packed(config());
  ASSERT_NE(actual, nullptr);
  const auto reference = decode(expected.get(), first_tokens(kSink + kRecent), 0);
  const auto logits = decode(actual.get(), first_tokens(kSink + kRecent), 0);
  EXPECT_LT(mean_divergence(reference, logits), kNoise);
  for (int i = 0; i < kSink + kRecent; ++i) {
    ASSERT_LT(divergence(reference[i], logits[i]), kLargestNoise) << "token " << i;
  }
  expect_no_error();
}

TEST_F(Int2Test, EveryKeptRowReadExactlyMatchesStock) {
  ggml::CacheConfig keep = config();
  keep.keep_exact_rows = true;
  const ContextPtr expected = stock(), actual = packed(keep);
  ASSERT_NE(actual, nullptr);
  cache_->set_exact_all(true);
  prefill(expected.get(), first_tokens(kLong));
  prefill(actual.get(), first_tokens(kLong));
  EXPECT_LT(mean_divergence(go_on(expected.get()), go_on(actual.get())), kNoise);
  expect_no_error();
}

TEST_F(Int2Test, PagesAreReadPastTheWindows) {
  const ContextPtr expected = stock();
  prefill(expected.get(), first_tokens(kLong));
  const auto reference = go_on(expected.get());
  for (const Method method : {Method::kNaive, Method::kHadamard}) {
    rotation_ = *fit_rotation(geometry_, method);
    const ContextPtr actual = packed(config());
    ASSERT_NE(actual, nullptr);
    prefill(actual.get(), first_tokens(kLong));
    const auto logits = go_on(actual.get());
    for (const Logits& row : logits) {
      for (const float logit : row) ASSERT_TRUE(std::isfinite(logit));
    }
    const double kl = mean_divergence(reference, logits);
    // Measured on this passage: 0.39 naive, 0.037 Hadamard.
    if (method == Method::kNaive) {
      EXPECT_GT(kl, 2 * kNoise) << "nothing was read from a page";
    }
    EXPECT_LT(kl, method == Method::kNaive ? 2.0 : 0.3);
    expect_no_error();
  }
}

TEST_F(Int2Test, UsageIsThePrediction) {
  for (const int streams : {1, 3}) {
    for (const bool keep : {false, true}) {
      ggml::CacheConfig settings = config();
      settings.keep_exact_rows = keep;
      llama_context_params params = context_params(700 * streams);  // 768 cells after padding
      params.n_seq_max = streams;
      const ContextPtr context = packed(settings, params);
      ASSERT_NE(context, nullptr);
      const auto predicted = ggml::predict_usage(geometry_, rotation_.get(), settings, 700, streams);
      ASSERT_TRUE(predicted.has_value());
      const ggml::CacheUsage usage = cache_->usage();
      EXPECT_EQ(usage.buffer_bytes, predicted->buffer_bytes);
      EXPECT_EQ(usage.page_bytes, predicted->page_bytes);
      EXPECT_EQ(usage.window_bytes, predicted->window_bytes);
      EXPECT_EQ(usage.bookkeeping_bytes, predicted->bookkeeping_bytes);
      EXPECT_EQ(usage.elements, predicted->elements);
      EXPECT_EQ(usage.quantized_layers, llama_model_n_layer(model_));
      EXPECT_GE(usage.buffer_bytes, usage.page_bytes + usage.window_bytes);
    }
  }
}

// Finds the buffer behind the cache tensors, which llama.cpp has no call for.
struct BufferFinder {
  ggml_backend_buffer_t buffer = nullptr;
  std::uint8_t poison = 0;
  static bool on_node(ggml_tensor* node, bool ask, void* finder) {
    auto& self = *static_cast<BufferFinder*>(finder);
    if (!ask || ggml::op_of(node) != ggml::Op::kSetRows || self.buffer != nullptr) return false;
    self.buffer = ggml::root_of(node)->buffer;
    if (self.poison != 0) {
      std::memset(ggml_backend_buffer_get_base(self.buffer), self.poison, ggml_backend_buffer_get_size(self.buffer));
    }
    return false;
  }
};

TEST_F(Int2Test, UsageIsWhatLlamaCppAllocated) {
  BufferFinder finder;
  llama_context_params params = context_params(kContext);
  params.cb_eval = BufferFinder::on_node;
  params.cb_eval_user_data = &finder;
  const ContextPtr context = packed(config(), params);
  ASSERT_NE(context, nullptr);
  prefill(context.get(), first_tokens(4));
  ASSERT_NE(finder.buffer, nullptr);
  EXPECT_EQ(static_cast<std::int64_t>(ggml_backend_buffer_get_size(finder.buffer)), cache_->usage().buffer_bytes);
}

TEST_F(Int2Test, WhatTheMemoryHeldBeforeDoesNotMatter) {
  const ContextPtr clean = packed(config());
  BufferFinder finder{.poison = 0xFF};
  llama_context_params params = context_params(kContext);
  params.cb_eval = BufferFinder::on_node;
  params.cb_eval_user_data = &finder;
  const ContextPtr poisoned = packed(config(), params);
  ASSERT_NE(clean, nullptr);
  ASSERT_NE(poisoned, nullptr);
  EXPECT_EQ(prefill(clean.get(), first_tokens(kLong)), prefill(poisoned.get(), first_tokens(kLong)));
  EXPECT_EQ(go_on(clean.get()), go_on(poisoned.get()));
}

TEST_F(Int2Test, RemovedTokensAreWrittenAgain) {
  const ContextPtr context = packed(config());
  ASSERT_NE(context, nullptr);
  // Tokens that are taken back have pushed as many rows out of the ring; with that many rows to spare nothing is
  // missing.
  ASSERT_TRUE(cache_->set_window(kSink, kRecent - kDecoded).has_value());
  prefill(context.get(), first_tokens(kLong));
  const auto first = go_on(context.get());
  ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(context.get()), 0, kLong, -1));
  EXPECT_EQ(first, go_on(context.get()));
  // Without, a few rows are read from pages: a little accuracy, nothing else.
  ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(context.get()), 0, kLong, -1));
  ASSERT_TRUE(cache_->set_window(kSink, kRecent).has_value());
  EXPECT_LT(mean_divergence(first, go_on(context.get())), kLargestNoise);
}

TEST_F(Int2Test, ANewTextAfterAClearIsLikeAFreshContext) {
  const ContextPtr used = packed(config()), fresh = packed(config());
  ASSERT_NE(used, nullptr);
  ASSERT_NE(fresh, nullptr);
  const std::vector<llama_token> other(tokens_.rbegin(), tokens_.rbegin() + 350);
  prefill(used.get(), other);
  llama_memory_clear(llama_get_memory(used.get()), true);
  EXPECT_EQ(prefill(used.get(), first_tokens(kLong)), prefill(fresh.get(), first_tokens(kLong)));
}

TEST_F(Int2Test, SavedStateGoesOnInAnotherContext) {
  const ContextPtr context = packed(config());
  ASSERT_NE(context, nullptr);
  prefill(context.get(), first_tokens(kLong));
  std::vector<std::uint8_t> state(llama_state_get_size(context.get()));
  ASSERT_EQ(llama_state_get_data(context.get(), state.data(), state.size()), state.size());

  const ContextPtr other = packed(config());
  ASSERT_NE(other, nullptr);
  ASSERT_EQ(llama_state_set_data(other.get(), state.data(), state.size()), state.size());
  EXPECT_EQ(go_on(context.get()), go_on(other.get()));
  expect_no_error();
}

TEST_F(Int2Test, CopiedSequenceGoesOnLikeItsSource) {
  llama_context_params params = context_params(2 * kContext);
  params.n_seq_max = 2;
  const ContextPtr context = packed(config(), params);
  ASSERT_NE(context, nullptr);
  prefill(context.get(), first_tokens(kLong), 0);
  llama_memory_seq_cp(llama_get_memory(context.get()), 0, 1, -1, -1);
  EXPECT_EQ(go_on(context.get(), kLong, 0), go_on(context.get(), kLong, 1));
  expect_no_error();
}

TEST_F(Int2Test, SequencesDecodedTogetherAreIndependent) {
  llama_context_params params = context_params(2 * kContext);
  params.n_seq_max = 2;
  const ContextPtr together = packed(config(), params);
  const ContextPtr alone = packed(config());
  ASSERT_NE(together, nullptr);
  ASSERT_NE(alone, nullptr);
  constexpr int kFirst = 400, kSecond = 340;
  const std::vector<llama_token> second(tokens_.begin() + 100, tokens_.begin() + 100 + kSecond);
  prefill(together.get(), first_tokens(kFirst), 0);
  prefill(together.get(), second, 1);
  // One token of each sequence in one batch.
  llama_batch batch = llama_batch_init(2, 0, 1);
  batch.n_tokens = 2;
  for (int i = 0; i < 2; ++i) {
    batch.token[i] = tokens_[kLong];
    batch.pos[i] = i == 0 ? kFirst : kSecond;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = i;
    batch.logits[i] = 1;
  }
  ASSERT_EQ(llama_decode(together.get(), batch), 0);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model_));
  for (int i = 0; i < 2; ++i) {
    const float* row = llama_get_logits_ith(together.get(), i);
    llama_memory_clear(llama_get_memory(alone.get()), true);
    prefill(alone.get(), i == 0 ? first_tokens(kFirst) : second);
    const auto expected = decode(alone.get(), {tokens_[kLong]}, i == 0 ? kFirst : kSecond);
    EXPECT_LT(divergence(expected[0], Logits(row, row + vocabulary)), kLargestNoise) << "sequence " << i;
  }
  llama_batch_free(batch);
  expect_no_error();
}

TEST_F(Int2Test, ContextShiftKeepsTheText) {
  const ContextPtr expected = stock(), actual = packed(config());
  ASSERT_NE(actual, nullptr);
  constexpr int kKept = 4, kDropped = 100;
  for (llama_context* context : {expected.get(), actual.get()}) {
    prefill(context, first_tokens(kSink + kRecent));
    llama_memory_t memory = llama_get_memory(context);
    ASSERT_TRUE(llama_memory_seq_rm(memory, 0, kKept, kKept + kDropped));
    llama_memory_seq_add(memory, 0, kKept + kDropped, -1, -kDropped);
  }
  // Everything was exact and stays exact: a shift turns F16 rows and rounds them once more, in both.
  const int first = kSink + kRecent - kDropped;
  const auto reference = go_on(expected.get(), first), logits = go_on(actual.get(), first);
  EXPECT_LT(mean_divergence(reference, logits), kNoise);
  expect_no_error();
}

TEST_F(Int2Test, ABatchMayFillHoles) {
  const ContextPtr expected = stock(), actual = packed(config());
  ASSERT_NE(actual, nullptr);
  constexpr int kFilled = 300;
  std::vector<std::vector<Logits>> logits;
  for (llama_context* context : {expected.get(), actual.get()}) {
    prefill(context, first_tokens(kFilled));
    // Cells 200 to 202 and 250 are free; the next batch takes them first and goes on behind the last token.
    ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(context), 0, 200, 203));
    ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(context), 0, 250, 251));
    logits.push_back(decode(context, {tokens_.begin() + kFilled, tokens_.begin() + kFilled + 8}, kFilled));
    logits.push_back(decode(context, {tokens_[kFilled + 8]}, kFilled + 8));
  }
  EXPECT_LT(mean_divergence(logits[0], logits[2]), kNoise);
  EXPECT_LT(mean_divergence(logits[1], logits[3]), kLargestNoise);
  expect_no_error();
}

TEST_F(Int2Test, TheBatchIsReadExactlyUnlessTurnedOff) {
  rotation_ = *fit_rotation(geometry_, Method::kNaive);
  llama_context_params params = stock_params(kContext);
  params.n_ubatch = 512;  // the whole prompt at once
  const ContextPtr expected(llama_init_from_model(model_, params));
  const Logits reference = prefill(expected.get(), first_tokens(kLong));
  params.offload_kqv = true;
  double cost[2];
  for (const bool exact_batch : {true, false}) {
    ggml::CacheConfig settings = config();
    settings.exact_batch = exact_batch;
    const ContextPtr actual = packed(settings, params);
    ASSERT_NE(actual, nullptr);
    cost[exact_batch ? 0 : 1] = divergence(reference, prefill(actual.get(), first_tokens(kLong)));
    expect_no_error();
  }
  EXPECT_LT(cost[0], kLargestNoise);
  EXPECT_GT(cost[1], kLargestNoise);
}

TEST_F(Int2Test, EncodingAgainEqualsEncodingOnStore) {
  ggml::CacheConfig keep = config();
  keep.keep_exact_rows = true;
  keep.encode_on_store = false;
  const ContextPtr later = packed(keep);
  const auto handle = cache_;
  keep.encode_on_store = true;
  keep.exact_batch = false;
  const ContextPtr at_once = packed(keep);
  ASSERT_NE(later, nullptr);
  ASSERT_NE(at_once, nullptr);

  handle->set_exact_all(true);
  prefill(later.get(), first_tokens(kLong));
  handle->set_exact_all(false);
  handle->set_exact_batch(false);
  // The keys of layers past the first depend on what attention read, so compare with the same reads.
  cache_->set_exact_all(true);
  prefill(at_once.get(), first_tokens(kLong));
  cache_->set_exact_all(false);

  const Status status = handle->encode_again(rotation_, kLong);
  ASSERT_TRUE(status.has_value()) << status.error().message;
  handle->set_encode_on_store(true);
  EXPECT_EQ(go_on(later.get()), go_on(at_once.get()));
  ASSERT_TRUE(handle->encode_again(*fit_rotation(geometry_, Method::kNaive), kLong).has_value());
  ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(later.get()), 0, kLong, -1));
  ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(at_once.get()), 0, kLong, -1));
  EXPECT_NE(go_on(later.get()), go_on(at_once.get()));
}

TEST_F(Int2Test, EncodingAgainNeedsEveryRow) {
  ggml::CacheConfig keep = config();
  const ContextPtr without = packed(keep);
  EXPECT_EQ(cache_->encode_again(rotation_, 10).error().code, ErrorCode::kInvalidArgument);
  keep.keep_exact_rows = true;
  const ContextPtr context = packed(keep);
  ASSERT_NE(context, nullptr);
  prefill(context.get(), first_tokens(20));
  EXPECT_TRUE(cache_->encode_again(rotation_, 20).has_value());
  EXPECT_EQ(cache_->encode_again(rotation_, 21).error().code, ErrorCode::kInvalidArgument);
  ModelGeometry other = geometry_;
  other.layers.pop_back();
  EXPECT_EQ(cache_->encode_again(*fit_rotation(other, Method::kHadamard), 20).error().code, ErrorCode::kMismatch);
}

TEST_F(Int2Test, ASmallerWindowCostsAccuracy) {
  const ContextPtr expected = stock(), actual = packed(config());
  ASSERT_NE(actual, nullptr);
  prefill(expected.get(), first_tokens(kLong));
  prefill(actual.get(), first_tokens(kLong));
  const auto reference = go_on(expected.get()), with_windows = go_on(actual.get());
  ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(actual.get()), 0, kLong, -1));
  ASSERT_TRUE(cache_->set_window(0, 0).has_value());
  EXPECT_GT(mean_divergence(reference, go_on(actual.get())), mean_divergence(reference, with_windows));
  EXPECT_EQ(cache_->set_window(kSink + 1, kRecent).error().code, ErrorCode::kInvalidArgument);
}

TEST_F(Int2Test, TransposedValuesAreRefusedWithTheRemedy) {
  llama_context_params params = context_params(kContext);
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const ContextPtr context = packed(config(), params);
  const Status status = cache_->status();
  ASSERT_FALSE(status.has_value());
  EXPECT_NE(status.error().message.find("-fa on"), std::string::npos) << status.error().message;
  if (context == nullptr) return;
  std::vector<llama_token> token = first_tokens(1);
  EXPECT_NE(llama_decode(context.get(), llama_batch_get_one(token.data(), 1)), 0);
}

TEST_F(Int2Test, AnotherModelsRotationIsRefused) {
  ModelGeometry other = geometry_;
  for (LayerGeometry& layer : other.layers) layer.num_kv_heads = layer.num_qo_heads;
  rotation_ = *fit_rotation(other, Method::kHadamard);
  EXPECT_EQ(packed(config()), nullptr);
  ASSERT_FALSE(cache_->status().has_value());
  EXPECT_EQ(cache_->status().error().code, ErrorCode::kMismatch);
}

TEST_F(Int2Test, AQuantizedCacheTypeIsRefused) {
  llama_context_params params = context_params(kContext);
  params.type_k = params.type_v = GGML_TYPE_Q8_0;
  EXPECT_EQ(packed(config(), params), nullptr);
  EXPECT_EQ(cache_->status().error().code, ErrorCode::kUnsupported);
}

TEST_F(Int2Test, BadSettingsAreRefused) {
  ggml::CacheConfig bad = config();
  bad.rotation = nullptr;
  EXPECT_EQ(ggml::configure(bad).error().code, ErrorCode::kInvalidArgument);
  bad = config();
  bad.sink = -1;
  EXPECT_EQ(ggml::configure(bad).error().code, ErrorCode::kInvalidArgument);
  bad = config();
  bad.num_threads = 0;
  EXPECT_EQ(ggml::configure(bad).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(ggml::predict_usage(geometry_, nullptr, config(), 1024, 1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(ggml::predict_usage(geometry_, rotation_.get(), config(), 0, 1).error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace oscar::testing
