#pragma once
// The inner loop of every second moment: an 8 x 8 tile of sums of products, one body an instruction set.

#include <cstddef>
#include <oscar/isa.hpp>

namespace oscar::gram {

inline constexpr int kTileWidth = 8;

// out[i * out_stride + j] += sum over t of a[8 t + i] b[8 t + j], i, j in 0..7. The sum of one element runs over t in
// ascending order from its old value, so all instruction sets give the same bits.
using TileFunction = void (*)(const double* a, const double* b, int num_terms, double* out, std::ptrdiff_t out_stride);

struct TileFunctions {
  TileFunction exact;    // for products that double holds exactly (of two float32): may fuse multiply and add
  TileFunction rounded;  // for any other: rounds each product
};
TileFunctions tile_functions(Isa isa);

extern const TileFunctions kTileScalar;
extern const TileFunctions kTileAvx2;
extern const TileFunctions kTileAvx512;

}  // namespace oscar::gram
