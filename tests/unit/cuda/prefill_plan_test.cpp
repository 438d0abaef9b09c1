#include <gtest/gtest.h>

#include "kernels/cuda/prefill/layout.hpp"
#include "kernels/cuda/prefill/plan.hpp"

namespace oscar::cuda {
namespace {

PrefillShape qwen3_8b(int num_tokens, int num_requests = 1) { return {num_requests, num_tokens, 32, 8, 128, 2048}; }

std::string refusal(const PrefillShape& shape) {
  const auto plan = plan_prefill(shape);
  return plan ? std::string() : plan.error().message;
}

// Parameters that pass: every pointer set, nothing read on the host.
PrefillParams valid_params() {
  alignas(1024) static std::uint8_t memory[1024];
  static const float number = 0;
  static const std::int32_t index = 0;
  static const OffsetScale offset{};
  PrefillParams p{};
  p.query_start = p.history_lens = p.block_table = p.window_table = &index;
  p.q = p.window_k = p.window_v = reinterpret_cast<const __nv_bfloat16*>(memory);
  p.out = reinterpret_cast<__nv_bfloat16*>(memory);
  p.pages = memory;
  p.workspace = memory;
  p.key_matrix = p.key_transform = p.value_transform = p.value_matrix = p.block_means = &number;
  p.key_offset = p.value_offset = &offset;
  static float lse;
  p.lse = &lse;
  p.num_blocks = 1;
  p.window_block = 16;
  return p;
}

std::string refusal_of(const PrefillParams& params) {
  const auto status = check_prefill(params, qwen3_8b(1));
  return status ? std::string() : status.error().message;
}

TEST(PrefillPlan, TilesCoverEveryRowHoweverTheRequestsAreCut) {
  // 8192 tokens of 4 rows are 256 tiles; every further request may leave one tile more
  EXPECT_EQ(plan_prefill(qwen3_8b(8192))->row_tiles, 256);
  EXPECT_EQ(plan_prefill(qwen3_8b(8192, 5))->row_tiles, 260);
  EXPECT_EQ(plan_prefill(qwen3_8b(1))->row_tiles, 1);
}

TEST(PrefillPlan, WindowTilesHoldSinkAndRecentRows) {
  const auto plan = plan_prefill(qwen3_8b(64));
  EXPECT_EQ(plan->tile_keys, 128);
  EXPECT_EQ(plan->sink_tiles, 1);
  EXPECT_EQ(plan->recent_tiles, 2);
  EXPECT_EQ(plan_prefill({1, 64, 32, 8, 256, 16})->tile_keys, 64);
  EXPECT_EQ(plan_prefill({1, 64, 32, 8, 128, 16, 0, 0})->sink_tiles, 0);
}

TEST(PrefillPlan, TheWorkspaceHoldsItsPartsInOrderAndAligned) {
  const auto plan = plan_prefill(qwen3_8b(1000, 3));
  EXPECT_GE(plan->means_offset, 2ll * 1000 * 32 * 128);
  EXPECT_GE(plan->window_offset - plan->means_offset, 2ll * 2 * 2048 * 8 * 128);  // means in two parts
  EXPECT_EQ(plan->workspace_bytes - plan->window_offset, 3ll * 8 * 3 * prefill_window_tile_bytes(128));
  EXPECT_EQ(plan->means_offset % 1024, 0);
  EXPECT_EQ(plan->window_offset % 1024, 0);
}

TEST(PrefillPlan, RefusesWhatNoKernelServesAndNamesTheValue) {
  EXPECT_NE(refusal({1, 1, 8, 8, 80, 16}).find("head_dim is 80"), std::string::npos);
  EXPECT_NE(refusal({0, 1, 8, 8, 64, 16}).find("num_requests is 0"), std::string::npos);
  EXPECT_NE(refusal({1, -1, 8, 8, 64, 16}).find("num_tokens is -1"), std::string::npos);
  EXPECT_NE(refusal({1, 1, 9, 2, 64, 16}).find("not a multiple"), std::string::npos);
  EXPECT_NE(refusal({1, 1, 8, 8, 64, 0}).find("max_pages is 0"), std::string::npos);
  EXPECT_NE(refusal({1, 1, 8, 8, 64, 16, -1}).find("sink is -1"), std::string::npos);
}

TEST(PrefillCheck, NamesTheMissingPointerAndTheOddStride) {
  EXPECT_EQ(refusal_of(valid_params()), "");
  PrefillParams params = valid_params();
  params.window_table = nullptr;
  EXPECT_NE(refusal_of(params).find("window_table is null"), std::string::npos);
  params = valid_params();
  params.key_transform = nullptr;
  EXPECT_NE(refusal_of(params).find("key_transform is null"), std::string::npos);
  params = valid_params();
  params.q_token_stride = 4;
  EXPECT_NE(refusal_of(params).find("q_token_stride is 4"), std::string::npos);
  params = valid_params();
  params.num_blocks = 0;
  EXPECT_NE(refusal_of(params).find("num_blocks is 0"), std::string::npos);
}

TEST(PrefillLayout, OrdersOfChannelsAndTokensAreInverse) {
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(channel_at_position(position_of_channel(i)), i);
    EXPECT_EQ(token_at_position(position_of_token(i)), i);
  }
}

}  // namespace
}  // namespace oscar::cuda
