// AVX-512 F, BW, VL, DQ and VNNI. vpdpbusd multiplies unsigned by signed bytes and adds four neighbours to 32 bits, the
// four bytes of one packed word: 64 bytes of a page are the words t = 0..3 of four tokens (or channels), one of them a
// 128-bit lane. A page costs, per query row and 64 channels, 64 vpdpbusd for the keys and 64 a digit for the values.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12's own header: PR 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "kernels/cpu/attention_kernels.hpp"

namespace oscar::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kUnits = 4;  // 16-byte units (one word of four tokens) in a vector
using Vec = __m512;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(float v) { return _mm512_set1_ps(v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec subtract(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec multiply(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec multiply_subtract(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec absolute(Vec v) { return _mm512_andnot_ps(broadcast(-0.0f), v); }
inline Vec copy_sign(Vec magnitude, Vec sign) { return _mm512_or_ps(magnitude, _mm512_and_ps(broadcast(-0.0f), sign)); }
inline Vec round_to_integer(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT); }
inline int round_to_int(float v) { return _mm_cvtss_si32(_mm_set_ss(v)); }
inline Vec scale_by_power_of_two(Vec v, Vec whole) { return _mm512_scalef_ps(v, whole); }
inline Vec zero_where_less(Vec a, Vec b, Vec v) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), v);
}
inline __mmask16 lane_mask(std::uint64_t bits) { return static_cast<__mmask16>(bits & 0xFFFF); }
inline Vec keep_lanes(std::uint64_t bits, Vec kept, Vec other) {
  return _mm512_mask_mov_ps(other, lane_mask(bits), kept);
}
inline float first_lane(Vec v) { return _mm512_cvtss_f32(v); }
inline float max_lane(Vec v) { return _mm512_reduce_max_ps(v); }
inline float sum_lanes(Vec v) { return _mm512_reduce_add_ps(v); }

#include "kernels/cpu/attention_simd.inl"

// ---- codes ----

inline __m512i load_bytes(const void* p) { return _mm512_loadu_si512(p); }

inline void unpack(__m512i words, __m512i (&codes)[4]) {
  for (int j = 0; j < 4; ++j) codes[j] = _mm512_and_si512(_mm512_srli_epi32(words, 2 * j), _mm512_set1_epi8(3));
}

// Adds the four lanes of each vector: lane i of the result is the sum of vector i.
inline __m512i add_quarters(const __m512i (&sums)[4]) {
  __m512i pairs[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i a = sums[2 * i], b = sums[2 * i + 1];
    pairs[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
  }
  return _mm512_add_epi32(_mm512_shuffle_i32x4(pairs[0], pairs[1], 0x88),
                          _mm512_shuffle_i32x4(pairs[0], pairs[1], 0xDD));
}

void decode_parameters(const ParameterSource& source, std::uint64_t tokens, float* step, float* middle) {
  for (int t = 0; t < kPage; t += kLanes) {
    Vec steps, middles;
    if (source.log8) {
      const auto bytes = [&](int at) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source.stored + at)));
      };
      // Step = 2^(code >> 4) times one of sixteen.
      const __m512i scale_code = bytes(t);
      const Vec fraction = _mm512_permutexvar_ps(scale_code, load(source.log_steps + 128));
      const __m512i exponent = _mm512_slli_epi32(_mm512_srai_epi32(scale_code, 4), 23);
      steps = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(fraction), exponent));
      middles = add(broadcast(source.offset_center),
                    multiply(_mm512_cvtepi32_ps(bytes(kPage + t)), broadcast(source.offset_unit)));
    } else {
      const auto* stored = reinterpret_cast<const float*>(source.stored);
      steps = load(stored + t);
      middles = multiply(subtract(broadcast(1.5f), load(stored + kPage + t)), steps);
    }
    store(step + t, _mm512_maskz_mov_ps(lane_mask(tokens >> t), steps));
    store(middle + t, _mm512_maskz_mov_ps(lane_mask(tokens >> t), middles));
  }
}

// ---- keys ----

// Sixteen tokens are unpacked into sixteen registers and met by every row's operand.
void key_logits(const std::uint8_t* packed, int head_dim, const KeyRow* rows, int num_rows, const float* step,
                const float* middle, float* logits) {
  for (int token = 0; token < kPage; token += 16) {
    __m512i sums[kMaxPackedRows][4];
    for (int block = 0; 64 * block < head_dim; ++block) {
      const int width = head_dim - 64 * block < 64 ? head_dim - 64 * block : 64;  // bytes of four tokens
      const auto present = static_cast<__mmask16>((1u << (width / 4)) - 1);
      __m512i codes[4][4];
      for (int g = 0; g < 4; ++g) {
        unpack(_mm512_maskz_loadu_epi32(present, packed + 1024 * block + (token / 4 + g) * width), codes[g]);
      }
      for (int r = 0; r < num_rows; ++r) {
        const std::int8_t* operand = rows[r].operand + 256 * block;
        for (int g = 0; g < 4; ++g) {
          __m512i sum = block == 0 ? _mm512_setzero_si512() : sums[r][g];
          for (int j = 0; j < 4; ++j) sum = _mm512_dpbusd_epi32(sum, codes[g][j], load_bytes(operand + 64 * j));
          sums[r][g] = sum;
        }
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      const KeyRow& row = rows[r];
      const __m512i dots = add_quarters(sums[r]);
      const __m512i three_sums = _mm512_set1_epi32(row.terms.three_sums);
      const Vec deviation = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(dots, dots), three_sums));
      const Vec offset = row.offsets != nullptr ? load(row.offsets + token) : broadcast(row.offset);
      const Vec common = multiply_add(broadcast(row.terms.middle_factor), load(middle + token), offset);
      const Vec factor = multiply(broadcast(row.terms.code_factor), load(step + token));
      store(logits + r * kPage + token, multiply_add(factor, deviation, common));
    }
  }
}

