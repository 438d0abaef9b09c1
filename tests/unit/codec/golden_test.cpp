#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <oscar/codec.hpp>

#include "reference/codec.hpp"
#include "support/golden.hpp"
#include "support/isas.hpp"

namespace oscar {
namespace {

using test::GoldenFile;

constexpr double kEqualShare = 0.999;   // codes of a float32 encoder against a float64 one
constexpr double kMetricMargin = 0.01;  // or else: excess of the error in M

// The published byte order: byte i holds elements i, i + d/4, i + d/2 and i + 3d/4.
std::vector<std::uint8_t> quartered(const std::uint8_t* codes, std::size_t num) {
  std::vector<std::uint8_t> bytes(num / 4);
  for (std::size_t i = 0; i < num; ++i)
    bytes[i % bytes.size()] |= static_cast<std::uint8_t>(codes[i] << 2 * (i / bytes.size()));
  return bytes;
}

struct Encoded {
  std::vector<std::uint8_t> codes;
  std::vector<RowParameters> parameters;
};
Encoded encode(const SideRotation& side, Quantizer quantizer, std::size_t head_dim, const std::vector<float>& y,
               Isa isa) {
  Encoded out{std::vector<std::uint8_t>(y.size()), std::vector<RowParameters>(y.size() / head_dim)};
  encode_rows(side, quantizer, static_cast<int>(head_dim), y.data(), static_cast<int>(out.parameters.size()),
              out.codes.data(), out.parameters.data(), isa);
  return out;
}

TEST(MinMaxGolden, ReproducesThePublishedRowOfSixteen) {
  std::vector<float> y(16);
  for (int i = 0; i < 16; ++i) y[i] = static_cast<float>(7 * i % 16) - 7.5f;
  y[3] = 20;
  SideRotation side;
  for (const Isa isa : test::isas_to_test()) {
    side.clip_ratio = 0.92f;
    const Encoded clipped = encode(side, Quantizer::kMinMax, 16, y, isa);
    EXPECT_EQ(clipped.codes, (std::vector<std::uint8_t>{0, 1, 3, 3, 2, 1, 2, 0, 2, 3, 1, 3, 1, 2, 0, 2}));
    EXPECT_EQ(quartered(clipped.codes.data(), 16), (std::vector<std::uint8_t>{0x68, 0xb5, 0x1b, 0xb3}));
    EXPECT_EQ(clipped.parameters[0].scale, 5.0f);
    EXPECT_EQ(clipped.parameters[0].zero, 1.5f);

    side.clip_ratio = 0;
    const Encoded whole = encode(side, Quantizer::kMinMax, 16, y, isa);
    EXPECT_EQ(quartered(whole.codes.data(), 16), (std::vector<std::uint8_t>{0x14, 0x61, 0x16, 0x53}));
    EXPECT_FLOAT_EQ(whole.parameters[0].scale, 9.1666667f);
    EXPECT_FLOAT_EQ(whole.parameters[0].zero, .8181818f);
  }
}

TEST(MinMaxGolden, ReproducesThePublishedRowOf128) {
  std::vector<float> y(128);
  for (int k = 0; k < 128; ++k) y[k] = static_cast<float>(std::sin(.37 * k) * (1 + .02 * k));
  SideRotation side;
  side.clip_ratio = 0.96f;
  for (const Isa isa : test::isas_to_test()) {
    const Encoded row = encode(side, Quantizer::kMinMax, 128, y, isa);
    std::array<int, 4> histogram{};
    for (const std::uint8_t code : row.codes) ++histogram[code];
    EXPECT_EQ(histogram, (std::array<int, 4>{15, 41, 54, 18}));
    const std::vector<std::uint8_t> bytes = quartered(row.codes.data(), 128);
    EXPECT_EQ(std::vector<std::uint8_t>(bytes.begin(), bytes.begin() + 4),
              (std::vector<std::uint8_t>{0x06, 0x16, 0x1a, 0x1a}));
    EXPECT_NEAR(row.parameters[0].scale, 2.07741f, 1e-5f);
    EXPECT_NEAR(row.parameters[0].zero, 1.5f, 1e-5f);
  }
}

class PublishedStoreGolden : public testing::TestWithParam<int> {};

TEST_P(PublishedStoreGolden, EqualsTheStoredCodesOfARealLayer) {
  const GoldenFile file("smollm2_layer" + std::to_string(GetParam()));
  for (const std::string side_name : {"k", "v"}) {
    SideRotation side;
    side.clip_ratio = side_name == "k" ? 0.96f : 0.92f;
    const auto x = file.read<float>(side_name);
    const auto rotation = file.read<float>("rot_" + side_name);
    const auto packed = file.read<std::uint8_t>(side_name + "_packed");
    const auto scales = file.read<float>(side_name + "_scale");
    const auto zeros = file.read<float>(side_name + "_zero");
    for (const Isa isa : test::isas_to_test()) {
      std::vector<float> y(x.size());
      transform_rows(rotation.data(), 64, x.data(), static_cast<int>(scales.size()), y.data(), isa);
      const Encoded rows = encode(side, Quantizer::kMinMax, 64, y, isa);
      std::size_t equal = 0;
      for (std::size_t row = 0; row < scales.size(); ++row) {
        for (std::size_t j = 0; j < 64; ++j) {
          const int stored = packed[row * 16 + j % 16] >> 2 * (j / 16) & 3;
          equal += rows.codes[row * 64 + j] == stored;
        }
        // The rotation that made the file summed in another order.
        EXPECT_NEAR(rows.parameters[row].scale, scales[row], 1e-5f * scales[row]) << side_name << " row " << row;
        EXPECT_NEAR(rows.parameters[row].zero, zeros[row], 1e-4f) << side_name << " row " << row;
      }
      EXPECT_GE(static_cast<double>(equal) / static_cast<double>(y.size()), kEqualShare)
          << side_name << " " << isa_name(isa);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(SmolLm2, PublishedStoreGolden, testing::Values(0, 15, 29));

struct FeedbackSide {
  std::string name;
  SideRotation rotation;
  std::vector<float> y;
  std::vector<std::uint8_t> codes;
  std::vector<int> scale_codes, offset_codes;
};
std::vector<FeedbackSide> feedback_sides(int layer) {
  const GoldenFile file("bp64_smollm2_layer" + std::to_string(layer));
  std::vector<FeedbackSide> sides;
  for (const std::string name : {"k", "v"}) {
    FeedbackSide side;
    side.name = name;
    side.rotation.feedback = file.read<float>(name + ".T");
    side.rotation.metric = file.read<float>(name + ".M");
    side.rotation.offset_center = file.read<float>(name + ".c0")[0];
    side.rotation.offset_spread = file.read<float>(name + ".sd")[0];
    side.y = file.read<float>(name + ".y");
    side.codes = file.read<std::uint8_t>(name + ".codes");
    side.scale_codes = file.read<int>(name + ".scale_code");
    side.offset_codes = file.read<int>(name + ".offset_code");
    sides.push_back(std::move(side));
  }
  return sides;
}

class FeedbackGolden : public testing::TestWithParam<int> {};

TEST_P(FeedbackGolden, DoubleReferenceEqualsEveryCodeAndParameter) {
  for (const FeedbackSide& side : feedback_sides(GetParam())) {
    for (std::size_t row = 0; row < side.scale_codes.size(); ++row) {
      const auto first = static_cast<std::ptrdiff_t>(row * 64);
      const std::vector<double> y(side.y.begin() + first, side.y.begin() + first + 64);
      const reference::EncodedRow encoded = reference::encode(side.rotation, Quantizer::kFeedback, y);
      const std::vector<std::uint8_t> expected(side.codes.begin() + first, side.codes.begin() + first + 64);
      ASSERT_EQ(encoded.codes, expected) << side.name << " row " << row;
      ASSERT_EQ(encoded.scale_code, side.scale_codes[row]) << side.name << " row " << row;
      ASSERT_EQ(encoded.offset_code, side.offset_codes[row]) << side.name << " row " << row;
    }
  }
}

TEST_P(FeedbackGolden, FloatEncoderIsAsGoodAsTheDoubleOne) {
  for (const FeedbackSide& side : feedback_sides(GetParam())) {
    for (const Isa isa : test::isas_to_test()) {
      const Encoded rows = encode(side.rotation, Quantizer::kFeedback, 64, side.y, isa);
      std::size_t equal = 0;
      double error = 0, golden_error = 0;
      for (std::size_t row = 0; row < rows.parameters.size(); ++row) {
        const auto first = static_cast<std::ptrdiff_t>(row * 64);
        const std::vector<double> y(side.y.begin() + first, side.y.begin() + first + 64);
        const auto decoded = [&](const std::vector<std::uint8_t>& codes, int scale_code, int offset_code) {
          const reference::EncodedRow stored{.codes = {codes.begin() + first, codes.begin() + first + 64},
                                             .scale_code = scale_code,
                                             .offset_code = offset_code};
          return reference::metric_error(side.rotation, y,
                                         reference::decode(side.rotation, ParameterFormat::kLog8, stored));
        };
        error += decoded(rows.codes, rows.parameters[row].scale_code, rows.parameters[row].offset_code);
        golden_error += decoded(side.codes, side.scale_codes[row], side.offset_codes[row]);
        for (std::size_t j = 0; j < 64; ++j) equal += rows.codes[row * 64 + j] == side.codes[row * 64 + j];
      }
      const double share = static_cast<double>(equal) / static_cast<double>(side.y.size());
      std::cout << side.name << " " << isa_name(isa) << ": equal codes " << share << ", error in M x"
                << error / golden_error << "\n";
      EXPECT_TRUE(share >= kEqualShare || error <= golden_error * (1 + kMetricMargin))
          << side.name << " " << isa_name(isa) << ": equal " << share << ", error x" << error / golden_error;
    }
  }
}
TEST_P(FeedbackGolden, RowsTurnIntoTheTransformedSpaceAndBack) {
  constexpr float kRelative = 2e-6f;  // float32 sums of 64 against float64, relative to the largest element
  const GoldenFile file("bp64_smollm2_layer" + std::to_string(GetParam()));
  const auto expect_close = [&](const std::vector<float>& got, const std::vector<float>& expected) {
    const float largest = std::abs(*std::max_element(expected.begin(), expected.end(),
                                                     [](float a, float b) { return std::abs(a) < std::abs(b); }));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(got[i], expected[i], kRelative * largest) << "row " << i / 64 << ", channel " << i % 64;
    }
  };
  for (const FeedbackSide& side : feedback_sides(GetParam())) {
    const auto rows = file.read<float>(side.name == "k" ? "k.r" : "v.x");
    const auto hat = file.read<float>(side.name == "k" ? "k.r_hat" : "v.x_hat");
    const auto matrix = file.read<float>(side.name + ".A"), inverse = file.read<float>(side.name + ".A_inv_t");
    const int num_rows = static_cast<int>(side.scale_codes.size());
    std::vector<RowParameters> parameters;
    for (int row = 0; row < num_rows; ++row) {
      parameters.push_back({.scale_code = static_cast<std::int8_t>(side.scale_codes[row]),
                            .offset_code = static_cast<std::int8_t>(side.offset_codes[row])});
    }
    for (const Isa isa : test::isas_to_test()) {
      std::vector<float> y(rows.size()), y_hat(rows.size()), x_hat(rows.size());
      transform_rows(matrix.data(), 64, rows.data(), num_rows, y.data(), isa);
      expect_close(y, side.y);
      decode_rows(side.rotation, ParameterFormat::kLog8, 64, side.codes.data(), parameters.data(), num_rows,
                  y_hat.data());
      inverse_transform_rows(inverse.data(), 64, y_hat.data(), num_rows, x_hat.data(), isa);
      expect_close(x_hat, hat);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(SmolLm2, FeedbackGolden, testing::Values(0, 15));

}  // namespace
}  // namespace oscar
