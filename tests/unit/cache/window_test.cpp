#include <gtest/gtest.h>

#include <rapidcheck.h>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <oscar/cache.hpp>
#include <random>

#include "codec/codec_kernels.hpp"
#include "support/isas.hpp"

namespace oscar {
namespace {

// ---- 16-bit rounding ----

double f16_value(std::uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return half >> 15 != 0 ? -magnitude : magnitude;
}
double bf16_value(std::uint16_t half) { return std::bit_cast<float>(std::uint32_t{half} << 16); }

std::vector<float> conversion_inputs() {
  std::vector<float> inputs;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {  // around every 16-bit value, ties included
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      inputs.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  inputs.resize(inputs.size() / cpu::kLanes * cpu::kLanes);
  return inputs;
}

// `out` is the nearest of its neighbours, ties to the even pattern; NaN stays NaN.
void check_rounding(float in, std::uint16_t out, double (*value_of)(std::uint16_t), int exponent_bits,
                    const char* what) {
  const std::uint16_t infinity = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  const std::uint16_t magnitude = out & 0x7fff;
  if (std::isnan(in)) {
    ASSERT_GT(magnitude, infinity) << what;
    return;
  }
  ASSERT_EQ(std::signbit(in), out >> 15 != 0) << what << " of " << in;
  ASSERT_LE(magnitude, infinity) << what << " of " << in;
  // past the largest number the next pattern counts as if the exponents went on
  const double step = value_of(infinity - 1) - value_of(infinity - 2);
  const auto extended = [&](std::uint16_t pattern) {
    return pattern == infinity ? value_of(infinity - 1) + step : value_of(pattern);
  };
  const double target = std::abs(double{in});
  if (magnitude > 0) {
    const double middle = (extended(magnitude - 1) + extended(magnitude)) / 2;
    ASSERT_TRUE(target > middle || (target == middle && magnitude % 2 == 0)) << what << " of " << in;
  }
  if (magnitude < infinity) {
    const double middle = (extended(magnitude) + extended(static_cast<std::uint16_t>(magnitude + 1))) / 2;
    ASSERT_TRUE(target < middle || (target == middle && magnitude % 2 == 0)) << what << " of " << in;
  }
}

TEST(SixteenBitRows, RoundToNearestEvenOnEveryInstructionSet) {
  const std::vector<float> inputs = conversion_inputs();
  std::vector<std::uint16_t> first_bf16, first_f16;
  for (const Isa isa : test::isas_to_test()) {
    std::vector<std::uint16_t> bf16(inputs.size()), f16(inputs.size());
    codec_kernels(isa).to_bf16(inputs.data(), static_cast<std::int64_t>(inputs.size()), bf16.data());
    codec_kernels(isa).to_f16(inputs.data(), static_cast<std::int64_t>(inputs.size()), f16.data());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_rounding(inputs[i], bf16[i], bf16_value, 8, "bf16");
      check_rounding(inputs[i], f16[i], f16_value, 5, "f16");
      if (HasFatalFailure()) return;
    }
    if (first_bf16.empty()) first_bf16 = bf16, first_f16 = f16;
    EXPECT_EQ(bf16, first_bf16) << isa_name(isa);
    EXPECT_EQ(f16, first_f16) << isa_name(isa);
  }
}

// ---- rows, tags and spans ----

constexpr int kHeads = 2, kHeadDim = 16, kWidth = kHeads * kHeadDim;

struct Window {
  KvSpec spec;
  std::vector<std::uint16_t> k, v;
  WindowRows rows;

  Window(int sink, int ring_capacity, WindowDtype dtype = WindowDtype::kBf16)
      : spec{.num_kv_heads = kHeads,
             .head_dim = kHeadDim,
             .sink = sink,
             .recent = ring_capacity,
             .window_dtype = dtype},
        k(WindowRows::side_bytes(spec, ring_capacity) / 2, 0xffff),
        v(k),
        rows(spec, ring_capacity, k.data(), v.data()) {}

