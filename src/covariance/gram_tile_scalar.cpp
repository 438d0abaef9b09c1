#include "covariance/gram_tile.hpp"

namespace oscar::gram {
namespace {

// Two rows at a time: 16 sums fill the registers that every x86-64 has.
void add_tile(const double* a, const double* b, int num_terms, double* out, std::ptrdiff_t out_stride) {
  for (int row = 0; row < kTileWidth; row += 2) {
    double sums[2][kTileWidth];
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < kTileWidth; ++j) sums[i][j] = out[(row + i) * out_stride + j];
    }
    for (int t = 0; t < num_terms; ++t) {
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < kTileWidth; ++j) sums[i][j] += a[t * kTileWidth + row + i] * b[t * kTileWidth + j];
      }
    }
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < kTileWidth; ++j) out[(row + i) * out_stride + j] = sums[i][j];
    }
  }
}

}  // namespace

const TileFunctions kTileScalar{add_tile, add_tile};

}  // namespace oscar::gram
