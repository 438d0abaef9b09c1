#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <oscar/codec.hpp>

#include "codec/codec_kernels.hpp"
#include "reference/codec.hpp"
#include "support/isas.hpp"
#include "support/rows.hpp"

namespace oscar {
namespace {

// A float32 sum of D terms, each rounded twice: D + 2 roundings of half a unit, relative to the sum of magnitudes.
constexpr double kUnitRoundoff = 0x1p-24;

TEST(ScaleTable, EntriesAndLimitsAreTheNearestFloats) {
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(cpu::kScaleTable.values[i], static_cast<float>(std::exp2(static_cast<long double>(i - 128) / 16))) << i;
    EXPECT_EQ(cpu::kScaleTable.limits[i], static_cast<float>(std::exp2((i - 127.5L) / 16))) << i;
  }
}

TEST(ScaleTable, AScaleTakesTheNearestEntryAndALimitTheLowerOne) {
  SideRotation side;
  // A row of two values, mean 0, has deviation a; least squares fits level .5 x .9957 s = a.
  const auto scale_code = [&](float a) {
    std::vector<float> y(16);
    for (int j = 0; j < 16; ++j) y[j] = j % 2 == 0 ? a : -a;
    std::uint8_t codes[16];
    RowParameters parameters;
    encode_rows(side, Quantizer::kLeastSquares, 16, y.data(), 1, codes, &parameters, Isa::kScalar);
    return int{parameters.scale_code};
  };
  EXPECT_EQ(scale_code(0), -128);
  EXPECT_EQ(scale_code(1e-12f), -128);
  EXPECT_EQ(scale_code(1e9f), 127);
  for (int code = -100; code <= 100; code += 25) {
    // values of 1 become level 1.5: s = a / (1.5 .9957) after the refit
    const double a = std::exp2(code / 16.0) * 1.5 * .9957;
    EXPECT_EQ(scale_code(static_cast<float>(a)), code);
    EXPECT_EQ(scale_code(static_cast<float>(a * std::exp2(.45 / 16))), code);
    EXPECT_EQ(scale_code(static_cast<float>(a * std::exp2(.55 / 16))), code + 1);
  }
}

TEST(Affine, BothFormatsDecodeAsTheyAreDefined) {
  SideRotation side;
  side.offset_center = -0.7f;
  side.offset_spread = 0.3f;
  for (int code = 0; code < 4; ++code) {
    const AffineRow log8 = affine(side, ParameterFormat::kLog8, {.scale_code = -9, .offset_code = 33});
    const double mean = -0.7 + 33 * 0.3 / 20;
    EXPECT_NEAR(log8.base + log8.step * static_cast<float>(code), mean + std::exp2(-9 / 16.0) * .9957 * (code - 1.5),
                1e-6);
    const AffineRow pair = affine(side, ParameterFormat::kFloatPair, {.scale = 2.5f, .zero = 1.25f});
    EXPECT_NEAR(pair.base + pair.step * static_cast<float>(code), (code - 1.25) * 2.5, 1e-6);
  }
}

TEST(OffsetCode, RoundsHalfToEvenAndClamps) {
  SideRotation side;
  side.offset_spread = 20;  // the offset code is the mean
  const auto offset_code = [&](float mean) {
    const std::vector<float> y(16, mean);  // a constant row: its mean is exact
    std::uint8_t codes[16];
    RowParameters parameters;
    encode_rows(side, Quantizer::kLeastSquares, 16, y.data(), 1, codes, &parameters, Isa::kScalar);
    return int{parameters.offset_code};
  };
  EXPECT_EQ(offset_code(2.5f), 2);
  EXPECT_EQ(offset_code(3.5f), 4);
  EXPECT_EQ(offset_code(-0.5f), 0);
  EXPECT_EQ(offset_code(-1.5f), -2);
  EXPECT_EQ(offset_code(127.6f), 127);
  EXPECT_EQ(offset_code(1e9f), 127);
  EXPECT_EQ(offset_code(-1e9f), -128);
}

TEST(MinMax, AConstantRowHasAScaleAboveZeroAndDecodesToItself) {
  SideRotation side;
  const std::vector<float> y(64, 0.37f);
  std::uint8_t codes[64];
  RowParameters parameters;
  float y_hat[64];
  for (const Isa isa : test::isas_to_test()) {
    encode_rows(side, Quantizer::kMinMax, 64, y.data(), 1, codes, &parameters, isa);
    decode_rows(side, ParameterFormat::kFloatPair, 64, codes, &parameters, 1, y_hat);
    EXPECT_GT(parameters.scale, 0);
    for (const float value : y_hat) EXPECT_NEAR(value, 0.37f, 1e-6f);
  }
}

TEST(Transform, StaysWithinTheBoundOfASumInFloat) {
  std::mt19937 random(5);
  for (const int head_dim : {16, 48, 64, 128, 256}) {
    const auto size = static_cast<std::size_t>(head_dim);
    const SideRotation side = test::random_side(random, head_dim);
    const std::vector<float> x = test::gaussian(random, size);
    const std::vector<double> exact_x(x.begin(), x.end());
    const std::vector<double> exact_y = reference::transform(side.transform, exact_x);
    const std::vector<double> exact_back = reference::inverse_transform(side.inverse_transposed, exact_x);
    for (const Isa isa : test::isas_to_test()) {
      std::vector<float> y(size), back(size);
      transform_rows(side.transform.data(), head_dim, x.data(), 1, y.data(), isa);
      inverse_transform_rows(side.inverse_transposed.data(), head_dim, x.data(), 1, back.data(), isa);
      for (std::size_t j = 0; j < size; ++j) {
        double magnitude = 0, back_magnitude = 0;
        for (std::size_t i = 0; i < size; ++i) {
          magnitude += std::abs(double{x[i]} * side.transform[i * size + j]);
          back_magnitude += std::abs(double{x[i]} * side.inverse_transposed[j * size + i]);
        }
        EXPECT_NEAR(y[j], exact_y[j], (head_dim + 2) * kUnitRoundoff * magnitude) << head_dim << " " << isa_name(isa);
        EXPECT_NEAR(back[j], exact_back[j], (head_dim + 2) * kUnitRoundoff * back_magnitude)
            << head_dim << " " << isa_name(isa);
      }
    }
  }
}

}  // namespace
}  // namespace oscar
