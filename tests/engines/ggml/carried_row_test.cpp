// Rows that carry their codes through 16-bit numbers. Needs no model.

#include "carried_row.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>

namespace oscar::ggml {
namespace {

EncodedRow any_row(ParameterFormat format, int num_heads, int head_dim) {
  EncodedRow row;
  row.position = *rc::gen::inRange(0, 1 << 24);
  row.codes = *rc::gen::container<std::vector<std::uint8_t>>(static_cast<std::size_t>(num_heads) * head_dim,
                                                             rc::gen::inRange<std::uint8_t>(0, 4));
  for (int h = 0; h < num_heads; ++h) {
    RowParameters& parameters = row.parameters.emplace_back();
    if (format == ParameterFormat::kLog8) {
      parameters.scale_code = *rc::gen::arbitrary<std::int8_t>();
      parameters.offset_code = *rc::gen::arbitrary<std::int8_t>();
    } else {
      parameters.scale = std::bit_cast<float>(*rc::gen::arbitrary<std::uint32_t>());
      parameters.zero = std::bit_cast<float>(*rc::gen::arbitrary<std::uint32_t>());
    }
  }
  return row;
}

RC_GTEST_PROP(CarriedRowTest, WhatIsCarriedComesBack, ()) {
  const int head_dim = *rc::gen::element(16, 64, 80, 128, 256), num_heads = *rc::gen::inRange(1, 5);
  const auto format = *rc::gen::element(ParameterFormat::kLog8, ParameterFormat::kFloatPair);
  const EncodedRow row = any_row(format, num_heads, head_dim);
  std::vector<ggml_fp16_t> numbers = *rc::gen::container<std::vector<ggml_fp16_t>>(
      static_cast<std::size_t>(num_heads) * head_dim, rc::gen::arbitrary<ggml_fp16_t>());
  carry(row, format, head_dim, numbers.data());
  const EncodedRow back = read_carried(numbers.data(), format, num_heads, head_dim);
  RC_ASSERT(back.codes == row.codes);
  RC_ASSERT(back.position == row.position);
  for (int h = 0; h < num_heads; ++h) {
    RC_ASSERT(back.parameters[h].scale_code == row.parameters[h].scale_code);
    RC_ASSERT(back.parameters[h].offset_code == row.parameters[h].offset_code);
    RC_ASSERT(std::bit_cast<std::uint32_t>(back.parameters[h].scale) ==
              std::bit_cast<std::uint32_t>(row.parameters[h].scale));
    RC_ASSERT(std::bit_cast<std::uint32_t>(back.parameters[h].zero) ==
              std::bit_cast<std::uint32_t>(row.parameters[h].zero));
  }
  std::vector<ggml_fp16_t> again = numbers;
  carry(back, format, head_dim, again.data());
  RC_ASSERT(again == numbers);
}

RC_GTEST_PROP(CarriedRowTest, NumbersStayClose, ()) {
  constexpr float kRelative = 0.008F;  // 3 of 10 mantissa bits: at most 7 / 1024
  const int head_dim = *rc::gen::element(64, 128);
  const EncodedRow row = any_row(ParameterFormat::kLog8, 1, head_dim);
  std::vector<ggml_fp16_t> numbers;
  for (int d = 0; d < head_dim; ++d) {
    numbers.push_back(ggml_fp32_to_fp16(static_cast<float>(*rc::gen::inRange(-60000, 60000)) * 0.001F));
  }
  const std::vector<ggml_fp16_t> before = numbers;
  carry(row, ParameterFormat::kLog8, head_dim, numbers.data());
  for (int d = 0; d < head_dim; ++d) {
    const float x = ggml_fp16_to_fp32(before[d]);
    RC_ASSERT(std::abs(ggml_fp16_to_fp32(numbers[d]) - x) <= kRelative * std::abs(x) + 1e-6F);
  }
}

}  // namespace
}  // namespace oscar::ggml