  // Small whole numbers are exact in both 16-bit types.
  static std::vector<float> row(int token, int salt) {
    std::vector<float> out(kWidth);
    for (int i = 0; i < kWidth; ++i) out[i] = static_cast<float>((token * 7 + i + salt) % 127);
    return out;
  }
  void write(int token) {
    rows.write_key(token, row(token, 0).data());
    rows.write_value(token, row(token, 50).data());
  }
  std::vector<ExactSpan> spans(int num_tokens) const {
    std::vector<ExactSpan> out;
    rows.spans(num_tokens, out);
    return out;
  }
};

TEST(WindowRows, ReadsBackWhatWasWrittenInBothTypes) {
  for (const WindowDtype dtype : {WindowDtype::kBf16, WindowDtype::kF16}) {
    Window window(2, 4, dtype);
    for (int token = 0; token < 9; ++token) window.write(token);
    int num_read = 0;
    for (const ExactSpan& span : window.spans(9)) {
      EXPECT_FALSE(span.always);
      for (int i = 0; i < span.num_tokens; ++i) {
        for (int channel = 0; channel < kWidth; ++channel) {
          const std::int64_t at = i * span.token_stride + channel / kHeadDim * span.head_stride + channel % kHeadDim;
          const auto value = [&](const std::uint16_t* side) {
            return dtype == WindowDtype::kBf16 ? bf16_value(side[at]) : f16_value(side[at]);
          };
          ASSERT_EQ(value(span.k), Window::row(span.first_token + i, 0)[channel]);
          ASSERT_EQ(value(span.v), Window::row(span.first_token + i, 50)[channel]);
        }
        ++num_read;
      }
    }
    EXPECT_EQ(num_read, 6);  // two sinks and the last four
  }
}

TEST(WindowRows, MergesNeighboursAndSplitsWhereTheRingWraps) {
  Window window(4, 8);
  for (int token = 0; token < 22; ++token) window.write(token);
  const std::vector<ExactSpan> spans = window.spans(22);
  ASSERT_EQ(spans.size(), 3u);  // 0..3 | 14, 15 (end of the ring) | 16..21
  EXPECT_EQ(spans[0].first_token, 0);
  EXPECT_EQ(spans[0].num_tokens, 4);
  EXPECT_EQ(spans[1].first_token, 14);
  EXPECT_EQ(spans[1].num_tokens, 2);
  EXPECT_EQ(spans[2].first_token, 16);
  EXPECT_EQ(spans[2].num_tokens, 6);
}

TEST(WindowRows, ATokenNeedsBothSides) {
  Window window(1, 4);
  window.rows.write_key(7, Window::row(7, 0).data());
  EXPECT_FALSE(window.rows.valid(7));
  EXPECT_TRUE(window.spans(8).empty());
  window.rows.write_value(7, nullptr);  // leaves the side
  EXPECT_FALSE(window.rows.valid(7));
  window.rows.write_value(7, Window::row(7, 50).data());
  EXPECT_TRUE(window.rows.valid(7));
  window.rows.write_key(11, Window::row(11, 0).data());  // takes the key's slot
  EXPECT_FALSE(window.rows.valid(7));
  EXPECT_FALSE(window.rows.valid(11));
}

TEST(WindowRows, WithoutARingKeepOnlySinks) {
  Window window(2, 0);
  for (int token = 0; token < 5; ++token) window.write(token);
  ASSERT_EQ(window.spans(5).size(), 1u);
  EXPECT_EQ(window.spans(5)[0].num_tokens, 2);
  EXPECT_FALSE(window.rows.valid(3));
  EXPECT_FALSE(window.rows.valid(-1));
}

// Against a map from token to (key written, value written), where a slot forgets the token it held before.
TEST(WindowRows, AgreeWithAPlainMapUnderRandomWritesAndClears) {
  EXPECT_TRUE(rc::check("spans are those of a plain map", [] {
    const int sink = *rc::gen::inRange(0, 6), ring = *rc::gen::inRange(0, 9);
    Window window(sink, ring);
    std::map<int, int> key_of_row, value_of_row;  // row -> token
    const auto row_of = [&](int token) { return token < sink ? token : ring == 0 ? -1 : sink + token % ring; };
    const int num_steps = *rc::gen::inRange(0, 60);
    for (int step = 0; step < num_steps; ++step) {
      const int token = *rc::gen::inRange(0, 40);
      switch (*rc::gen::inRange(0, 20)) {
        case 0:
          window.rows.clear();
          key_of_row.clear();
          value_of_row.clear();
          break;
        case 1:
          window.rows.write_key(token, Window::row(token, 0).data());
          if (row_of(token) >= 0) key_of_row[row_of(token)] = token;
          break;
        case 2:
          window.rows.write_value(token, Window::row(token, 50).data());
          if (row_of(token) >= 0) value_of_row[row_of(token)] = token;
          break;
        default:
          window.write(token);
          if (row_of(token) >= 0) key_of_row[row_of(token)] = value_of_row[row_of(token)] = token;
      }
    }
    const int num_tokens = *rc::gen::inRange(0, 45);
    std::map<int, int> row_of_token;  // valid ones, ascending
    for (const auto& [row, token] : key_of_row) {
      const auto value = value_of_row.find(row);
      const bool valid = value != value_of_row.end() && value->second == token;
      RC_ASSERT(window.rows.valid(token) == valid);
      if (valid && token < num_tokens) row_of_token[token] = row;
    }
    std::size_t num_covered = 0;
    int previous_end = -1, previous_row = -1;
    for (const ExactSpan& span : window.spans(num_tokens)) {
      RC_ASSERT(span.num_tokens > 0);
      RC_ASSERT(span.first_token >= previous_end);
      const auto first_row = static_cast<int>((span.k - window.k.data()) / kWidth);
      RC_ASSERT(span.v - window.v.data() == span.k - window.k.data());
      // maximal: not to be merged with the one before
      RC_ASSERT(span.first_token != previous_end || first_row != previous_row);
      for (int i = 0; i < span.num_tokens; ++i) {
        const auto found = row_of_token.find(span.first_token + i);
        RC_ASSERT(found != row_of_token.end());
        RC_ASSERT(found->second == first_row + i);
        RC_ASSERT(bf16_value(window.k[(first_row + i) * kWidth]) == Window::row(span.first_token + i, 0)[0]);
      }
      num_covered += static_cast<std::size_t>(span.num_tokens);
      previous_end = span.first_token + span.num_tokens;
      previous_row = first_row + span.num_tokens;
    }
    RC_ASSERT(num_covered == row_of_token.size());
  }));
}

}  // namespace
}  // namespace oscar
