// Eight float32 lanes of AVX2 and F16C: the vocabulary of codec_body.inl. No fused multiply-add: products are rounded.

using F8 = __m256;
using Mask8 = __m256;

inline F8 load(const float* in) { return _mm256_loadu_ps(in); }
inline void store(float* out, F8 a) { _mm256_storeu_ps(out, a); }
inline F8 splat(float value) { return _mm256_set1_ps(value); }
inline F8 add(F8 a, F8 b) { return _mm256_add_ps(a, b); }
inline F8 sub(F8 a, F8 b) { return _mm256_sub_ps(a, b); }
inline F8 mul(F8 a, F8 b) { return _mm256_mul_ps(a, b); }
inline F8 div(F8 a, F8 b) { return _mm256_div_ps(a, b); }
inline F8 min(F8 a, F8 b) { return _mm256_min_ps(a, b); }
inline F8 max(F8 a, F8 b) { return _mm256_max_ps(a, b); }
inline Mask8 greater(F8 a, F8 b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Mask8 differs(F8 a, F8 b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_UQ); }
inline F8 select(Mask8 mask, F8 yes, F8 no) { return _mm256_blendv_ps(no, yes, mask); }
inline unsigned bits(Mask8 mask) { return static_cast<unsigned>(_mm256_movemask_ps(mask)); }

// ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7))
inline float reduce_add(F8 p) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_min(F8 p) {
  const __m128 four = _mm_min_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F8 p) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Nearest level of one value, without a branch: codes are as good as random.
inline float nearest_level(float u) {
  const __m128 value = _mm_set_ss(u);
  const __m128 lower =
      _mm_blendv_ps(_mm_set_ss(kLevels[0]), _mm_set_ss(kLevels[1]), _mm_cmpgt_ss(value, _mm_set_ss(-kStep)));
  const __m128 upper =
      _mm_blendv_ps(_mm_set_ss(kLevels[2]), _mm_set_ss(kLevels[3]), _mm_cmpgt_ss(value, _mm_set_ss(kStep)));
  return _mm_cvtss_f32(_mm_blendv_ps(lower, upper, _mm_cmpgt_ss(value, _mm_setzero_ps())));
}

// Eight lanes to eight bytes; lanes hold whole numbers 0..3 and a fraction that is cut off.
inline void store_codes(std::uint8_t* out, F8 a) {
  const __m256i words = _mm256_cvttps_epi32(a);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(halves, halves));
}

inline void store_f16(std::uint16_t* out, F8 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
