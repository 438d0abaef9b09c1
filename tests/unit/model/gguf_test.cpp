#include "model/gguf.hpp"

#include <gtest/gtest.h>

#include <sstream>

#include "unit/model/gguf_builder.hpp"

namespace oscar::gguf {
namespace {

using test::GgufBuilder;
using test::tiny_model;

Result<Header> parse(const std::string& bytes) {
  std::istringstream in(bytes);
  return read_header(in, bytes.size(), "model.gguf");
}

void expect_error(const std::string& bytes, ErrorCode code, const std::string& part) {
  const auto header = parse(bytes);
  ASSERT_FALSE(header.has_value()) << part;
  EXPECT_EQ(header.error().code, code) << header.error().message;
  EXPECT_NE(header.error().message.find(part), std::string::npos) << header.error().message;
  EXPECT_EQ(header.error().message.rfind("model.gguf: ", 0), 0U) << header.error().message;
}

TEST(GgufTest, ReadsEveryScalarTypeAndKeepsIntegerArrays) {
  GgufBuilder builder;
  builder.entry("u8", 0, "\xFF").entry("i8", 1, "\xFF").entry("u16", 2, GgufBuilder::number<std::uint16_t>(65535));
  builder.entry("i16", 3, GgufBuilder::number<std::int16_t>(-2)).u32("u32", 4000000000U);
  builder.entry("i32", 5, GgufBuilder::number<std::int32_t>(-3)).f32("f32", 0.5F).flag("flag", true);
  builder.u64("u64", ~std::uint64_t{0}).entry("i64", 11, GgufBuilder::number<std::int64_t>(-4));
  builder.entry("f64", 12, GgufBuilder::number(0.25)).text("text", "hello").u32s("array", {7, 8, 9});
  const auto header = parse(builder.build());
  ASSERT_TRUE(header) << header.error().message;
  const auto& m = header->metadata;
  EXPECT_EQ(std::get<std::int64_t>(m.at("u8")), 255);
  EXPECT_EQ(std::get<std::int64_t>(m.at("i8")), -1);
  EXPECT_EQ(std::get<std::int64_t>(m.at("u16")), 65535);
  EXPECT_EQ(std::get<std::int64_t>(m.at("i16")), -2);
  EXPECT_EQ(std::get<std::int64_t>(m.at("u32")), 4000000000);
  EXPECT_EQ(std::get<std::int64_t>(m.at("i32")), -3);
  EXPECT_EQ(std::get<double>(m.at("f32")), 0.5);
  EXPECT_EQ(std::get<bool>(m.at("flag")), true);
  EXPECT_EQ(std::get<std::int64_t>(m.at("u64")), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(std::get<std::int64_t>(m.at("i64")), -4);
  EXPECT_EQ(std::get<double>(m.at("f64")), 0.25);
  EXPECT_EQ(std::get<std::string>(m.at("text")), "hello");
  EXPECT_EQ(std::get<std::vector<std::int64_t>>(m.at("array")), (std::vector<std::int64_t>{7, 8, 9}));
}

TEST(GgufTest, SkipsVocabulariesAndLongStringsWithoutLosingItsPlace) {
  GgufBuilder builder;
  builder.texts("tokens", std::vector<std::string>(5000, "token")).text("template", std::string(200000, 'x'));
  builder.u32s("long", std::vector<std::uint32_t>(kMaxArray + 1, 1)).u32("after", 42);
  const auto header = parse(builder.build());
  ASSERT_TRUE(header) << header.error().message;
  EXPECT_EQ(header->metadata.size(), 1U);
  EXPECT_EQ(std::get<std::int64_t>(header->metadata.at("after")), 42);
}

TEST(GgufTest, TensorsSayWhereTheirBytesAre) {
  const std::string file = tiny_model().build();
  const auto header = parse(file);
  ASSERT_TRUE(header) << header.error().message;
  const Tensor& tensor = header->tensors.at("blk.1.attn_k.weight");
  EXPECT_EQ(tensor.shape, (std::vector<std::uint64_t>{64, 32}));
  EXPECT_EQ(tensor.num_bytes, 4096U);
  ASSERT_LE(tensor.offset + tensor.num_bytes, file.size());
  EXPECT_EQ(file[tensor.offset], '\1');
}

TEST(GgufTest, VersionTwoIsReadAndOthersAreRefused) {
  GgufBuilder builder = tiny_model();
  builder.version = 2;
  EXPECT_TRUE(parse(builder.build()));
  builder.version = 1;
  expect_error(builder.build(), ErrorCode::kUnsupported, "GGUF version 1");
  builder.version = 4;
  expect_error(builder.build(), ErrorCode::kUnsupported, "GGUF version 4");
  builder.version = 0x03000000;
  expect_error(builder.build(), ErrorCode::kUnsupported, "big-endian");
}

TEST(GgufTest, NamesWhatIsWrongWithAFile) {
  expect_error("", ErrorCode::kBadInput, "the file is empty");
  expect_error("PK\3\4 this is a zip", ErrorCode::kBadInput, "not a GGUF file");
  expect_error("GG", ErrorCode::kBadInput, "not a GGUF file");
  const std::string whole = tiny_model().build();
  expect_error(whole.substr(0, 20), ErrorCode::kBadInput, "download is incomplete");
  expect_error(whole.substr(0, 200), ErrorCode::kBadInput, "download is incomplete");
  expect_error(whole.substr(0, whole.size() - 1), ErrorCode::kBadInput, "ends beyond the file's");
}

TEST(GgufTest, EveryTruncationIsAnError) {
  const std::string whole = tiny_model().build();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    ASSERT_FALSE(parse(whole.substr(0, length))) << "of " << whole.size() << " bytes, first " << length;
  }
}

TEST(GgufTest, HugeCountsAndLengthsAreRefusedBeforeAllocation) {
  const auto u64 = [](std::uint64_t v) { return GgufBuilder::number(v); };
  const auto u32 = [](std::uint32_t v) { return GgufBuilder::number(v); };
  const std::uint64_t huge = ~std::uint64_t{0};
  expect_error("GGUF" + u32(3) + u64(huge) + u64(0), ErrorCode::kBadInput, "tensors");
  expect_error("GGUF" + u32(3) + u64(0) + u64(huge), ErrorCode::kBadInput, "metadata keys");
  expect_error("GGUF" + u32(3) + u64(1000) + u64(1000), ErrorCode::kBadInput, "incomplete");
  expect_error("GGUF" + u32(3) + u64(0) + u64(1) + u64(huge) + std::string(64, 'k'), ErrorCode::kBadInput,
               "metadata key");
  GgufBuilder strings;
  strings.entry("tokens", 9, u32(8) + u64(huge / 8));
  expect_error(strings.build(), ErrorCode::kBadInput, "incomplete");
  GgufBuilder numbers;
  numbers.entry("numbers", 9, u32(10) + u64(huge / 4));
  expect_error(numbers.build(), ErrorCode::kBadInput, "incomplete");
  GgufBuilder text;
  text.entry("text", 8, u64(huge));
  expect_error(text.build(), ErrorCode::kBadInput, "incomplete");
}

TEST(GgufTest, MalformedFieldsAreRefused) {
  GgufBuilder nested;
  nested.entry("nested", 9, GgufBuilder::number<std::uint32_t>(9) + GgufBuilder::number<std::uint64_t>(1));
  expect_error(nested.build(), ErrorCode::kBadInput, "array of value type 9");
  expect_error(GgufBuilder().entry("strange", 99, "....").build(), ErrorCode::kBadInput, "value type 99");
  expect_error(GgufBuilder().u32("twice", 1).u32("twice", 2).build(), ErrorCode::kBadInput, "'twice' appears twice");
  expect_error(tiny_model().tensor("blk.0.attn_k.weight", {64}, 128).build(), ErrorCode::kBadInput, "appears twice");
  expect_error(tiny_model().u32("general.alignment", 24).build(), ErrorCode::kBadInput, "power of two");
  expect_error(tiny_model().tensor("t", {1, 1, 1, 1, 1}, 2).build(), ErrorCode::kBadInput, "5 dimensions");
  expect_error(tiny_model().tensor("t", {std::uint64_t{1} << 40, std::uint64_t{1} << 40}, 2).build(),
               ErrorCode::kBadInput, "impossible dimension");
  expect_error(tiny_model().tensor("t", {0}, 2).build(), ErrorCode::kBadInput, "impossible dimension");
  expect_error(tiny_model().tensor("t", {33}, 18, 2).build(), ErrorCode::kBadInput, "whole blocks of 32");
  // Names from the file are shown without control characters.
  expect_error(GgufBuilder().entry("\x1b[31m", 99, "....").build(), ErrorCode::kBadInput, "'?[31m'");
}

TEST(GgufTest, TensorsOfAnUnknownTypeAreCarriedWithoutASize) {
  const auto header = parse(tiny_model().tensor("new", {64}, 16, 999).build());
  ASSERT_TRUE(header) << header.error().message;
  EXPECT_EQ(header->tensors.at("new").num_bytes, 0U);
}

}  // namespace
}  // namespace oscar::gguf
