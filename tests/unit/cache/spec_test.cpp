#include <gtest/gtest.h>

#include <oscar/cache.hpp>

namespace oscar {
namespace {

KvSpec spec_of(int head_dim, ParameterFormat format) {
  return {.num_kv_heads = 2, .head_dim = head_dim, .parameter_format = format};
}

TEST(KvSpec, CountsCodesAndParametersOfAPage) {
  EXPECT_EQ(spec_of(64, ParameterFormat::kLog8).page_bits_per_element(), 2.25);
  EXPECT_EQ(spec_of(128, ParameterFormat::kLog8).page_bits_per_element(), 2.125);
  EXPECT_EQ(spec_of(256, ParameterFormat::kLog8).page_bits_per_element(), 2.0625);
  EXPECT_EQ(spec_of(64, ParameterFormat::kFloatPair).page_bits_per_element(), 3.0);
  EXPECT_EQ(spec_of(128, ParameterFormat::kFloatPair).page_bits_per_element(), 2.5);
  EXPECT_EQ(spec_of(256, ParameterFormat::kFloatPair).page_bits_per_element(), 2.25);
  EXPECT_EQ(spec_of(64, ParameterFormat::kLog8).half_bytes(), 64u * 16 + 128);
  EXPECT_EQ(spec_of(80, ParameterFormat::kFloatPair).half_bytes(), 80u * 16 + 512);
}

// The 16-bit rows are extra copies: every token is in a page too.
TEST(KvSpec, CountsTheWindowsOnTopOfThePages) {
  KvSpec spec = spec_of(128, ParameterFormat::kLog8);
  EXPECT_EQ(spec.bits_per_element(32768), 2.125 + 320 * 16.0 / 32768);
  EXPECT_EQ(spec.bits_per_element(320), 18.125);
  EXPECT_EQ(spec.bits_per_element(1), 18.125);
  EXPECT_EQ(spec.bits_per_element(0), 0);
  spec.sink = spec.recent = 0;
  EXPECT_EQ(spec.bits_per_element(1000), 2.125);
}

TEST(KvSpec, IsRefusedWithTheValueAndTheRemedy) {
  EXPECT_TRUE(check_spec(spec_of(64, ParameterFormat::kLog8)));
  EXPECT_TRUE(check_spec(spec_of(16, ParameterFormat::kLog8)));
  EXPECT_TRUE(check_spec(spec_of(256, ParameterFormat::kFloatPair)));
  for (const int head_dim : {-16, 0, 8, 100, 272}) {
    const Status status = check_spec(spec_of(head_dim, ParameterFormat::kLog8));
    ASSERT_FALSE(status) << head_dim;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find("head_dim is " + std::to_string(head_dim)), std::string::npos)
        << status.error().message;
  }
  KvSpec spec = spec_of(64, ParameterFormat::kLog8);
  spec.sink = -1;
  EXPECT_EQ(check_spec(spec).error().message, "KvSpec: sink is -1; use 0 to 16777216");
  spec = spec_of(64, ParameterFormat::kLog8);
  spec.recent = -5;
  EXPECT_FALSE(check_spec(spec));
  spec = spec_of(64, ParameterFormat::kLog8);
  spec.num_kv_heads = 0;
  EXPECT_FALSE(check_spec(spec));
}

}  // namespace
}  // namespace oscar
