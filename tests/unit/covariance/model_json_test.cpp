#include "covariance/model_json.hpp"

#include <gtest/gtest.h>

#include "support/statistics.hpp"

namespace oscar {
namespace {

TEST(GeometryJson, RoundTripKeepsEveryField) {
  ModelGeometry geometry = test::geometry_of({.num_layers = 3});
  geometry.layers[1] = {LayerKind::kSlidingWindow, 8, 1, 256, 512};
  geometry.layers[2] = {LayerKind::kNoCache, 0, 0, 0, 0};
  const auto read = geometry_from_json(geometry_to_json(geometry));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->architecture, geometry.architecture);
  EXPECT_EQ(read->name, geometry.name);
  EXPECT_EQ(read->context_length, geometry.context_length);
  EXPECT_EQ(read->fingerprint, geometry.fingerprint);
  ASSERT_EQ(read->layers.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read->layers[i].kind, geometry.layers[i].kind);
    EXPECT_EQ(read->layers[i].num_qo_heads, geometry.layers[i].num_qo_heads);
    EXPECT_EQ(read->layers[i].num_kv_heads, geometry.layers[i].num_kv_heads);
    EXPECT_EQ(read->layers[i].head_dim, geometry.layers[i].head_dim);
    EXPECT_EQ(read->layers[i].sliding_window, geometry.layers[i].sliding_window);
  }
}

TEST(GeometryJson, UnusableGeometriesAreRefusedWithTheReason) {
  const std::string good = geometry_to_json(test::geometry_of({.num_layers = 1}));
  const struct {
    const char* from;
    const char* to;
    const char* reason;
  } cases[] = {
      {"\"head_dim\":16", "\"head_dim\":24", "head_dim is 24"},
      {"\"head_dim\":16", "\"head_dim\":272", "head_dim is 272"},
      {"\"head_dim\":16", "\"head_dim\":-16", "'head_dim' is not an integer"},
      {"\"head_dim\":16", "\"head_dim\":1e1", "'head_dim' is not an integer"},
      {"\"head_dim\":16", "\"head_dim\":18446744073709551615", "'head_dim' is not an integer"},
      {"\"head_dim\":16,", "", "'head_dim' is missing"},
      {"\"num_kv_heads\":2", "\"num_kv_heads\":0", "do not share 0 KV heads"},
      {"\"num_kv_heads\":2", "\"num_kv_heads\":3", "do not share 3 KV heads"},
      {"\"num_qo_heads\":4", "\"num_qo_heads\":2147483647", "do not share"},
      {"\"kind\":\"full\"", "\"kind\":\"half\"", "'kind' has an unknown value"},
      {"\"name\":\"Small\"", "\"name\":7", "'name' is not a text"},
      {"\"layers\":[", "\"other\":[", "'layers' is not a list"},
      {"{", "[", "is not a JSON object"},
  };
  for (const auto& bad : cases) {
    std::string text = good;
    const std::size_t place = text.find(bad.from);
    ASSERT_NE(place, std::string::npos) << bad.from;
    text.replace(place, std::string(bad.from).size(), bad.to);
    const auto read = geometry_from_json(text);
    ASSERT_FALSE(read) << text;
    EXPECT_EQ(read.error().code, ErrorCode::kBadInput);
    EXPECT_NE(read.error().message.find(bad.reason), std::string::npos) << read.error().message;
  }
  EXPECT_FALSE(geometry_from_json(std::string(2'000'000, ' ')));
}

TEST(RopesJson, RoundTripAndRefusals) {
  const ModelGeometry geometry = test::geometry_of({.num_layers = 2});
  std::map<int, RopeSpec> ropes;
  ropes[1] = test::rope_of(8);
  ropes[1].order = RopeOrder::kInterleaved;
  const auto read = ropes_from_json(ropes_to_json(ropes), geometry);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->size(), 1U);
  EXPECT_EQ(read->at(1).order, RopeOrder::kInterleaved);
  EXPECT_EQ(read->at(1).rotary_dim, 8);
  for (const char* bad : {R"({"2":{"rope_order":"none","rotary_dim":0}})", R"({"-1":{"rope_order":"none"}})",
                          R"({"x":{}})", R"({"1":{"rope_order":"spiral","rotary_dim":0}})", R"({"1":[]})", "[]"}) {
    EXPECT_FALSE(ropes_from_json(bad, geometry)) << bad;
  }
}

TEST(RopeFault, FindsWhatDoesNotFit) {
  EXPECT_FALSE(rope_fault(test::rope_of(16), 16));
  EXPECT_FALSE(rope_fault(test::rope_of(0), 16));
  EXPECT_TRUE(rope_fault(test::rope_of(32), 16));  // wider than the head
  RopeSpec rope = test::rope_of(16);
  rope.rotary_dim = 15;
  EXPECT_TRUE(rope_fault(rope, 16));
  rope = test::rope_of(16);
  rope.inv_freq.pop_back();
  EXPECT_TRUE(rope_fault(rope, 16));
  rope = test::rope_of(16);
  rope.order = RopeOrder::kNone;
  EXPECT_TRUE(rope_fault(rope, 16));
}

}  // namespace
}  // namespace oscar
