#include "covariance/gram.hpp"

namespace oscar::gram {
namespace {

// panels[c / 8][r][c % 8] = element(r, c)
template <typename Element>
void fill_panels(int num_terms, int width, std::vector<double>& panels, const Element& element) {
  panels.resize(static_cast<std::size_t>(num_terms) * static_cast<std::size_t>(width));
  double* out = panels.data();
  for (int c = 0; c < width; c += kTileWidth) {
    for (int r = 0; r < num_terms; ++r) {
      for (int lane = 0; lane < kTileWidth; ++lane) *out++ = element(r, c + lane);
    }
  }
}

}  // namespace

TileFunctions tile_functions(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kTileAvx512;
  if (isa == Isa::kAvx2) return kTileAvx2;
#endif
  static_cast<void>(isa);
  return kTileScalar;
}

void pack(const float* rows, std::ptrdiff_t stride, int num_rows, int width, std::vector<double>& panels) {
  fill_panels(num_rows, width, panels, [&](int r, int c) { return static_cast<double>(rows[r * stride + c]); });
}

void pack_scaled(const float* rows, std::ptrdiff_t stride, int num_rows, int width, const double* factors,
                 std::vector<double>& panels) {
  fill_panels(num_rows, width, panels, [&](int r, int c) { return factors[r] * rows[r * stride + c]; });
}

void pack_transposed(const float* rows, std::ptrdiff_t stride, int num_rows, int width, std::vector<double>& panels) {
  const int padded = (num_rows + kTileWidth - 1) / kTileWidth * kTileWidth;
  fill_panels(width, padded, panels, [&](int channel, int row) {
    return row < num_rows ? static_cast<double>(rows[row * stride + channel]) : 0.0;
  });
}

void pack_matrix(const double* matrix, int width, std::vector<double>& panels) {
  fill_panels(width, width, panels, [&](int r, int c) { return matrix[r * width + c]; });
}

void add_products(TileFunction tile, const std::vector<double>& a, const std::vector<double>& b, int num_terms,
                  bool upper_only, double* out, int width) {
  const std::size_t panel_size = static_cast<std::size_t>(num_terms) * kTileWidth;
  const std::size_t num_a = a.size() / panel_size;
  const std::size_t num_b = b.size() / panel_size;
  for (std::size_t i = 0; i < num_a; ++i) {
    for (std::size_t j = upper_only ? i : 0; j < num_b; ++j) {
      double* corner = out + (i * static_cast<std::size_t>(width) + j) * kTileWidth;
      tile(a.data() + i * panel_size, b.data() + j * panel_size, num_terms, corner, width);
    }
  }
}

void mirror_upper(double* matrix, int width) {
  for (int row = 1; row < width; ++row) {
    for (int column = 0; column < row; ++column) matrix[row * width + column] = matrix[column * width + row];
  }
}

}  // namespace oscar::gram
