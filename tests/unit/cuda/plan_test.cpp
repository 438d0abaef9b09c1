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

// FP16 of any sign and size, subnormals too.
float half_value(std::uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31), mantissa = static_cast<int>(bits & 1023);
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                   : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

// Both FP16 parts together have 22 bits, or what FP16's smallest step leaves of a small value.
TEST(PageAngles, HoldPagesZeroTo15AsOperandsAndEverySixteenthInFp32) {
  constexpr int kHeadDim = 64, kPairs = 32, kRotary = 40;
  std::vector<float> frequency(kRotary / 2);
  for (std::size_t i = 0; i < frequency.size(); ++i) frequency[i] = std::pow(1e4f, -static_cast<float>(i) / 20);
  std::vector<float> angles(page_angle_floats(kHeadDim, 40));
  ASSERT_EQ(angles.size(), (16 + 3) * std::size_t{kHeadDim});
  fill_page_angles(frequency.data(), kHeadDim, kRotary, 40, angles.data());
  const auto angle = [&](int page, int pair) {
    return pair < kRotary / 2 ? static_cast<double>(frequency[static_cast<std::size_t>(pair)]) * kPageTokens * page
                              : 0.0;
  };
  const auto* words = reinterpret_cast<const std::uint32_t*>(angles.data());
  for (int page = 0; page < 16; ++page)
    for (int pair = 0; pair < kPairs; ++pair) {
      // the A fragment of m16n8k16: row page, K = 2 (pair's place in its step); page_term.cuh has the order of pairs
      const int step = pair / 16 * 2 + pair % 4 / 2, lane = 4 * (page % 8) + pair % 16 / 4;
      const int word = (step * 32 + lane) * 4 + page / 8 + 2 * (pair % 2);
      const std::uint32_t high = words[word], low = words[16 * kPairs + word];
      const double cosine = half_value(high & 0xFFFF) + half_value(low & 0xFFFF);
      const double sine = half_value(high >> 16) + half_value(low >> 16);
      ASSERT_NEAR(cosine, std::cos(angle(page, pair)), 2e-7) << page << " " << pair;
      ASSERT_NEAR(sine, std::sin(angle(page, pair)), 2e-7) << page << " " << pair;
    }
  for (int sixteen = 0; sixteen < 3; ++sixteen)
    for (int pair = 0; pair < kPairs; ++pair) {
      const float* at = &angles[static_cast<std::size_t>((16 + sixteen) * kHeadDim + 2 * pair)];
      EXPECT_FLOAT_EQ(at[0], static_cast<float>(std::cos(angle(16 * sixteen, pair))));
      EXPECT_FLOAT_EQ(at[1], static_cast<float>(std::sin(angle(16 * sixteen, pair))));
    }
}

TEST(DecodeMatrices, HoldEveryElementToHalfAStepOfItsOutputChannel) {
  for (const int head_dim : {64, 128, 256}) {
    constexpr int kHeads = 2;
    const auto d = static_cast<std::size_t>(head_dim);
    std::vector<float> matrices(kHeads * d * d);
    for (std::size_t i = 0; i < matrices.size(); ++i)
      matrices[i] = std::sin(static_cast<float>(i) * 0.7f) * std::exp(static_cast<float>(i % d % 7));
    for (std::size_t input = 0; input < kHeads * d; ++input) matrices[input * d + 5] = 0;  // channels of zeros
    std::vector<std::uint8_t> out(kHeads * matrix_bytes(head_dim));
    fill_matrices(matrices.data(), kHeads, head_dim, out.data());
    for (std::size_t head = 0; head < kHeads; ++head) {
      const std::uint8_t* bytes = &out[head * matrix_bytes(head_dim)];
      const auto* steps = reinterpret_cast<const float*>(bytes + 2 * d * d);
      for (std::size_t input = 0; input < d; ++input)
        for (std::size_t output = 0; output < d; ++output) {
          // the A fragment of m16n8k32: row output % 16, K = input % 32
          const std::size_t tile = (output / 16 * (d / 32) + input / 32) * 2, lane = 4 * (output % 8) + input % 16 / 4;
          const std::size_t word = output % 16 / 8 + 2 * (input % 32 / 16), at = 16 * lane + 4 * word + input % 4;
          const int fixed = 256 * static_cast<std::int8_t>(bytes[512 * tile + at]) +
                            static_cast<std::int8_t>(bytes[512 * (tile + 1) + at]);
          ASSERT_NEAR(static_cast<float>(fixed) * steps[output], matrices[(head * d + input) * d + output],
                      0.51f * steps[output]);
        }
      EXPECT_EQ(steps[5], 1.0f);
    }
  }
}

TEST(RequestItems, AnEmptySequenceHasNone) { EXPECT_EQ(request_items(DecodeParams{}, 0).total(), 0); }

}  // namespace
}  // namespace oscar::cuda
