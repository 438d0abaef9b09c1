#pragma once
// How far a transform is from what is assumed of it. Matrices are row-major [width, width], compared in double.

#include <span>

namespace oscar {

// Largest |A A^-1 - I| that a transform may have, of a rotation also |R R^T - I|. A row that is rebuilt 1e-3 off has
// lost 1e-6 of its energy; two bits lose more than 0.1. At head_dim 128 float32 leaves 3e-8, float16
// 2e-4, bfloat16 1.3e-3.
inline constexpr double kMaxResidual = 1e-3;

// Largest absolute element of A B^T - I: with B = A the distance from orthogonality, with B = A^-T the residual of the
// inverse. NaN when an element is.
double residual(std::span<const float> a, std::span<const float> b, int width);

// Largest over smallest singular value, 1 for a rotation.
double condition_number(std::span<const float> transform, int width);

}  // namespace oscar