// ---- values ----

// One digit of one row's fixed-point weights, arranged as the unpacked codes are: accumulator = rescale accumulator +
// unit dot.
struct Digit {
  __m512i weights[4];  // plane j
  float unit, rescale;
  float* accumulator;
};

// The low byte of each of 64 numbers, [token / 16], as the words and planes of packed values.
inline void arrange_digits(const __m512i (&fixed)[4], __m512i (&weights)[4]) {
  // Of every eight tokens an even plane takes 0, 1, 4, 5 and an odd one 2, 3, 6, 7.
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  const __m512i even = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
  for (int half = 0; half < 2; ++half) {
    const __m128i front = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(fixed[2 * half]), order);
    const __m128i back = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(fixed[2 * half + 1]), order);
    const __m512i words =
        _mm512_zextsi256_si512(_mm256_set_m128i(back, front));  // planes even and odd of t = 0, 1, 2, 3
    weights[2 * half] = _mm512_permutexvar_epi32(even, words);
    weights[2 * half + 1] = _mm512_permutexvar_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(1)), words);
  }
}

// Writes one digit or two and returns how many.
inline int quantize_weights(const ValueRow& row, const float* step, const float* middle, Digit* digits) {
  Vec products[4];
  Vec largest_lanes = broadcast(0.0f), total_lanes = largest_lanes, middle_lanes = largest_lanes;
  for (int i = 0; i < 4; ++i) {
    const Vec weight = load(row.weights + 16 * i);
    products[i] = multiply(weight, load(step + 16 * i));
    largest_lanes = maximum(largest_lanes, products[i]);
    total_lanes = add(total_lanes, products[i]);
    middle_lanes = multiply_add(weight, load(middle + 16 * i), middle_lanes);
  }
  const float largest = max_lane(largest_lanes);
  const float weight_before = row.sums->weight * row.rescale;
  const bool single = largest <= kSingleDigitShare * (weight_before + sum_lanes(total_lanes));
  const float steps = single ? 255.0f : 65535.0f;
  const float unit = largest / steps;
  const Vec inverse = broadcast(largest > 0 ? steps / largest : 0.0f);
  __m512i fixed[4], fixed_lanes = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) {
    fixed[i] = _mm512_cvtps_epi32(_mm512_min_ps(multiply(products[i], inverse), broadcast(steps)));
    fixed_lanes = _mm512_add_epi32(fixed_lanes, fixed[i]);
  }
  const float fixed_total = unit * sum_lanes(_mm512_cvtepi32_ps(fixed_lanes));
  row.sums->middle = row.sums->middle * row.rescale + (sum_lanes(middle_lanes) - 1.5f * fixed_total);
  row.sums->weight = weight_before + fixed_total;

  arrange_digits(fixed, digits[0].weights);
  digits[0].unit = unit;
  digits[0].rescale = row.rescale;
  digits[0].accumulator = row.accumulator;
  if (single) return 1;
  for (__m512i& value : fixed) value = _mm512_srli_epi32(value, 8);
  arrange_digits(fixed, digits[1].weights);
  digits[1].unit = 256 * unit;
  digits[1].rescale = 1;
  digits[1].accumulator = row.accumulator;
  return 2;
}

// Sixteen channels are unpacked into sixteen registers and met by every digit of every row.
void add_values(const std::uint8_t* packed, int head_dim, const ValueRow* rows, int num_rows, const float* step,
                const float* middle) {
  Digit digits[2 * kMaxPackedRows];
  int num_digits = 0;
  for (int r = 0; r < num_rows; ++r) num_digits += quantize_weights(rows[r], step, middle, digits + num_digits);
  for (int channel = 0; channel < head_dim; channel += 16) {
    __m512i codes[4][4];
    for (int g = 0; g < 4; ++g) unpack(load_bytes(packed + 16 * channel + 64 * g), codes[g]);
    for (int i = 0; i < num_digits; ++i) {
      const Digit& digit = digits[i];
      __m512i sums[4];
      for (int g = 0; g < 4; ++g) {
        sums[g] = _mm512_setzero_si512();
        for (int j = 0; j < 4; ++j) sums[g] = _mm512_dpbusd_epi32(sums[g], digit.weights[j], codes[g][j]);
      }
      const Vec gained = multiply(broadcast(digit.unit), _mm512_cvtepi32_ps(add_quarters(sums)));
      float* sixteen = digit.accumulator + channel;
      store(sixteen, multiply_add(load(sixteen), broadcast(digit.rescale), gained));
    }
  }
}

}  // namespace

const AttentionKernels& avx512_attention_kernels() {
  static constexpr AttentionKernels kKernels = {
      .arrange_query = arrange_query,
      .decode_parameters = decode_parameters,
      .key_logits = key_logits,
      .softmax_page = softmax_page,
      .add_values = add_values,
      .load_keys = load_keys,
      .load_values = load_values,
      .exact_logits = exact_logits,
      .exact_values = exact_values,
      .dot = dot,
  };
  return kKernels;
}

}  // namespace oscar::cpu
