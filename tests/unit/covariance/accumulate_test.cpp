#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <oscar/covariance.hpp>

#include "support/isas.hpp"
#include "support/samples.hpp"

namespace oscar {
namespace {

using test::random_samples;
using test::rope_of;
using test::Samples;

// Sums of a few thousand products in double, some in another order than here: 1e-12 of the largest is ample.
constexpr double kSumTolerance = 1e-12;
constexpr double kGoldenTolerance = 5e-7;  // the example is printed to six decimals

std::size_t at(int row, int column, int width) { return static_cast<std::size_t>(row * width + column); }

// The definition of every sum, one token and one element at a time.
HeadStatistics plain_sums(const Samples& s, int head) {
  const int d = s.head_dim;
  const int group = s.num_qo_heads / s.num_kv_heads;
  const auto width = static_cast<std::size_t>(d);
  const auto num_blocks = static_cast<std::size_t>((s.first_position + s.num_tokens - 1) / 64 + 1);
  HeadStatistics sums;
  sums.head_dim = d;
  for (auto* matrix : {&sums.query_moment, &sums.key_moment, &sums.value_moment, &sums.weighted_value_moment}) {
    matrix->resize(width * width);
  }
  sums.pre_rope_key_sum.resize(width);
  sums.value_sum.resize(width);
  sums.block_key_sum.resize(num_blocks * width);
  sums.block_count.resize(num_blocks);
  const auto q = [&](int t, int g, int c) { return double{s.q[at(t * s.num_qo_heads + head * group + g, c, d)]}; };
  const auto k = [&](int t, int c) { return double{s.k[at(t * s.num_kv_heads + head, c, d)]}; };
  const auto v = [&](int t, int c) { return double{s.v[at(t * s.num_kv_heads + head, c, d)]}; };

  for (int t = 0; t < s.num_tokens; ++t) {
    sums.num_queries += 1;
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) {
        for (int g = 0; g < group; ++g) sums.query_moment[at(i, j, d)] += q(t, g, i) * q(t, g, j) / group;
      }
    }
    const std::int64_t position = s.first_position + t;
    if (position < 64) continue;
    sums.num_keys += 1;
    std::vector<double> row;
    for (int c = 0; c < d; ++c) row.push_back(k(t, c));
    row = test::turned(s.rope, row, -static_cast<double>(position));
    const auto block = static_cast<int>(position / 64);
    sums.block_count[static_cast<std::size_t>(block)] += 1;
    for (int i = 0; i < d; ++i) {
      sums.pre_rope_key_sum[at(0, i, d)] += row[at(0, i, d)];
      sums.block_key_sum[at(block, i, d)] += k(t, i);
      sums.value_sum[at(0, i, d)] += v(t, i);
      for (int j = 0; j < d; ++j) {
        sums.key_moment[at(i, j, d)] += k(t, i) * k(t, j);
        sums.value_moment[at(i, j, d)] += v(t, i) * v(t, j);
      }
    }
  }
  std::vector<double> weights;
  double total = 0;
  for (int t = 0; t < s.num_tokens; ++t) {
    double weight = 0;
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) weight += k(t, i) * sums.query_moment[at(i, j, d)] / s.num_tokens * k(t, j);
    }
    weights.push_back(weight);
    total += weight;
  }
  for (int t = 0; t < s.num_tokens; ++t) {
    sums.num_weighted += 1;
    const double weight = weights[static_cast<std::size_t>(t)] / total * s.num_tokens;
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) sums.weighted_value_moment[at(i, j, d)] += weight * v(t, i) * v(t, j);
    }
  }
  return sums;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& expected, const char* name) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], kSumTolerance * largest) << name << " at " << i;
  }
}

void expect_near(const HeadStatistics& got, const HeadStatistics& expected) {
  EXPECT_EQ(got.head_dim, expected.head_dim);
  EXPECT_EQ(got.num_queries, expected.num_queries);
  EXPECT_EQ(got.num_keys, expected.num_keys);
  EXPECT_EQ(got.num_weighted, expected.num_weighted);
  EXPECT_EQ(got.block_count, expected.block_count);
  expect_near(got.query_moment, expected.query_moment, "query_moment");
  expect_near(got.pre_rope_key_sum, expected.pre_rope_key_sum, "pre_rope_key_sum");
  expect_near(got.key_moment, expected.key_moment, "key_moment");
  expect_near(got.block_key_sum, expected.block_key_sum, "block_key_sum");
  expect_near(got.value_sum, expected.value_sum, "value_sum");
  expect_near(got.value_moment, expected.value_moment, "value_moment");
  expect_near(got.weighted_value_moment, expected.weighted_value_moment, "weighted_value_moment");
}

