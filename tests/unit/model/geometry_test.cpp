#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <oscar/model.hpp>

#include "unit/model/gguf_builder.hpp"

namespace oscar {
namespace {

using test::GgufBuilder;
using test::tiny_model;

class GeometryTest : public ::testing::Test {
 protected:
  void SetUp() override { path_ = ::testing::TempDir() + "geometry_test_" + std::to_string(::getpid()) + ".gguf"; }
  void TearDown() override { std::filesystem::remove(path_); }

  Result<ModelGeometry> read(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    return read_gguf_geometry(path_);
  }
  Result<ModelGeometry> read(const GgufBuilder& builder) { return read(builder.build()); }

  void expect_error(const GgufBuilder& builder, ErrorCode code, const std::string& part) {
    const auto geometry = read(builder);
    ASSERT_FALSE(geometry.has_value()) << part;
    EXPECT_EQ(geometry.error().code, code) << geometry.error().message;
    EXPECT_NE(geometry.error().message.find(part), std::string::npos) << geometry.error().message;
    EXPECT_EQ(geometry.error().message.rfind(path_ + ": ", 0), 0U) << geometry.error().message;
  }

  std::string path_;
};

TEST_F(GeometryTest, ReadsTheShapeOfEveryLayer) {
  const auto geometry = read(tiny_model());
  ASSERT_TRUE(geometry) << geometry.error().message;
  EXPECT_EQ(geometry->architecture, "qwen2");
  EXPECT_EQ(geometry->name, "tiny");
  EXPECT_EQ(geometry->context_length, 2048);
  ASSERT_EQ(geometry->layers.size(), 2U);
  for (const LayerGeometry& layer : geometry->layers) {
    EXPECT_EQ(layer.kind, LayerKind::kFull);
    EXPECT_EQ(layer.num_qo_heads, 4);
    EXPECT_EQ(layer.num_kv_heads, 2);
    EXPECT_EQ(layer.head_dim, 16);
    EXPECT_EQ(layer.gqa_group(), 2);
  }
}

TEST_F(GeometryTest, KeyLengthOverridesTheSplitOfTheEmbedding) {
  const auto geometry =
      read(tiny_model().u32("qwen2.attention.key_length", 128).u32("qwen2.attention.value_length", 128));
  ASSERT_TRUE(geometry) << geometry.error().message;
  EXPECT_EQ(geometry->layers[0].head_dim, 128);
}

TEST_F(GeometryTest, HeadCountsMayComeLayerByLayer) {
  GgufBuilder builder = tiny_model();
  builder.remove("qwen2.attention.head_count").remove("qwen2.attention.head_count_kv");
  builder.u32s("qwen2.attention.head_count", {4, 2}).u32s("qwen2.attention.head_count_kv", {2, 0});
  const auto geometry = read(builder);
  ASSERT_TRUE(geometry) << geometry.error().message;
  EXPECT_EQ(geometry->layers[0].num_kv_heads, 2);
  EXPECT_EQ(geometry->layers[1].kind, LayerKind::kNoCache);
}

TEST_F(GeometryTest, MissingKvHeadCountMeansOneAQueryHead) {
  const auto geometry = read(tiny_model().remove("qwen2.attention.head_count_kv"));
  ASSERT_TRUE(geometry) << geometry.error().message;
  EXPECT_EQ(geometry->layers[0].num_kv_heads, 4);
}

TEST_F(GeometryTest, LayersWithoutKeyWeightsKeepNoCache) {
  GgufBuilder builder = tiny_model();
  builder.remove("qwen2.block_count").u32("qwen2.block_count", 4);
  builder.tensor("blk.2.attn_qkv.weight", {64, 64}, 8192).tensor("blk.2.ssm_conv1d.weight", {4, 64}, 512);
  builder.tensor("blk.3.attn_qkv.weight", {64, 128}, 16384);
  const auto geometry = read(builder);
  ASSERT_TRUE(geometry) << geometry.error().message;
  EXPECT_EQ(geometry->layers[1].kind, LayerKind::kFull);
  EXPECT_EQ(geometry->layers[2].kind, LayerKind::kNoCache);
  EXPECT_EQ(geometry->layers[3].kind, LayerKind::kFull);
}

TEST_F(GeometryTest, SlidingLayersFollowThePatternOfTheFileOrTheArchitecture) {
  GgufBuilder told = tiny_model().u32("qwen2.attention.sliding_window", 512);
  told.u32("qwen2.attention.sliding_window_pattern", 2);
  auto geometry = read(told);
  ASSERT_TRUE(geometry) << geometry.error().message;
  EXPECT_EQ(geometry->layers[0].kind, LayerKind::kSlidingWindow);
  EXPECT_EQ(geometry->layers[0].sliding_window, 512);
  EXPECT_EQ(geometry->layers[1].kind, LayerKind::kFull);
  EXPECT_EQ(geometry->layers[1].sliding_window, 0);

  geometry = read(tiny_model("gemma2").u32("gemma2.attention.sliding_window", 4096));
  ASSERT_TRUE(geometry) << geometry.error().message;
  EXPECT_EQ(geometry->layers[0].kind, LayerKind::kSlidingWindow);
  EXPECT_EQ(geometry->layers[1].kind, LayerKind::kFull);

  geometry = read(tiny_model().u32("qwen2.attention.sliding_window", 4096));
  ASSERT_TRUE(geometry) << geometry.error().message;
  EXPECT_EQ(geometry->layers[0].kind, LayerKind::kFull);
}

TEST_F(GeometryTest, RefusesWhatTheCacheCannotHold) {
  expect_error(tiny_model().u32("qwen2.attention.kv_lora_rank", 512), ErrorCode::kUnsupported, "MLA");
  expect_error(tiny_model("deepseek2"), ErrorCode::kUnsupported, "MLA");
  expect_error(tiny_model().flag("qwen2.attention.causal", false), ErrorCode::kUnsupported, "encoder");
  expect_error(tiny_model().u32("qwen2.attention.key_length", 40).u32("qwen2.attention.value_length", 40),
               ErrorCode::kUnsupported, "head_dim is 40");
  expect_error(tiny_model().u32("qwen2.attention.key_length", 272).u32("qwen2.attention.value_length", 272),
               ErrorCode::kUnsupported, "head_dim is 272");
  expect_error(tiny_model().u32("qwen2.attention.value_length", 32), ErrorCode::kUnsupported, "only equal widths");
  GgufBuilder uneven = tiny_model().remove("qwen2.attention.head_count_kv");
  expect_error(uneven.u32("qwen2.attention.head_count_kv", 3), ErrorCode::kUnsupported, "4 query heads do not share 3");
  GgufBuilder recurrent;
  recurrent.text("general.architecture", "mamba").u32("mamba.block_count", 2).u32("mamba.context_length", 1024);
  recurrent.u32("mamba.embedding_length", 64).tensor("blk.0.ssm_in.weight", {64, 64}, 8192);
  expect_error(recurrent, ErrorCode::kUnsupported, "recurrent model");
}

TEST_F(GeometryTest, RefusesHeadersThatMakeNoSense) {
  expect_error(tiny_model().remove("general.architecture"), ErrorCode::kBadInput, "not a language model");
  expect_error(tiny_model().remove("general.architecture").text("general.architecture", "a\nb"), ErrorCode::kBadInput,
               "not a name");
  expect_error(tiny_model().remove("qwen2.block_count"), ErrorCode::kBadInput, "block_count is missing");
  expect_error(tiny_model().remove("qwen2.block_count").u32("qwen2.block_count", 4000000000U), ErrorCode::kBadInput,
               "block_count is 4000000000");
  expect_error(tiny_model().remove("qwen2.block_count").text("qwen2.block_count", "2"), ErrorCode::kBadInput,
               "is not an integer");
  expect_error(tiny_model().remove("qwen2.context_length"), ErrorCode::kBadInput, "context_length is missing");
  GgufBuilder short_array = tiny_model().remove("qwen2.attention.head_count_kv");
  expect_error(short_array.u32s("qwen2.attention.head_count_kv", {2}), ErrorCode::kBadInput, "1 entries for 2 layers");
  GgufBuilder vocabulary;
  vocabulary.text("general.architecture", "llama").u32("llama.block_count", 2);
  expect_error(vocabulary, ErrorCode::kBadInput, "no tensors");
}

TEST_F(GeometryTest, NamesMissingFilesAndFolders) {
  auto geometry = read_gguf_geometry(path_);
  ASSERT_FALSE(geometry);
  EXPECT_EQ(geometry.error().code, ErrorCode::kIo);
  EXPECT_NE(geometry.error().message.find("no such file"), std::string::npos);
  geometry = read_gguf_geometry(::testing::TempDir());
  ASSERT_FALSE(geometry);
  EXPECT_NE(geometry.error().message.find("not a regular file"), std::string::npos);
}

TEST_F(GeometryTest, FingerprintFollowsShapeAndKeyWeightsOnly) {
  const auto base = read(tiny_model());
  ASSERT_TRUE(base) << base.error().message;
  EXPECT_EQ(base->fingerprint.size(), 32U);
  EXPECT_EQ(base->fingerprint.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(read(tiny_model())->fingerprint, base->fingerprint);
  EXPECT_EQ(read(tiny_model().remove("general.name").text("general.name", "other"))->fingerprint, base->fingerprint);
  EXPECT_EQ(read(tiny_model().tensor("output.weight", {64}, 128))->fingerprint, base->fingerprint);

  std::string other_weights = tiny_model().build();
  other_weights[other_weights.size() - 8192] ^= 1;  // first byte of the first key tensor
  EXPECT_NE(read(other_weights)->fingerprint, base->fingerprint);
  GgufBuilder other_heads = tiny_model().remove("qwen2.attention.head_count_kv");
  EXPECT_NE(read(other_heads.u32("qwen2.attention.head_count_kv", 4))->fingerprint, base->fingerprint);
  EXPECT_NE(read(tiny_model("llama"))->fingerprint, base->fingerprint);
}

TEST(HalvesPermutationTest, InterleavedPairsMoveToHalvesAndTheRestStays) {
  const RopeSpec rope{.order = RopeOrder::kInterleaved, .rotary_dim = 6, .inv_freq = {}};
  EXPECT_EQ(halves_permutation(rope, 8), (std::vector<int>{0, 2, 4, 1, 3, 5, 6, 7}));
}

TEST(HalvesPermutationTest, IsTheIdentityForHalvesAndForNoRope) {
  for (const RopeOrder order : {RopeOrder::kHalves, RopeOrder::kNone}) {
    const RopeSpec rope{.order = order, .rotary_dim = 4, .inv_freq = {}};
    EXPECT_EQ(halves_permutation(rope, 6), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  }
}

TEST(HalvesPermutationTest, PairsOfAnyWidthStayTogether) {
  EXPECT_TRUE(rc::check("pair p is engine channels 2p and 2p + 1, and every channel appears once", [] {
    const int head_dim = 16 * *rc::gen::inRange(1, 17);
    const int rotary_dim = 2 * *rc::gen::inRange(0, head_dim / 2 + 1);
    const RopeSpec rope{.order = RopeOrder::kInterleaved, .rotary_dim = rotary_dim, .inv_freq = {}};
    std::vector<int> permutation = halves_permutation(rope, head_dim);
    RC_ASSERT(static_cast<int>(permutation.size()) == head_dim);
    for (int p = 0; p < rotary_dim / 2; ++p) {
      RC_ASSERT(permutation[p] == 2 * p);
      RC_ASSERT(permutation[p + rotary_dim / 2] == 2 * p + 1);
    }
    std::ranges::sort(permutation);
    for (int c = 0; c < head_dim; ++c) RC_ASSERT(permutation[c] == c);
  }));
}

}  // namespace
}  // namespace oscar
