// AVX2, FMA and F16C. Codes meet int8 queries, and weights as 8-bit digits, in vpmaddubsw: unsigned byte times signed
// byte, neighbours added to 16 bits. Sums stay below 2^15: keys 2 * 3 * 127 * (head_dim / 8) = 24384 at head_dim 256,
// values 2 * 3 * 255 * 8 = 12240. A page costs, per query row and 64 channels, 128 vpmaddubsw for the keys and 128 a
// digit for the values, which bounds it.

#include <immintrin.h>

#include "kernels/cpu/attention_kernels.hpp"

namespace oscar::cpu {
namespace {

constexpr int kLanes = 8;
constexpr int kUnits = 2;  // 16-byte units (one word of four tokens) in a vector
using Vec = __m256;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(float v) { return _mm256_set1_ps(v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec subtract(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec multiply(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec multiply_subtract(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec absolute(Vec v) { return _mm256_andnot_ps(broadcast(-0.0f), v); }
inline Vec copy_sign(Vec magnitude, Vec sign) { return _mm256_or_ps(magnitude, _mm256_and_ps(broadcast(-0.0f), sign)); }
inline Vec round_to_integer(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline int round_to_int(float v) { return _mm_cvtss_si32(_mm_set_ss(v)); }
// v 2^whole for v in [1/2, 2)
inline Vec scale_by_power_of_two(Vec v, Vec whole) {
  const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shift));
}
inline Vec zero_where_less(Vec a, Vec b, Vec v) { return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), v); }

// All bits of lane i where bit i of `bits` is set.
inline Vec lane_mask(std::uint64_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits & 0xFF));
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, each), each));
}
inline Vec keep_lanes(std::uint64_t bits, Vec kept, Vec other) {
  return _mm256_blendv_ps(other, kept, lane_mask(bits));
}

inline float first_lane(Vec v) { return _mm256_cvtss_f32(v); }
inline float max_lane(Vec v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline float sum_lanes(Vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

#include "kernels/cpu/attention_simd.inl"

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// ---- codes ----

inline __m256i plane(__m256i words, int j) {
  return _mm256_and_si256(_mm256_srli_epi32(words, 2 * j), _mm256_set1_epi8(3));
}

// Up to 32 bytes of packed words; zeros behind them.
inline __m256i load_words(const std::uint8_t* packed, int bytes) {
  if (bytes >= 32) return load_bytes(packed);
  if (bytes <= 0) return _mm256_setzero_si256();
  return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
}

// 64 bytes of packed words as eight vectors: [words 0..1 and 2..3, plane j].
inline void unpack(__m256i first, __m256i second, __m256i (&codes)[8]) {
  for (int j = 0; j < 4; ++j) {
    codes[j] = plane(first, j);
    codes[4 + j] = plane(second, j);
  }
}

// Sum of eight vectors of products. One factor is unsigned, the other signed; codes may be either.
inline __m256i dot_of_eight(const __m256i (&a)[8], const __m256i* b, bool codes_first) {
  __m256i products[8];
  for (int v = 0; v < 8; ++v) {
    const __m256i other = load_bytes(b + v);
    products[v] = codes_first ? _mm256_maddubs_epi16(a[v], other) : _mm256_maddubs_epi16(other, a[v]);
  }
  for (int step = 4; step > 0; step /= 2) {
    for (int v = 0; v < step; ++v) products[v] = _mm256_add_epi16(products[v], products[v + step]);
  }
  return products[0];
}

void decode_parameters(const ParameterSource& source, std::uint64_t tokens, float* step, float* middle) {
  for (int t = 0; t < kPage; t += kLanes) {
    Vec steps, middles;
    if (source.log8) {
      const auto bytes = [&](int at) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source.stored + at)));
      };
      const __m256i scale_code = bytes(t);  // step = 2^(code >> 4) times one of sixteen
      const __m256i low = _mm256_castps_si256(_mm256_permutevar8x32_ps(load(source.log_steps + 128), scale_code));
      const __m256i high = _mm256_castps_si256(_mm256_permutevar8x32_ps(load(source.log_steps + 136), scale_code));
      const __m256i is_high = _mm256_srai_epi32(_mm256_slli_epi32(scale_code, 28), 31);  // bit 3
      const __m256i exponent = _mm256_slli_epi32(_mm256_srai_epi32(scale_code, 4), 23);
      steps = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_blendv_epi8(low, high, is_high), exponent));
      middles = add(broadcast(source.offset_center),
                    multiply(_mm256_cvtepi32_ps(bytes(kPage + t)), broadcast(source.offset_unit)));
    } else {
      const auto* stored = reinterpret_cast<const float*>(source.stored);
      steps = load(stored + t);
      middles = multiply(subtract(broadcast(1.5f), load(stored + kPage + t)), steps);
    }
    const Vec mask = lane_mask(tokens >> t);
    store(step + t, _mm256_and_ps(steps, mask));
    store(middle + t, _mm256_and_ps(middles, mask));
  }
}