TEST(Accumulate, EveryShapeEqualsThePlainSums) {
  const struct {
    int num_tokens, num_qo_heads, num_kv_heads, head_dim, rotary_dim;
    std::int64_t first_position;
  } shapes[] = {
      {200, 6, 2, 64, 64, 0},     // grouped queries, a text from its start
      {130, 2, 2, 48, 48, 1000},  // one query head a KV head, a width without a power of two, from the middle
      {97, 4, 1, 80, 32, 60},     // partial rotary, odd count, starts inside the skipped sink
      {64, 3, 1, 32, 0, 64},      // no RoPE
      {1, 1, 1, 16, 16, 64},      // one token
      {3, 1, 1, 16, 16, 0},       // sink only: no keys
      {70, 8, 1, 256, 256, 4096},
  };
  for (const auto& shape : shapes) {
    SCOPED_TRACE(testing::Message() << "head_dim " << shape.head_dim << ", tokens " << shape.num_tokens);
    const Samples samples = random_samples(7, shape.num_tokens, shape.num_qo_heads, shape.num_kv_heads, shape.head_dim,
                                           rope_of(shape.rotary_dim), shape.first_position);
    LayerStatistics layer;
    ASSERT_TRUE(accumulate(layer, samples.block()));
    ASSERT_EQ(layer.heads.size(), static_cast<std::size_t>(shape.num_kv_heads));
    for (int h = 0; h < shape.num_kv_heads; ++h) {
      expect_near(layer.heads[static_cast<std::size_t>(h)], plain_sums(samples, h));
    }
  }
}

// The weights of weighted_value_moment are those of a block; every other sum does not see where texts are cut.
TEST(Accumulate, CuttingATextChangesOnlyTheWeightedMoment) {
  const Samples samples = random_samples(8, 300, 4, 2, 32, rope_of(32));
  LayerStatistics whole;
  ASSERT_TRUE(accumulate(whole, samples.block()));
  LayerStatistics parts;
  for (const auto& [first, count] : {std::pair{0, 10}, {10, 90}, {100, 1}, {101, 199}}) {
    ASSERT_TRUE(accumulate(parts, samples.block(first, count)));
  }
  for (std::size_t h = 0; h < whole.heads.size(); ++h) {
    EXPECT_NE(parts.heads[h].weighted_value_moment, whole.heads[h].weighted_value_moment);
    parts.heads[h].weighted_value_moment = whole.heads[h].weighted_value_moment;
    expect_near(parts.heads[h], whole.heads[h]);
  }
}

// Only products of two floats are fused, and a sum runs in one order everywhere.
TEST(Accumulate, EveryInstructionSetGivesTheSameBits) {
  const Samples samples = random_samples(9, 150, 4, 2, 80, rope_of(80));
  const char* old = std::getenv("OSCAR_ISA");
  const std::string saved = old != nullptr ? old : "";
  std::vector<LayerStatistics> results;
  for (const Isa isa : test::isas_to_test()) {
    ::setenv("OSCAR_ISA", std::string(isa_name(isa)).c_str(), 1);
    ASSERT_TRUE(accumulate(results.emplace_back(), samples.block()));
  }
  ::setenv("OSCAR_ISA", saved.c_str(), 1);
  for (const LayerStatistics& result : results) {
    for (std::size_t h = 0; h < result.heads.size(); ++h) {
      const HeadStatistics& got = result.heads[h];
      const HeadStatistics& scalar = results.front().heads[h];
      EXPECT_EQ(got.query_moment, scalar.query_moment);
      EXPECT_EQ(got.key_moment, scalar.key_moment);
      EXPECT_EQ(got.value_moment, scalar.value_moment);
      EXPECT_EQ(got.weighted_value_moment, scalar.weighted_value_moment);
    }
  }
}

