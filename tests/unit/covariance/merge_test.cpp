#include <gtest/gtest.h>

#include <cmath>
#include <oscar/covariance.hpp>

#include "support/statistics.hpp"

namespace oscar {
namespace {

using test::SmallModel;

constexpr double kMergeTolerance = 1e-12;  // the same double sums in two parts

void expect_near(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], kMergeTolerance * largest) << i;
}

TEST(Merge, HalvesMakeTheWhole) {
  const SmallModel model{.num_layers = 1, .num_tokens = 256};
  const auto samples = test::samples_of(model, 0);
  ModelStatistics first;
  first.geometry = test::geometry_of(model);
  ModelStatistics second = first;
  ModelStatistics whole = first;
  ASSERT_TRUE(accumulate(first.layers[0], samples.block(0, 100)));
  ASSERT_TRUE(accumulate(second.layers[0], samples.block(100, 156)));
  ASSERT_TRUE(accumulate(whole.layers[0], samples.block(0, 100)));
  ASSERT_TRUE(accumulate(whole.layers[0], samples.block(100, 156)));
  first.num_tokens = 100;
  second.num_tokens = 156;
  ASSERT_TRUE(merge(first, second));

  EXPECT_EQ(first.num_tokens, 256);
  for (std::size_t h = 0; h < 2; ++h) {
    const HeadStatistics& got = first.layers[0].heads[h];
    const HeadStatistics& expected = whole.layers[0].heads[h];
    EXPECT_EQ(got.num_queries, expected.num_queries);
    EXPECT_EQ(got.num_keys, expected.num_keys);
    EXPECT_EQ(got.num_weighted, expected.num_weighted);
    expect_near(got.query_moment, expected.query_moment);
    expect_near(got.pre_rope_key_sum, expected.pre_rope_key_sum);
    expect_near(got.key_moment, expected.key_moment);
    expect_near(got.block_key_sum, expected.block_key_sum);
    expect_near(got.block_count, expected.block_count);
    expect_near(got.value_sum, expected.value_sum);
    expect_near(got.value_moment, expected.value_moment);
    expect_near(got.weighted_value_moment, expected.weighted_value_moment);
  }
}

TEST(Merge, LayersAndGramsThatOnlyOneHasAreKept) {
  ModelStatistics both = test::statistics_of({.num_layers = 2});
  ModelStatistics into = both;
  into.layers.erase(1);
  for (HeadStatistics& head : into.layers[0].heads) head.output_gram.clear();
  const auto gram = both.layers[0].heads[0].output_gram;
  ASSERT_TRUE(merge(into, both));
  ASSERT_EQ(into.layers.size(), 2U);
  EXPECT_EQ(into.layers[1].heads[0].key_moment, both.layers[1].heads[0].key_moment);
  EXPECT_EQ(into.layers[0].heads[0].output_gram, gram);
}

TEST(Merge, CorpusHashDependsOnBothAndTheirOrder) {
  const ModelStatistics one = test::statistics_of({});
  ModelStatistics other = test::statistics_of({});
  other.corpus_hash = "beef";
  ModelStatistics a = one;
  ModelStatistics b = other;
  ASSERT_TRUE(merge(a, other));
  ASSERT_TRUE(merge(b, one));
  EXPECT_EQ(a.corpus_hash.size(), 32U);
  EXPECT_NE(a.corpus_hash, b.corpus_hash);
}

TEST(Merge, AnotherModelIsRefusedAndNothingChanges) {
  const ModelStatistics one = test::statistics_of({});
  const auto refused = [&](const auto& change) {
    ModelStatistics into = one;
    ModelStatistics other = one;
    change(other);
    const Status status = merge(into, other);
    return !status && status.error().code == ErrorCode::kMismatch && into.num_tokens == one.num_tokens &&
           into.layers[0].heads[0].key_moment == one.layers.at(0).heads[0].key_moment;
  };
  EXPECT_TRUE(refused([](ModelStatistics& s) { s.geometry.fingerprint = "other"; }));
  EXPECT_TRUE(refused([](ModelStatistics& s) { s.geometry.layers.pop_back(); }));
  EXPECT_TRUE(refused([](ModelStatistics& s) { s.layers[1].rope.inv_freq[0] *= 2; }));
  EXPECT_TRUE(refused([](ModelStatistics& s) { s.layers[1].heads[0].key_moment.pop_back(); }));
}

}  // namespace
}  // namespace oscar
