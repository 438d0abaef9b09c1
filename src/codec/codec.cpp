#include <oscar/codec.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include "codec/codec_kernels.hpp"

namespace oscar {
namespace {

static_assert(cpu::kStep == kStep2);

constexpr int kTileRows = 16;  // rows whose parameters wait on the stack

// The |y| at the clip's rank: a real element, no interpolation. The product is a float one, so that .9 of 160 is 144.
float clip_threshold(float clip_ratio, int head_dim, const float* y) {
  if (!(clip_ratio > 0)) return std::numeric_limits<float>::infinity();
  const int rank = std::min(static_cast<int>(clip_ratio * static_cast<float>(head_dim)), head_dim - 1);
  float magnitude[cpu::kMaxHeadDim];
  std::transform(y, y + head_dim, magnitude, [](float value) { return std::abs(value); });
  std::nth_element(magnitude, magnitude + rank, magnitude + head_dim);
  return magnitude[rank];
}

RowParameters from_log8(cpu::Log8Parameters stored) {
  return {.scale_code = stored.scale_code, .offset_code = stored.offset_code};
}

}  // namespace

const cpu::CodecKernels& codec_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return cpu::kCodecAvx512;
  if (isa == Isa::kAvx2) return cpu::kCodecAvx2;
#endif
  (void)isa;
  return cpu::kCodecScalar;
}

AffineRow affine(const SideRotation& side, ParameterFormat format, const RowParameters& parameters) {
  if (format == ParameterFormat::kFloatPair) return {-parameters.zero * parameters.scale, parameters.scale};
  const float step = kStep2 * cpu::kScaleTable.values[parameters.scale_code + 128];
  const float mean = side.offset_center + static_cast<float>(parameters.offset_code) * (side.offset_spread / 20.0f);
  return {mean - 1.5f * step, step};
}

void encode_rows(const SideRotation& side, Quantizer quantizer, int head_dim, const float* y, int num_rows,
                 std::uint8_t* codes, RowParameters* parameters, Isa isa) {
  const cpu::CodecKernels& kernels = codec_kernels(isa);
  const auto each_row = [&](auto encode) {
    for (int row = 0; row < num_rows; ++row) parameters[row] = encode(y + row * head_dim, codes + row * head_dim);
  };
  switch (quantizer) {
    case Quantizer::kMinMax:
      return each_row([&](const float* row, std::uint8_t* row_codes) {
        const float clip = clip_threshold(side.clip_ratio, head_dim, row);
        const cpu::FloatPairParameters stored = kernels.encode_min_max(head_dim, clip, row, row_codes);
        return RowParameters{.scale = stored.scale, .zero = stored.zero};
      });
    case Quantizer::kLeastSquares:
      return each_row([&](const float* row, std::uint8_t* row_codes) {
        return from_log8(
            kernels.encode_least_squares(head_dim, side.offset_center, side.offset_spread, row, row_codes));
      });
    case Quantizer::kFeedback: {
      cpu::FeedbackTable table{};
      table.head_dim = head_dim;
      table.feedback = side.feedback.data();
      table.metric = side.metric.data();
      table.center = side.offset_center;
      table.spread = side.offset_spread;
      kernels.prepare_feedback(&table);
      cpu::Log8Parameters stored[kTileRows];
      for (int first = 0; first < num_rows; first += kTileRows) {
        const int num = std::min(kTileRows, num_rows - first);
        kernels.encode_feedback(&table, y + first * head_dim, num, codes + first * head_dim, stored);
        for (int i = 0; i < num; ++i) parameters[first + i] = from_log8(stored[i]);
      }
      return;
    }
  }
}

void decode_rows(const SideRotation& side, ParameterFormat format, int head_dim, const std::uint8_t* codes,
                 const RowParameters* parameters, int num_rows, float* y_hat) {
  for (int row = 0; row < num_rows; ++row) {
    const auto [base, step] = affine(side, format, parameters[row]);
    for (int j = 0; j < head_dim; ++j) {
      y_hat[row * head_dim + j] = base + step * static_cast<float>(codes[row * head_dim + j]);
    }
  }
}

void transform_rows(const float* matrix, int head_dim, const float* x, int num_rows, float* y, Isa isa) {
  codec_kernels(isa).transform(matrix, head_dim, x, num_rows, y);
}

void inverse_transform_rows(const float* inverse_transposed, int head_dim, const float* y, int num_rows, float* x,
                            Isa isa) {
  codec_kernels(isa).inverse_transform(inverse_transposed, head_dim, y, num_rows, x);
}

}  // namespace oscar