// The worked example of the published method: 3 tokens, 4 query and 2 KV heads of width 4, here in the first 4 of 16
// channels. Its second moments are means over tokens, and over the KV heads of the layer.
TEST(Accumulate, ReproducesThePublishedExample) {
  constexpr int kWidth = 16;
  Samples samples{3, 4, 2, kWidth, 0, rope_of(0), {}, {}, {}};
  const auto fill = [](std::vector<float>& rows, int num_heads, auto value) {
    for (int t = 0; t < 3; ++t) {
      for (int h = 0; h < num_heads; ++h) {
        for (int j = 0; j < kWidth; ++j) rows.push_back(j < 4 ? static_cast<float>(value(t, h, j)) : 0.0F);
      }
    }
  };
  fill(samples.q, 4, [](int t, int h, int j) { return (31 * t + 7 * h + 3 * j) % 11 - 5; });
  fill(samples.k, 2, [](int t, int h, int j) { return (17 * t + 5 * h + 2 * j) % 7 - 3; });
  fill(samples.v, 2, [](int t, int h, int j) { return (13 * t + 3 * h + 5 * j) % 9 - 4; });
  LayerStatistics layer;
  ASSERT_TRUE(accumulate(layer, samples.block()));

  constexpr std::array<std::array<double, 4>, 4> kSigmaK{{{11.083333, -2.25, -4.583333, 1.333333},
                                                          {-2.25, 11.75, -3.583333, -5.166667},
                                                          {-4.583333, -3.583333, 8.416667, -0.666667},
                                                          {1.333333, -5.166667, -0.666667, 8.416667}}};
  constexpr std::array<std::array<double, 4>, 4> kSigmaV{{{7.304898, -2.751554, 2.749515, -0.834795},
                                                          {-2.751554, 7.721021, -2.328215, 0.054571},
                                                          {2.749515, -2.328215, 6.981099, -2.546327},
                                                          {-0.834795, 0.054571, -2.546327, 7.545251}}};
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      double sigma_k = 0;
      double sigma_v = 0;
      for (const HeadStatistics& head : layer.heads) {
        sigma_k += head.query_moment[at(i, j, kWidth)] / head.num_queries / 2;
        sigma_v += head.weighted_value_moment[at(i, j, kWidth)] / head.num_weighted / 2;
      }
      EXPECT_NEAR(sigma_k, kSigmaK[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)], kGoldenTolerance);
      EXPECT_NEAR(sigma_v, kSigmaV[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)], kGoldenTolerance);
    }
  }
  EXPECT_EQ(layer.heads.front().num_keys, 0);  // positions 0..2 are sinks
}

TEST(Accumulate, ZeroQueriesGiveNoNan) {
  Samples samples = random_samples(10, 80, 2, 1, 16, rope_of(16));
  std::fill(samples.q.begin(), samples.q.end(), 0.0F);
  LayerStatistics layer;
  ASSERT_TRUE(accumulate(layer, samples.block()));
  for (const double value : layer.heads[0].weighted_value_moment) EXPECT_EQ(value, 0);
}

TEST(Accumulate, BadRowsAreRefusedByPlaceAndLeaveNothing) {
  Samples samples = random_samples(11, 70, 4, 2, 16, rope_of(16), 100);
  LayerStatistics layer;
  samples.k[at(3 * 2 + 1, 5, 16)] = std::numeric_limits<float>::quiet_NaN();
  const Status refused = accumulate(layer, samples.block());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
  EXPECT_NE(refused.error().message.find("layer 0: k of position 103, head 1"), std::string::npos)
      << refused.error().message;
  EXPECT_TRUE(layer.heads.empty());
}

TEST(Accumulate, ABlockOfAnotherShapeIsRefused) {
  const Samples first = random_samples(12, 70, 4, 2, 16, rope_of(16));
  LayerStatistics layer;
  ASSERT_TRUE(accumulate(layer, first.block()));
  const std::vector<double> before = layer.heads[0].key_moment;
  const Samples others[] = {
      random_samples(12, 70, 4, 1, 16, rope_of(16)),       // KV heads
      random_samples(12, 70, 4, 2, 32, rope_of(32)),       // width
      random_samples(12, 70, 4, 2, 16, rope_of(8)),        // RoPE
      random_samples(12, 70, 4, 2, 16, rope_of(16, 1e6)),  // frequencies
  };
  for (const Samples& other : others) {
    const Status refused = accumulate(layer, other.block());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(layer.heads[0].key_moment, before);
}

TEST(Accumulate, ImpossibleBlocksAreRefused) {
  const Samples samples = random_samples(13, 70, 4, 2, 16, rope_of(16));
  const auto refused = [&](const auto& change) {
    SampleBlock block = samples.block();
    change(block);
    LayerStatistics layer;
    const Status status = accumulate(layer, block);
    return !status && status.error().code == ErrorCode::kInvalidArgument && layer.heads.empty();
  };
  EXPECT_TRUE(refused([](SampleBlock& b) { b.q = nullptr; }));
  EXPECT_TRUE(refused([](SampleBlock& b) { b.rope = nullptr; }));
  EXPECT_TRUE(refused([](SampleBlock& b) { b.head_dim = 24; }));
  EXPECT_TRUE(refused([](SampleBlock& b) { b.head_dim = 512; }));
  EXPECT_TRUE(refused([](SampleBlock& b) { b.num_kv_heads = 3; }));
  EXPECT_TRUE(refused([](SampleBlock& b) { b.num_tokens = 0; }));
  EXPECT_TRUE(refused([](SampleBlock& b) { b.first_position = -1; }));
  EXPECT_TRUE(refused([](SampleBlock& b) { b.first_position = std::numeric_limits<std::int64_t>::max(); }));
}

}  // namespace
}  // namespace oscar