// ---- keys ----

// Eight sums of two vectors of 32-bit sums: the two 128-bit halves of each belong to the same four tokens (or
// channels). vperm2i128 would save an instruction and cost three cycles on Zen 1.
inline __m128i add_halves(__m256i sums) {
  return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}
inline __m256i add_halves(__m256i first, __m256i second) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(add_halves(first)), add_halves(second), 1);
}

// 16-bit sums of one row: [group of four tokens], the halves of a vector still apart.
using KeySums = __m256i[kPage / 4];

inline void finish_key_logits(const KeySums& sums, const KeyRow& row, const float* step, const float* middle,
                              float* logits) {
  const __m256i ones = _mm256_set1_epi16(1), three_sums = _mm256_set1_epi32(row.terms.three_sums);
  const Vec code_factor = broadcast(row.terms.code_factor), middle_factor = broadcast(row.terms.middle_factor);
  for (int t = 0; t < kPage; t += 8) {
    const __m256i dots = add_halves(_mm256_madd_epi16(sums[t / 4], ones), _mm256_madd_epi16(sums[t / 4 + 1], ones));
    const Vec deviation = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_add_epi32(dots, dots), three_sums));
    const Vec offset = row.offsets != nullptr ? load(row.offsets + t) : broadcast(row.offset);
    const Vec common = multiply_add(middle_factor, load(middle + t), offset);
    store(logits + t, multiply_add(multiply(code_factor, load(step + t)), deviation, common));
  }
}

// Four tokens are unpacked into eight registers and met by every row's operand from memory.
void key_logits(const std::uint8_t* packed, int head_dim, const KeyRow* rows, int num_rows, const float* step,
                const float* middle, float* logits) {
  KeySums sums[kMaxPackedRows];
  for (int block = 0; 64 * block < head_dim; ++block) {
    const int width = head_dim - 64 * block < 64 ? head_dim - 64 * block : 64;  // bytes of four tokens
    for (int group = 0; group < kPage / 4; ++group) {
      const std::uint8_t* words = packed + 1024 * block + group * width;
      __m256i codes[8];
      unpack(load_words(words, width), load_words(words + 32, width - 32), codes);
      for (int r = 0; r < num_rows; ++r) {
        const __m256i sum = dot_of_eight(codes, reinterpret_cast<const __m256i*>(rows[r].operand) + 8 * block, true);
        sums[r][group] = block == 0 ? sum : _mm256_add_epi16(sums[r][group], sum);
      }
    }
  }
  for (int r = 0; r < num_rows; ++r) finish_key_logits(sums[r], rows[r], step, middle, logits + r * kPage);
}

// ---- values ----

// One digit of one row's fixed-point weights, arranged as the unpacked codes are: accumulator = rescale accumulator +
// unit dot.
struct Digit {
  __m256i weights[8];  // [words 0..1 and 2..3, plane j]
  float unit, rescale;
  float* accumulator;
};

// From 32 bytes of tokens 32 half .. 32 half + 31, where lane 0 holds tokens 0..3, 8..11, 16..19, 24..27 and lane 1 the
// others: plane 2 half takes tokens 0, 1, 4, 5 of every eight, plane 2 half + 1 tokens 2, 3, 6, 7.
inline void arrange_digits(__m256i bytes, int half, __m256i* weights) {
  const __m128i first = _mm256_castsi256_si128(bytes), second = _mm256_extracti128_si256(bytes, 1);
  for (int pair = 0; pair < 2; ++pair) {
    const __m128i words = pair == 0 ? _mm_unpacklo_epi16(first, second) : _mm_unpackhi_epi16(first, second);
    const __m256i lanes = _mm256_permute4x64_epi64(_mm256_castsi128_si256(words), 0x50);
    weights[4 * pair + 2 * half] = _mm256_shuffle_epi32(lanes, 0x00);
    weights[4 * pair + 2 * half + 1] = _mm256_shuffle_epi32(lanes, 0x55);
  }
}

