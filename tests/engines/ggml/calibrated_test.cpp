// The whole way on both orders of RoPE channels: samples of a model, a fit, and the fitted cache inside the same model.
// The page mean and the transforms only help when positions, frequencies and channel orders agree everywhere.

#include <gtest/gtest.h>

#include <map>
#include <oscar/covariance.hpp>
#include <oscar/ggml.hpp>

#include "llama_fixture.hpp"

namespace oscar::testing {
namespace {

constexpr int kContext = 512;
constexpr int kSampled = 300;
constexpr int kPrompt = 300;
constexpr int kScored = 10;
constexpr int kSink = 64, kRecent = 64;  // so that most keys are read from pages

struct Case {
  const char* name;
  const char* model;
  double bound;  // mean KL to stock, nats
};

// One model's samples and stock logits, shared by its tests.
struct Calibration {
  llama_model* model = nullptr;
  std::vector<llama_token> tokens;
  ModelStatistics statistics;
  std::vector<Logits> reference;

  std::vector<llama_token> prompt() const { return {tokens.begin(), tokens.begin() + kPrompt}; }
  std::vector<llama_token> scored() const { return {tokens.begin() + kPrompt, tokens.end()}; }
};

void calibrate(const std::string& file, Calibration& result) {
  result.model = load_model(file);
  ASSERT_NE(result.model, nullptr);
  result.tokens = passage_tokens(result.model, kPrompt + kScored);
  const auto geometry = read_gguf_geometry(model_path(file));
  ASSERT_TRUE(geometry.has_value()) << geometry.error().message;
  ModelStatistics& statistics = result.statistics;
  statistics.geometry = *geometry;
  const Status sampled = ggml::sample_model(
      result.model, {{result.tokens.begin(), result.tokens.begin() + kSampled}}, {}, statistics.geometry,
      [&](const SampleBlock& block) { return accumulate(statistics.layers[block.layer], block); });
  ASSERT_TRUE(sampled.has_value()) << sampled.error().message;
  statistics.num_tokens = kSampled;
  ASSERT_TRUE(ggml::add_output_gram(model_path(file), statistics).has_value());

  const ContextPtr stock(llama_init_from_model(result.model, stock_params(kContext)));
  prefill(stock.get(), result.prompt());
  result.reference = decode(stock.get(), result.scored(), kPrompt);
}

class CalibratedTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    static std::map<std::string, Calibration> calibrations;
    Calibration& shared = calibrations[GetParam().model];
    if (shared.reference.empty()) calibrate(GetParam().model, shared);
    ASSERT_EQ(shared.reference.size(), static_cast<std::size_t>(kScored));
    calibration_ = &shared;
  }

  llama_model* model() const { return calibration_->model; }
  std::shared_ptr<const RotationSet> fit(Method method) const {
    const auto rotation = fit_rotation(calibration_->statistics, {.method = method});
    EXPECT_TRUE(rotation.has_value()) << rotation.error().message;
    return rotation ? *rotation : nullptr;
  }
  ggml::CacheConfig config(Method method) const {
    ggml::CacheConfig config;
    config.rotation = fit(method);
    config.sink = kSink;
    config.recent = kRecent;
    return config;
  }
  double mean_divergence(llama_context* context) const {
    const auto logits = decode(context, calibration_->scored(), kPrompt);
    double sum = 0;
    for (int i = 0; i < kScored; ++i) sum += divergence(calibration_->reference[i], logits.at(i));
    return sum / kScored;
  }
  double divergence_of(Method method) const {
    const auto cache = ggml::configure(config(method));
    EXPECT_TRUE(cache.has_value());
    const ContextPtr context(llama_init_from_model(model(), context_params(kContext)));
    EXPECT_NE(context, nullptr);
    prefill(context.get(), calibration_->prompt());
    const double result = mean_divergence(context.get());
    EXPECT_TRUE((*cache)->status().has_value());
    RecordProperty(std::string(method_name(method)), std::to_string(result));
    return result;
  }

