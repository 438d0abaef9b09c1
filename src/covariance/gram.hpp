#pragma once
// Products of tall matrices in double, from float32 rows: what accumulate() spends its time on.
// Operands are panels of 8 columns, [num_panels][num_terms][8], so that a tile reads them front to back.

#include <cstddef>
#include <vector>

#include "covariance/gram_tile.hpp"

namespace oscar::gram {

// Rows taken at a time: a panel of 64 terms is 4 KiB, and both operands of a 256-wide head fit a second-level cache.
inline constexpr int kChunkRows = 64;

// Rows [num_rows, width] (row r at rows + r * stride) as panels with a term a row. `width` is a multiple of 8.
void pack(const float* rows, std::ptrdiff_t stride, int num_rows, int width, std::vector<double>& panels);
// The same with row r multiplied by factors[r].
void pack_scaled(const float* rows, std::ptrdiff_t stride, int num_rows, int width, const double* factors,
                 std::vector<double>& panels);
// Panels with a term a channel and a column a row; the last panel is filled up with zeros.
void pack_transposed(const float* rows, std::ptrdiff_t stride, int num_rows, int width, std::vector<double>& panels);
// A square double matrix [width, width] as panels with a term a row.
void pack_matrix(const double* matrix, int width, std::vector<double>& panels);

// out [8 a_panels, width] += a^T b. With `upper_only`, tiles below the diagonal are left as they are.
void add_products(TileFunction tile, const std::vector<double>& a, const std::vector<double>& b, int num_terms,
                  bool upper_only, double* out, int width);

// Copies the upper triangle of [width, width] onto the lower one.
void mirror_upper(double* matrix, int width);

}  // namespace oscar::gram
