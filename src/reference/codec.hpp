#pragma once
// The codec in double, one row at a time: the judge of src/codec. Readable beside docs/format.md, "Encoder
// arithmetic"; sums are taken in the obvious order, since double leaves no ties that the order could decide.

#include <cstdint>
#include <oscar/rotation.hpp>
#include <vector>

namespace oscar::reference {

struct EncodedRow {
  std::vector<std::uint8_t> codes;  // [head_dim], 0..3
  int scale_code = 0;               // kLog8: scale 2^(scale_code / 16)
  int offset_code = 0;              // kLog8: offset c0 + offset_code sd / 20
  double scale = 0, zero = 0;       // kFloatPair: y^ = (code - zero) scale
};

// y [head_dim], in the transformed space.
EncodedRow encode(const SideRotation& side, Quantizer quantizer, const std::vector<double>& y);

// y^ [head_dim].
std::vector<double> decode(const SideRotation& side, ParameterFormat format, const EncodedRow& row);

// x A and y A^{-1} = y (A^{-T})^T; matrices [head_dim, head_dim], row-major.
std::vector<double> transform(const std::vector<float>& matrix, const std::vector<double>& x);
std::vector<double> inverse_transform(const std::vector<float>& inverse_transposed, const std::vector<double>& y);

// (y^ - y) M (y^ - y)^T with the side's metric, or the plain squared distance when it has none.
double metric_error(const SideRotation& side, const std::vector<double>& y, const std::vector<double>& y_hat);

}  // namespace oscar::reference
