#include <immintrin.h>

#include "covariance/gram_tile.hpp"

namespace oscar::gram {
namespace {

template <bool kFused>
__m512d add_product(__m512d sum, __m512d a, __m512d b) {
  if constexpr (kFused) return _mm512_fmadd_pd(a, b, sum);
  return _mm512_add_pd(sum, _mm512_mul_pd(a, b));
}

// The whole tile at once: 8 sums of 8 lanes.
template <bool kFused>
void add_tile(const double* a, const double* b, int num_terms, double* out, std::ptrdiff_t out_stride) {
  __m512d sums[kTileWidth];
  for (int i = 0; i < kTileWidth; ++i) sums[i] = _mm512_loadu_pd(out + i * out_stride);
  for (int t = 0; t < num_terms; ++t) {
    const __m512d row = _mm512_loadu_pd(b + t * kTileWidth);
    for (int i = 0; i < kTileWidth; ++i) {
      sums[i] = add_product<kFused>(sums[i], _mm512_set1_pd(a[t * kTileWidth + i]), row);
    }
  }
  for (int i = 0; i < kTileWidth; ++i) _mm512_storeu_pd(out + i * out_stride, sums[i]);
}

}  // namespace

const TileFunctions kTileAvx512{add_tile<true>, add_tile<false>};

}  // namespace oscar::gram