// Writes one digit or two and returns how many.
inline int quantize_weights(const ValueRow& row, const float* step, const float* middle, Digit* digits) {
  Vec products[8];
  Vec largest_lanes = broadcast(0.0f), total_lanes = largest_lanes, middle_lanes = largest_lanes;
  for (int i = 0; i < 8; ++i) {
    const Vec weight = load(row.weights + 8 * i);
    products[i] = multiply(weight, load(step + 8 * i));
    largest_lanes = maximum(largest_lanes, products[i]);
    total_lanes = add(total_lanes, products[i]);
    middle_lanes = multiply_add(weight, load(middle + 8 * i), middle_lanes);
  }
  const float largest = max_lane(largest_lanes);
  const float weight_before = row.sums->weight * row.rescale;
  const bool single = largest <= kSingleDigitShare * (weight_before + sum_lanes(total_lanes));
  const float steps = single ? 255.0f : 65535.0f;
  const float unit = largest / steps;
  const Vec inverse = broadcast(largest > 0 ? steps / largest : 0.0f);
  __m256i fixed[8], fixed_lanes = _mm256_setzero_si256();
  for (int i = 0; i < 8; ++i) {
    fixed[i] = _mm256_cvtps_epi32(_mm256_min_ps(multiply(products[i], inverse), broadcast(steps)));
    fixed_lanes = _mm256_add_epi32(fixed_lanes, fixed[i]);
  }
  const float fixed_total = unit * sum_lanes(_mm256_cvtepi32_ps(fixed_lanes));
  row.sums->middle = row.sums->middle * row.rescale + (sum_lanes(middle_lanes) - 1.5f * fixed_total);
  row.sums->weight = weight_before + fixed_total;

  const __m256i low_byte = _mm256_set1_epi16(0xFF);
  for (int half = 0; half < 2; ++half) {
    const __m256i front = _mm256_packus_epi32(fixed[4 * half], fixed[4 * half + 1]);
    const __m256i back = _mm256_packus_epi32(fixed[4 * half + 2], fixed[4 * half + 3]);
    arrange_digits(_mm256_packus_epi16(_mm256_and_si256(front, low_byte), _mm256_and_si256(back, low_byte)), half,
                   digits[0].weights);
    if (single) continue;
    arrange_digits(_mm256_packus_epi16(_mm256_srli_epi16(front, 8), _mm256_srli_epi16(back, 8)), half,
                   digits[1].weights);
  }
  digits[0].unit = unit;
  digits[0].rescale = row.rescale;
  digits[1].unit = 256 * unit;
  digits[1].rescale = 1;
  digits[0].accumulator = digits[1].accumulator = row.accumulator;
  return single ? 1 : 2;
}

// Four channels are unpacked into eight registers and met by every digit of every row from memory.
void add_values(const std::uint8_t* packed, int head_dim, const ValueRow* rows, int num_rows, const float* step,
                const float* middle) {
  Digit digits[2 * kMaxPackedRows];
  int num_digits = 0;
  for (int r = 0; r < num_rows; ++r) num_digits += quantize_weights(rows[r], step, middle, digits + num_digits);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i first_sums[2 * kMaxPackedRows];
  for (int channel = 0; channel < head_dim; channel += 4) {
    const std::uint8_t* words = packed + 16 * channel;
    __m256i codes[8];
    unpack(load_bytes(words), load_bytes(words + 32), codes);
    for (int i = 0; i < num_digits; ++i) {
      const Digit& digit = digits[i];
      const __m256i sum = _mm256_madd_epi16(dot_of_eight(codes, digit.weights, false), ones);
      if (channel % 8 == 0) {
        first_sums[i] = sum;
        continue;
      }
      float* eight = digit.accumulator + channel - 4;
      const Vec gained = multiply(broadcast(digit.unit), _mm256_cvtepi32_ps(add_halves(first_sums[i], sum)));
      store(eight, multiply_add(load(eight), broadcast(digit.rescale), gained));
    }
  }
}

}  // namespace

const AttentionKernels& avx2_attention_kernels() {
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
