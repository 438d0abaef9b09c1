#pragma once
// Stage "codec": one transformed row <-> 2-bit codes and two parameters. The arithmetic order is part of the
// format: every instruction set and device gives the same codes, bit for bit, from the same row y.

#include <cstdint>
#include <oscar/isa.hpp>
#include <oscar/rotation.hpp>

namespace oscar {

inline constexpr float kStep2 = 0.9957f;  // distance of neighbouring levels for a unit Gaussian, 2 bits

// Parameters of one encoded row, in stored form. kLog8 uses the two codes, kFloatPair the two floats.
struct RowParameters {
  std::int8_t scale_code = 0;
  std::int8_t offset_code = 0;
  float scale = 0;
  float zero = 0;
};

// Both formats decode to y^ = base + step * code.
struct AffineRow {
  float base = 0;
  float step = 0;
};
AffineRow affine(const SideRotation& side, ParameterFormat format, const RowParameters& parameters);

// y [num_rows, head_dim] -> codes [num_rows, head_dim], one code (0..3) a byte, and parameters [num_rows].
// NaN and infinity in y are the caller's error (checked where rows enter the cache).
void encode_rows(const SideRotation& side, Quantizer quantizer, int head_dim, const float* y, int num_rows,
                 std::uint8_t* codes, RowParameters* parameters, Isa isa);

// y^ [num_rows, head_dim], in the transformed space.
void decode_rows(const SideRotation& side, ParameterFormat format, int head_dim, const std::uint8_t* codes,
                 const RowParameters* parameters, int num_rows, float* y_hat);

// x [num_rows, head_dim] -> x A, plain sums in ascending channel order; and y -> y A^{-1} = y (A^{-T})^T, in eight
// interleaved partial sums. Both the same on every instruction set.
void transform_rows(const float* matrix, int head_dim, const float* x, int num_rows, float* y, Isa isa);
void inverse_transform_rows(const float* inverse_transposed, int head_dim, const float* y, int num_rows, float* x,
                            Isa isa);

}  // namespace oscar
