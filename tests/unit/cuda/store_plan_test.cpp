#include <gtest/gtest.h>

#include "kernels/cuda/store/plan.hpp"
#include "support/plain_encoder.hpp"

namespace oscar::cuda {
namespace {

constexpr int kSms = 132;  // of an H200

StoreShape qwen3_8b(int num_tokens, int num_layers = 36, bool exact = false) {
  return {num_tokens, num_layers, 8, 128, Quantizer::kFeedback, exact};
}

std::string refusal(const StoreShape& shape) {
  const auto plan = plan_store(shape, kSms);
  return plan ? std::string() : plan.error().message;
}

// A launch that passes: every pointer set, nothing read on the host.
StoreParams valid_params() {
  static std::uint8_t memory[16];
  static const float number = 0;
  static const std::int32_t index = 0;
  static const StoreConstants constants{};
  StoreParams p{};
  p.slot_mapping = p.positions = &index;
  p.num_blocks = 1;
  StoreSide side{};
  side.rows = reinterpret_cast<const std::uint16_t*>(memory);
  side.pages = memory;
  side.transform = side.feedback = side.metric = side.row_sum = side.inverse_diagonal = &number;
  side.constants = &constants;
  p.layer.key = p.layer.value = side;
  p.layer.key.block_means = &number;
  return p;
}

std::string refusal(const StoreParams& params, const StoreShape& shape) {
  const auto status = check_store(params, shape);
  return status ? std::string() : status.error().message;
}

TEST(StorePlan, TilesCoverEveryTokenOnce) {
  for (const int tokens : {0, 1, 15, 16, 17, 63, 64, 65, 512, 8192, 8193}) {
    const auto plan = plan_store(qwen3_8b(tokens, 36, true), kSms);
    ASSERT_TRUE(plan);
    EXPECT_GE(plan->num_tiles * plan->tile_tokens, tokens);
    EXPECT_LT((plan->num_tiles - 1) * plan->tile_tokens, std::max(tokens, 1));
  }
}

TEST(StorePlan, TensorCoreTilesCoverABatchThatBeginsInsideAPage) {
  for (const int tokens : {0, 1, 63, 64, 65, 8192}) {
    const auto plan = plan_store(qwen3_8b(tokens), kSms);
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->tile_tokens, 64);
    EXPECT_GE(plan->num_tiles * 64, tokens > 0 ? tokens + 63 : 0);
  }
}

TEST(StorePlan, FewTokensTakeSmallTiles) {
  EXPECT_EQ(plan_store(qwen3_8b(16, 36, true), kSms)->tile_tokens, 16);
  EXPECT_EQ(plan_store(qwen3_8b(17, 36, true), kSms)->tile_tokens, 64);
}

TEST(StorePlan, TensorCoresServeWhatFitsAndIsNotExact) {
  EXPECT_TRUE(plan_store(qwen3_8b(1), kSms)->tensor_cores);
  EXPECT_FALSE(plan_store(qwen3_8b(1, 36, true), kSms)->tensor_cores);
  EXPECT_FALSE(plan_store({1, 1, 8, 256, Quantizer::kFeedback}, kSms)->tensor_cores);
}

TEST(StorePlan, TensorCoreBlocksAreOneWaveAndNoMoreThanTiles) {
  EXPECT_EQ(plan_store(qwen3_8b(8192, 1), kSms)->blocks_a_head, 8);  // 16 heads and sides: 128 of 132
  EXPECT_EQ(plan_store({8192, 1, 8, 128, Quantizer::kMinMax}, kSms)->blocks_a_head, 16);  // two an SM
  EXPECT_EQ(plan_store(qwen3_8b(8192), kSms)->blocks_a_head, 1);
  EXPECT_EQ(plan_store({64, 1, 1, 128, Quantizer::kFeedback}, kSms)->blocks_a_head, 1);
}

TEST(StorePlan, RefusesWhatNoKernelServesAndNamesTheValue) {
  EXPECT_NE(refusal({1, 1, 8, 80, Quantizer::kMinMax}).find("head_dim is 80"), std::string::npos);
  EXPECT_NE(refusal({-1, 1, 8, 64, Quantizer::kMinMax}).find("num_tokens is -1"), std::string::npos);
  EXPECT_NE(refusal({1, 0, 8, 64, Quantizer::kMinMax}).find("num_layers is 0"), std::string::npos);
  EXPECT_NE(refusal({1, 1, 0, 64, Quantizer::kMinMax}).find("num_kv_heads is 0"), std::string::npos);
}

TEST(StoreCheck, AcceptsACompleteLayerAndASideThatIsNotStored) {
  const StoreShape shape{1, 1, 8, 128, Quantizer::kFeedback};
  StoreParams params = valid_params();
  EXPECT_EQ(refusal(params, shape), "");
  params.layer.value = {};
  EXPECT_EQ(refusal(params, shape), "");
}

TEST(StoreCheck, NamesTheMissingPointerAndTheOddStride) {
  const StoreShape shape{1, 1, 8, 128, Quantizer::kFeedback};
  StoreParams params = valid_params();
  params.layer.value.metric = nullptr;
  EXPECT_NE(refusal(params, shape).find("value.metric is null"), std::string::npos);
  EXPECT_EQ(refusal(params, {1, 1, 8, 128, Quantizer::kLeastSquares}), "");
  params = valid_params();
  params.positions = nullptr;
  EXPECT_NE(refusal(params, shape).find("positions are null"), std::string::npos);
  params = valid_params();
  params.page_stride_bytes = 72;
  EXPECT_NE(refusal(params, shape).find("page_stride_bytes is 72"), std::string::npos);
  params = valid_params();
  params.slot_mapping = nullptr;
  EXPECT_NE(refusal(params, shape).find("slot_mapping is null"), std::string::npos);
  EXPECT_NE(refusal(valid_params(), {1, 36, 8, 128, Quantizer::kMinMax}).find("layers is null"), std::string::npos);
}

TEST(MetricTables, AreTheFormatsSums) {
  constexpr int kWidth = 64;
  std::vector<float> metric;
  for (int i = 0; i < kWidth * kWidth; ++i) metric.push_back(1.0f / static_cast<float>(1 + (i * 37) % 101));
  const MetricTables tables = metric_tables(metric.data(), kWidth);
  EXPECT_EQ(tables.row_sum, test::plain_transform(metric, test::Row(kWidth, 1.0f)));
  EXPECT_EQ(tables.total, test::interleaved_sum(kWidth, [&](std::size_t j) { return tables.row_sum[j]; }));
  for (int i = 0; i < kWidth; ++i) EXPECT_EQ(tables.inverse_diagonal[i], 1.0f / metric[i * kWidth + i]);
}

}  // namespace
}  // namespace oscar::cuda
