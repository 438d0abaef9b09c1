// Every instruction set agrees with the plain encoders to the bit, whatever the row and however many rows a call has.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <oscar/codec.hpp>
#include <string>

#include "support/isas.hpp"
#include "support/plain_encoder.hpp"
#include "support/rows.hpp"

namespace oscar {
namespace {

using test::Row;

constexpr int kHeadDims[] = {16, 32, 48, 64, 80, 96, 112, 128, 192, 256};
constexpr Quantizer kQuantizers[] = {Quantizer::kMinMax, Quantizer::kLeastSquares, Quantizer::kFeedback};
const char* const kQuantizerNames[] = {"min_max", "least_squares", "feedback"};

std::string where(Quantizer quantizer, int head_dim, Isa isa, std::size_t row) {
  return std::string(kQuantizerNames[static_cast<int>(quantizer)]) + ", head_dim " + std::to_string(head_dim) + ", " +
         std::string(isa_name(isa)) + ", row " + std::to_string(row);
}

// The rows that break encoders: constant, zero, signed zeros, ties, a spike, steps of one code, huge, tiny, subnormal.
std::vector<Row> awkward_rows(std::mt19937& random, std::size_t head_dim) {
  std::vector<Row> rows = {Row(head_dim, 0.0f), Row(head_dim, 3.7f), Row(head_dim, -1e-3f), Row(head_dim, 1e20f)};
  const auto make = [&](auto function) {
    Row row(head_dim);
    for (std::size_t j = 0; j < head_dim; ++j) row[j] = static_cast<float>(function(j));
    rows.push_back(row);
  };
  make([](std::size_t j) { return j % 2 == 0 ? 0.0 : -0.0; });
  make([](std::size_t j) { return j % 3 == 0 ? -0.0 : double(j % 3); });
  make([](std::size_t j) { return (double(j % 5) - 2) * 0.9957; });
  make([](std::size_t j) { return double(j % 4); });
  make([](std::size_t j) { return j == 5 ? 1e4 : 0.0; });
  make([](std::size_t j) { return j == 15 ? -1e-30 : 1e-30; });
  make([](std::size_t j) { return 1e-42 * double(j); });
  for (const float deviation : {1e-6f, 1e-3f, 1.0f, 30.0f, 1e6f})
    rows.push_back(test::gaussian(random, head_dim, 2, deviation));
  rows.push_back(test::gaussian(random, head_dim, 1e4f, 1e-2f));
  return rows;
}

void expect_equal(const SideRotation& side, Quantizer quantizer, int head_dim, const std::vector<Row>& rows, Isa isa) {
  std::vector<float> y;
  for (const Row& row : rows) y.insert(y.end(), row.begin(), row.end());
  std::vector<std::uint8_t> codes(y.size(), 0xee);
  std::vector<RowParameters> parameters(rows.size());
  encode_rows(side, quantizer, head_dim, y.data(), static_cast<int>(rows.size()), codes.data(), parameters.data(), isa);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const test::PlainRow plain = test::plain_encode(side, quantizer, rows[row]);
    const auto first = codes.begin() + static_cast<std::ptrdiff_t>(row) * head_dim;
    ASSERT_EQ(std::vector<std::uint8_t>(first, first + head_dim), plain.codes) << where(quantizer, head_dim, isa, row);
    ASSERT_EQ(parameters[row].scale_code, plain.parameters.scale_code) << where(quantizer, head_dim, isa, row);
    ASSERT_EQ(parameters[row].offset_code, plain.parameters.offset_code) << where(quantizer, head_dim, isa, row);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(parameters[row].scale), std::bit_cast<std::uint32_t>(plain.parameters.scale))
        << where(quantizer, head_dim, isa, row);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(parameters[row].zero), std::bit_cast<std::uint32_t>(plain.parameters.zero))
        << where(quantizer, head_dim, isa, row);
  }
}

TEST(EncoderOrder, EveryInstructionSetGivesTheSpecifiedBits) {
  std::mt19937 random(1);
  for (const Isa isa : test::isas_to_test()) {
    for (const int head_dim : kHeadDims) {
      const SideRotation side = test::random_side(random, head_dim);
      std::vector<Row> rows = awkward_rows(random, static_cast<std::size_t>(head_dim));
      for (int i = 0; i < 30; ++i)
        rows.push_back(test::gaussian(random, static_cast<std::size_t>(head_dim), 0.3f, 1.2f));
      for (const Quantizer quantizer : kQuantizers) expect_equal(side, quantizer, head_dim, rows, isa);
    }
  }
}

TEST(EncoderOrder, ARowDoesNotDependOnItsNeighboursInTheCall) {
  std::mt19937 random(2);
  const SideRotation side = test::random_side(random, 64);
  std::vector<Row> rows;
  for (std::size_t num_rows = 1; num_rows <= 9; ++num_rows) {
    rows.push_back(test::gaussian(random, 64));
    for (const Isa isa : test::isas_to_test()) {
      for (const Quantizer quantizer : kQuantizers) expect_equal(side, quantizer, 64, rows, isa);
    }
  }
}

// NaN and infinity are refused before they get here; sums that overflow still give codes, the same ones everywhere.
TEST(EncoderOrder, RowsThatOverflowStillGiveTheSameCodes) {
  std::mt19937 random(3);
  for (const int head_dim : {16, 64, 128}) {
    const SideRotation side = test::random_side(random, head_dim);
    const std::vector<Row> rows = {test::gaussian(random, static_cast<std::size_t>(head_dim), 0, 1e30f),
                                   test::gaussian(random, static_cast<std::size_t>(head_dim), 1e38f, 1e38f)};
    for (const Isa isa : test::isas_to_test()) {
      expect_equal(side, Quantizer::kLeastSquares, head_dim, rows, isa);
      expect_equal(side, Quantizer::kFeedback, head_dim, rows, isa);
    }
  }
}

TEST(TransformOrder, EveryInstructionSetGivesTheSpecifiedBits) {
  std::mt19937 random(4);
  for (const int head_dim : kHeadDims) {
    const auto size = static_cast<std::size_t>(head_dim);
    const SideRotation side = test::random_side(random, head_dim);
    for (const int num_rows : {1, 3, 4, 7, 16}) {
      const std::vector<float> x = test::gaussian(random, size * static_cast<std::size_t>(num_rows), 1, 3);
      for (const Isa isa : test::isas_to_test()) {
        std::vector<float> y(x.size()), back(x.size());
        transform_rows(side.transform.data(), head_dim, x.data(), num_rows, y.data(), isa);
        inverse_transform_rows(side.inverse_transposed.data(), head_dim, y.data(), num_rows, back.data(), isa);
        for (int row = 0; row < num_rows; ++row) {
          const auto part = [&](const std::vector<float>& all) {
            return Row(all.begin() + row * head_dim, all.begin() + (row + 1) * head_dim);
          };
          ASSERT_EQ(part(y), test::plain_transform(side.transform, part(x))) << head_dim << " " << isa_name(isa);
          ASSERT_EQ(part(back), test::plain_inverse_transform(side.inverse_transposed, part(y)))
              << head_dim << " " << isa_name(isa);
        }
      }
    }
  }
}

}  // namespace
}  // namespace oscar
