#pragma once
// Hadamard matrices for the widths that heads have.

#include <Eigen/Core>
#include <optional>

namespace oscar {

// Whether `width` is a power of two, all that Sylvester's doubling reaches.
bool is_power_of_two(int width);

// Orthonormal [width, width], entries +-1 / sqrt(width), first row and first column positive. Sylvester for powers of
// two; otherwise Paley's matrix of order 12, 20, 28, 36, 44 or 60 (x) Sylvester. Empty when there is none of that kind:
// among the multiples of 16 up to 256, only 208.
std::optional<Eigen::MatrixXd> hadamard(int width);

}  // namespace oscar