  const Calibration* calibration_ = nullptr;
};

TEST_P(CalibratedTest, OursIsCloseToStock) {
  EXPECT_LT(divergence_of(Method::kOurs), GetParam().bound);
  EXPECT_LT(divergence_of(Method::kOursFast), 2 * GetParam().bound);
}

// A cache that held one method's pages reads another's after encoding again, formats included.
TEST_P(CalibratedTest, MethodsAreComparedOnOneRun) {
  ggml::CacheConfig keep = config(Method::kHadamard);
  keep.keep_exact_rows = true;
  keep.encode_on_store = false;
  const auto cache = ggml::configure(keep);
  ASSERT_TRUE(cache.has_value());
  const ContextPtr context(llama_init_from_model(model(), context_params(kContext)));
  ASSERT_NE(context, nullptr);
  (*cache)->set_exact_all(true);
  prefill(context.get(), calibration_->prompt());
  (*cache)->set_exact_all(false);
  (*cache)->set_encode_on_store(true);
  double cost[2];
  for (const Method method : {Method::kOurs, Method::kHadamard}) {
    ASSERT_TRUE((*cache)->encode_again(fit(method), kPrompt).has_value());
    cost[method == Method::kOurs ? 0 : 1] = mean_divergence(context.get());
    ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(context.get()), 0, kPrompt, -1));
  }
  EXPECT_LT(cost[0], GetParam().bound);
  EXPECT_LT(2 * cost[0], cost[1]);
  EXPECT_TRUE((*cache)->status().has_value());
}

// Keys far from their first place: the page mean must follow a context shift. Half of the text is dropped, so that the
// pages that stay move by more than two blocks.
TEST_P(CalibratedTest, AShiftMovesThePageMeans) {
  constexpr int kKept = 8, kDropped = 130;
  const ContextPtr stock(llama_init_from_model(model(), stock_params(kContext)));
  const auto cache = ggml::configure(config(Method::kOurs));
  ASSERT_TRUE(cache.has_value());
  const ContextPtr packed(llama_init_from_model(model(), context_params(kContext)));
  std::vector<std::vector<Logits>> logits;
  for (llama_context* context : {stock.get(), packed.get()}) {
    prefill(context, calibration_->prompt());
    llama_memory_t memory = llama_get_memory(context);
    ASSERT_TRUE(llama_memory_seq_rm(memory, 0, kKept, kKept + kDropped));
    llama_memory_seq_add(memory, 0, kKept + kDropped, -1, -kDropped);
    logits.push_back(decode(context, calibration_->scored(), kPrompt - kDropped));
  }
  double sum = 0;
  for (int i = 0; i < kScored; ++i) sum += divergence(logits[0].at(i), logits[1].at(i));
  RecordProperty("shifted", std::to_string(sum / kScored));
  EXPECT_LT(sum / kScored, 2 * GetParam().bound);  // rows are encoded twice
  EXPECT_TRUE((*cache)->status().has_value());
}

TEST_P(CalibratedTest, OtherRopeFrequenciesAreRefused) {
  const auto cache = ggml::configure(config(Method::kOurs));
  ASSERT_TRUE(cache.has_value());
  llama_context_params params = context_params(kContext);
  params.rope_freq_scale = 0.5F;
  params.rope_scaling_type = LLAMA_ROPE_SCALING_TYPE_LINEAR;
  const ContextPtr context(llama_init_from_model(model(), params));
  ASSERT_FALSE((*cache)->status().has_value());
  EXPECT_EQ((*cache)->status().error().code, ErrorCode::kMismatch);
}

INSTANTIATE_TEST_SUITE_P(Models, CalibratedTest,
                         // Measured: 0.015 and 0.007 nats; Hadamard 0.07 and 2.0.
                         ::testing::Values(Case{"Interleaved", "smollm2.gguf", 0.04},
                                           Case{"Halves", "qwen2.5-coder-0.5b.gguf", 0.03}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace oscar::testing
