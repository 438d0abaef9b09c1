#include <immintrin.h>

#include "covariance/gram_tile.hpp"

namespace oscar::gram {
namespace {

template <bool kFused>
__m256d add_product(__m256d sum, __m256d a, __m256d b) {
  if constexpr (kFused) return _mm256_fmadd_pd(a, b, sum);
  return _mm256_add_pd(sum, _mm256_mul_pd(a, b));
}

// Four rows at a time: 8 sums of 4 lanes keep two multiply-add units of latency 4 busy.
template <bool kFused>
void add_tile(const double* a, const double* b, int num_terms, double* out, std::ptrdiff_t out_stride) {
  constexpr int kRows = 4;
  for (int row = 0; row < kTileWidth; row += kRows) {
    double* rows = out + row * out_stride;
    __m256d low[kRows];
    __m256d high[kRows];
    for (int i = 0; i < kRows; ++i) {
      low[i] = _mm256_loadu_pd(rows + i * out_stride);
      high[i] = _mm256_loadu_pd(rows + i * out_stride + 4);
    }
    for (int t = 0; t < num_terms; ++t) {
      const __m256d b_low = _mm256_loadu_pd(b + t * kTileWidth);
      const __m256d b_high = _mm256_loadu_pd(b + t * kTileWidth + 4);
      for (int i = 0; i < kRows; ++i) {
        const __m256d factor = _mm256_broadcast_sd(a + t * kTileWidth + row + i);
        low[i] = add_product<kFused>(low[i], factor, b_low);
        high[i] = add_product<kFused>(high[i], factor, b_high);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      _mm256_storeu_pd(rows + i * out_stride, low[i]);
      _mm256_storeu_pd(rows + i * out_stride + 4, high[i]);
    }
  }
}

}  // namespace

const TileFunctions kTileAvx2{add_tile<true>, add_tile<false>};

}  // namespace oscar::gram
