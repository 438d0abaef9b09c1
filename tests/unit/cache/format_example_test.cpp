// Decodes the worked example of docs/format.md, read out of the page itself: documentation that drifts fails here.

#include <gtest/gtest.h>

#include <fstream>
#include <oscar/cache.hpp>
#include <sstream>
#include <string>

namespace oscar {
namespace {

constexpr int kHeadDim = 16;
constexpr double kPrinted = 0.5e-5;  // the page prints five decimals

std::vector<std::string> lines_of_page() {
  std::ifstream file(OSCAR_DOCS "/format.md");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// The hex dump of the fenced block ```name, zeros where it has no line.
std::vector<std::uint8_t> dump(const std::string& name) {
  std::vector<std::uint8_t> bytes(KvSpec{.num_kv_heads = 1, .head_dim = kHeadDim}.half_bytes());
  bool inside = false;
  for (const std::string& line : lines_of_page()) {
    if (line.rfind("```", 0) == 0) {
      inside = line == "```" + name;
    } else if (inside) {
      std::istringstream words(line);
      std::size_t offset = 0;
      words >> std::hex >> offset;
      for (unsigned byte; words >> byte; ++offset) bytes.at(offset) = static_cast<std::uint8_t>(byte);
    }
  }
  return bytes;
}

// Cells of the table rows "| slot | ... |" that have `columns` cells.
std::vector<std::vector<std::string>> table_rows(const std::string& slot, std::size_t columns) {
  std::vector<std::vector<std::string>> rows;
  for (const std::string& line : lines_of_page()) {
    if (line.rfind("| " + slot + " |", 0) != 0) continue;
    std::vector<std::string> cells;
    std::istringstream stream(line.substr(1));
    for (std::string cell; std::getline(stream, cell, '|');) cells.push_back(cell);
    if (cells.size() == columns) rows.push_back(cells);
  }
  return rows;
}

class FormatExample : public testing::TestWithParam<int> {};

TEST_P(FormatExample, DecodesToThePrintedCodesParametersAndValues) {
  const int slot = GetParam();
  const auto stored = table_rows(std::to_string(slot), 4), decoded = table_rows(std::to_string(slot), 5);
  ASSERT_EQ(stored.size(), 1u);
  ASSERT_EQ(decoded.size(), 1u);
  std::vector<std::uint8_t> printed_codes;
  std::istringstream words(stored[0][1]);
  for (int code; words >> code;) printed_codes.push_back(static_cast<std::uint8_t>(code));
  ASSERT_EQ(printed_codes.size(), std::size_t{kHeadDim});

  SideRotation side;
  side.offset_center = 0.5f;
  side.offset_spread = 0.4f;
  for (const bool is_key : {true, false}) {
    const std::vector<std::uint8_t> half = dump(is_key ? "page-key" : "page-value");
    std::vector<std::uint8_t> codes(kHeadDim);
    RowParameters parameters;
    (is_key ? unpack_key_row : unpack_value_row)(half.data(), kHeadDim, ParameterFormat::kLog8, slot, codes.data(),
                                                 &parameters);
    EXPECT_EQ(codes, printed_codes);
    EXPECT_EQ(parameters.scale_code, std::stoi(stored[0][2]));
    EXPECT_EQ(parameters.offset_code, std::stoi(stored[0][3]));
    std::vector<float> y_hat(kHeadDim);
    decode_rows(side, ParameterFormat::kLog8, kHeadDim, codes.data(), &parameters, 1, y_hat.data());
    for (int channel = 0; channel < kHeadDim; ++channel) {
      EXPECT_NEAR(y_hat[channel], std::stod(decoded[0][1u + codes[channel]]), kPrinted) << channel;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Slots, FormatExample, testing::Values(0, 37));

TEST(FormatExampleBytes, HoldNothingButTheTwoTokens) {
  for (const bool is_key : {true, false}) {
    const std::vector<std::uint8_t> half = dump(is_key ? "page-key" : "page-value");
    std::vector<std::uint8_t> again(half.size());
    for (const int slot : {0, 37}) {
      std::vector<std::uint8_t> codes(kHeadDim);
      RowParameters parameters;
      (is_key ? unpack_key_row : unpack_value_row)(half.data(), kHeadDim, ParameterFormat::kLog8, slot, codes.data(),
                                                   &parameters);
      (is_key ? pack_key_row : pack_value_row)(again.data(), kHeadDim, ParameterFormat::kLog8, slot, codes.data(),
                                               parameters);
    }
    EXPECT_EQ(again, half);
  }
}

}  // namespace
}  // namespace oscar
