#include "kernels/cuda/decode/plan.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/cuda/decode/geometry.hpp"
#include "kernels/cuda/decode/items.hpp"

namespace oscar::cuda {
namespace {

constexpr int kSms = 132;  // of an H200
constexpr std::size_t kSharedLimit = 227 * 1024;

DecodeShape qwen3_8b(int num_requests, int query_length = 1) { return {num_requests, query_length, 32, 8, 128, 2048}; }

TEST(DecodePlan, OneTileServesFourRowsTwoServeMore) {
  EXPECT_EQ(plan_decode(qwen3_8b(1), kSms)->column_tiles, 1);
  EXPECT_EQ(plan_decode(qwen3_8b(1, 2), kSms)->column_tiles, 2);
  EXPECT_EQ(plan_decode(qwen3_8b(1, 8), kSms)->row_groups, 4);
  EXPECT_EQ(plan_decode({1, 1, 14, 2, 64, 16}, kSms)->row_groups, 1);   // GQA 7: 8 rows
  EXPECT_EQ(plan_decode({1, 1, 16, 1, 128, 16}, kSms)->row_groups, 2);  // GQA 16: two groups of 8
}

TEST(DecodePlan, SharedMemoryFitsABlockForEveryShape) {
  for (const int head_dim : {64, 128, 256})
    for (const int group : {1, 4, 8, 16})
      for (const int requests : {1, 512, kMaxRequests}) {
        const auto plan = plan_decode({requests, 1, 2 * group, 2, head_dim, 64}, kSms);
        ASSERT_TRUE(plan);
        EXPECT_LE(plan->shared_bytes, kSharedLimit) << head_dim << " " << group << " " << requests;
      }
}

TEST(DecodePlan, RefusesWhatNoKernelServesAndNamesTheValue) {
  const auto message = [](const DecodeShape& shape) {
    const auto plan = plan_decode(shape, kSms);
    return plan ? std::string() : plan.error().message;
  };
  EXPECT_NE(message({1, 1, 8, 8, 80, 16}).find("80"), std::string::npos);
  EXPECT_NE(message({0, 1, 8, 8, 64, 16}).find("num_requests"), std::string::npos);
  EXPECT_NE(message({1, 9, 8, 8, 64, 16}).find("query_length is 9"), std::string::npos);
  EXPECT_NE(message({1, 1, 9, 2, 64, 16}).find("not a multiple"), std::string::npos);
  EXPECT_NE(message({1, 1, 8, 8, 64, 0}).find("max_pages"), std::string::npos);
}

// Every visible key of every query row lies in exactly one kind of item: INT2 page or 16-bit window.
TEST(RequestItems, CoverEveryKeyThatSomeRowReads) {
  for (const int query_length : {1, 3, 8})
    for (const int window : {0, 100, 1000})
      for (const int recent : {8, 64, 256})
        for (const int sink : {0, 4, 64})
          for (const int length : {1, 7, 63, 64, 65, 300, 320, 321, 400, 1000, 4099}) {
            DecodeParams p{};
            p.query_length = query_length;
            p.sliding_window = window;
            p.recent = recent;
            p.sink = sink;
            const RequestItems items = request_items(p, length);
            const auto in_window = [&](int j) {
              const int sink_end = items.num_sink_items * kWindowTokens;
              const int recent_items = items.num_window_items - items.num_sink_items;
              return j < sink_end || (j >= items.recent_start && j < items.recent_start + recent_items * kWindowTokens);
            };
            for (int row = 0; row < query_length; ++row) {
              const int i = length - query_length + row;
              for (int j = 0; j <= i; ++j) {
                if (window > 0 && j <= i - window) continue;
                const bool exact = j < sink || j > i - recent;
                const int page = j / kPageTokens - items.first_page;
                if (exact) {
                  ASSERT_TRUE(in_window(j)) << "key " << j << " of row " << i << ", length " << length;
                } else {
                  ASSERT_TRUE(page >= 0 && page < items.num_pages)
                      << "key " << j << " of row " << i << ", length " << length;
                }
              }
            }
          }
}

// An engine's cache may hold more of a window item's 8 tokens than exist: the first and the last that do are in it.
TEST(RequestItems, WindowItemsHoldAtLeastOneToken) {
  for (const int length : {1, 7, 8, 9, 63, 64, 65, 320, 1000}) {
    DecodeParams p{};
    p.query_length = 1;
    p.recent = 256;
    p.sink = 64;
    const RequestItems items = request_items(p, length);
    for (int item = 0; item < items.num_window_items; ++item) {
      EXPECT_EQ(items.window_token(item) % kWindowTokens, 0);
      EXPECT_LT(items.window_token(item), length);
    }
  }
}

TEST(PageAngles, HoldPagesZeroTo15AndEverySixteenth) {
  const float frequency[2] = {1.0f, 0.01f};
  std::vector<float> angles(page_angle_floats(8, 40));
  ASSERT_EQ(angles.size(), (16 + 3) * 8u);
  fill_page_angles(frequency, 8, 4, 40, angles.data());
  const auto at = [&](int row, int pair, int part) { return angles[(row * 4 + pair) * 2 + part]; };
  EXPECT_FLOAT_EQ(at(5, 0, 0), static_cast<float>(std::cos(64.0 * 5)));
  EXPECT_FLOAT_EQ(at(16 + 2, 1, 1), static_cast<float>(std::sin(0.01f * 64.0 * 32)));
  EXPECT_EQ(at(7, 2, 0), 1.0f);  // channels that do not turn
  EXPECT_EQ(at(7, 3, 1), 0.0f);
}

TEST(RequestItems, AnEmptySequenceHasNone) { EXPECT_EQ(request_items(DecodeParams{}, 0).total(), 0); }

}  // namespace
}  // namespace oscar::cuda
