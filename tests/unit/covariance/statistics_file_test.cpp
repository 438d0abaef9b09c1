#include <gtest/gtest.h>

#include <limits>
#include <oscar/covariance.hpp>

#include "io/safetensors.hpp"
#include "support/statistics.hpp"
#include "support/temp_folder.hpp"

namespace oscar {
namespace {

using test::TempFolder;

void expect_equal(const ModelStatistics& got, const ModelStatistics& expected) {
  EXPECT_EQ(got.num_tokens, expected.num_tokens);
  EXPECT_EQ(got.corpus_hash, expected.corpus_hash);
  EXPECT_EQ(got.geometry.fingerprint, expected.geometry.fingerprint);
  ASSERT_EQ(got.layers.size(), expected.layers.size());
  for (const auto& [index, layer] : expected.layers) {
    const LayerStatistics& read = got.layers.at(index);
    EXPECT_EQ(read.rope.order, layer.rope.order);
    EXPECT_EQ(read.rope.rotary_dim, layer.rope.rotary_dim);
    EXPECT_EQ(read.rope.inv_freq, layer.rope.inv_freq);
    ASSERT_EQ(read.heads.size(), layer.heads.size());
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      const HeadStatistics& a = read.heads[h];
      const HeadStatistics& b = layer.heads[h];
      EXPECT_EQ(a.head_dim, b.head_dim);
      EXPECT_EQ(a.num_queries, b.num_queries);
      EXPECT_EQ(a.num_keys, b.num_keys);
      EXPECT_EQ(a.num_weighted, b.num_weighted);
      EXPECT_EQ(a.query_moment, b.query_moment);
      EXPECT_EQ(a.pre_rope_key_sum, b.pre_rope_key_sum);
      EXPECT_EQ(a.key_moment, b.key_moment);
      EXPECT_EQ(a.block_key_sum, b.block_key_sum);
      EXPECT_EQ(a.block_count, b.block_count);
      EXPECT_EQ(a.value_sum, b.value_sum);
      EXPECT_EQ(a.value_moment, b.value_moment);
      EXPECT_EQ(a.weighted_value_moment, b.weighted_value_moment);
      EXPECT_EQ(a.output_gram, b.output_gram);
    }
  }
}

TEST(StatisticsFile, RoundTripIsExact) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  const ModelStatistics statistics = test::statistics_of({});
  ASSERT_TRUE(save_statistics(statistics, path));
  const auto read = load_statistics(path);
  ASSERT_TRUE(read) << read.error().message;
  expect_equal(*read, statistics);
}

TEST(StatisticsFile, RoundTripOfLayersWithoutKeysRopeOrOutputWeights) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  ModelStatistics statistics = test::statistics_of({});
  statistics.layers.erase(0);
  LayerStatistics& layer = statistics.layers[1];
  layer.rope = test::rope_of(0);
  for (HeadStatistics& head : layer.heads) {
    head.output_gram.clear();
    head.block_count.clear();
    head.block_key_sum.clear();
  }
  ASSERT_TRUE(save_statistics(statistics, path));
  const auto read = load_statistics(path);
  ASSERT_TRUE(read) << read.error().message;
  expect_equal(*read, statistics);
}

TEST(StatisticsFile, InconsistentStatisticsAreNotSaved) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  ModelStatistics statistics = test::statistics_of({});
  statistics.layers[1].heads[1].value_sum.pop_back();
  const Status status = save_statistics(statistics, path);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(status.error().message.find("layer 1: KV head 1: value_sum has 15 numbers, expected 16"), std::string::npos)
      << status.error().message;
  EXPECT_TRUE(folder.names().empty());
}

TEST(StatisticsFile, OtherAndDamagedFilesAreRefused) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  ASSERT_TRUE(save_statistics(test::statistics_of({}), path));
  std::string bytes = test::read_bytes(path);

  bytes[bytes.size() - 9] ^= 1;
  test::write_bytes(path, bytes);
  auto read = load_statistics(path);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kBadInput);
  EXPECT_NE(read.error().message.find("damaged"), std::string::npos) << read.error().message;

  io::SafetensorsContent content;
  content.metadata = {{"format", "oscar-rotation"}};
  ASSERT_TRUE(io::write_safetensors(content, path));
  read = load_statistics(path);
  ASSERT_FALSE(read);
  EXPECT_NE(read.error().message.find("not a statistics file"), std::string::npos) << read.error().message;

  content.metadata = {{"format", "oscar-statistics"}, {"format_version", "99"}};
  ASSERT_TRUE(io::write_safetensors(content, path));
  read = load_statistics(path);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(read.error().message.find("version 99"), std::string::npos) << read.error().message;
}

}  // namespace
}  // namespace oscar
