// AVX2, FMA and F16C. Codes meet int8 queries, and 16-bit weights as two digits, in vpmaddubsw: unsigned byte times
// signed byte, neighbours added to 16 bits. Sums stay below 2^15: keys 2 * 3 * 127 * (head_dim / 8) = 24384 at head_dim
// 256, values 2 * 3 * 255 * 8 = 12240. A page of one KV head costs, per query row at head_dim 64: 128 vpmaddubsw for
// the keys and 256 for the values.

#include <immintrin.h>

#include "kernels/cpu/attention_kernels.hpp"

namespace oscar::cpu {
namespace {

constexpr int kLanes = 8;
constexpr int kUnits = 2;  // 16-byte units (one word of four tokens) in a vector
using Vec = __m256;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load_up_to(const float* p, int) { return load(p); }  // head_dim is a multiple of 16
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
inline void store_bytes(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// ---- codes ----

inline __m256i plane(__m256i words, int j) {
  return _mm256_and_si256(_mm256_srli_epi32(words, 2 * j), _mm256_set1_epi8(3));
}

// Unpacked keys: [16 groups of four tokens, pairs of units, plane j, 32 bytes]. A missing last unit keeps whatever
// bytes are there: the operand is zero.
void unpack_keys(const std::uint8_t* packed, int head_dim, std::uint8_t* codes) {
  const int num_pairs = (head_dim + 31) / 32;
  for (int group = 0; group < kPage / 4; ++group) {
    std::uint8_t* target = codes + group * num_pairs * 128;
    for (int block = 0; 64 * block < head_dim; ++block) {
      const int width = head_dim - 64 * block < 64 ? head_dim - 64 * block : 64;
      const std::uint8_t* source = packed + 1024 * block + group * width;  // width / 16 units of 16 bytes
      for (int byte = 0; byte < width; byte += 32, target += 128) {
        const __m256i words =
            width - byte >= 32
                ? load_bytes(source + byte)
                : _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + byte)));
        for (int j = 0; j < 4; ++j) store_bytes(target + 32 * j, plane(words, j));
      }
    }
  }
}

// Unpacked values: [head_dim / 4 groups of four channels, words t = 0..1 and 2..3, plane j, 32 bytes].
void unpack_values(const std::uint8_t* packed, int head_dim, std::uint8_t* codes) {
  for (int byte = 0; byte < 16 * head_dim; byte += 32) {
    const __m256i words = load_bytes(packed + byte);
    for (int j = 0; j < 4; ++j) store_bytes(codes + 4 * byte + 32 * j, plane(words, j));
  }
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
// channels).
inline __m256i add_halves(__m256i first, __m256i second) {
  return _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                          _mm256_permute2x128_si256(first, second, 0x31));
}

// kVectorsPerGroup = vectors of one group of four tokens: head_dim / 8; 0: read it from the argument.
template <int kVectorsPerGroup>
inline void key_logits_for(const std::uint8_t* codes, const std::int8_t* operand, int vectors_per_group,
                           const KeyTerms& terms, const float* step, const float* middle, const float* offset,
                           float* logits) {
  const int vectors = kVectorsPerGroup > 0 ? kVectorsPerGroup : vectors_per_group;
  const __m256i ones = _mm256_set1_epi16(1), three_sums = _mm256_set1_epi32(terms.three_sums);
  const Vec code_factor = broadcast(terms.code_factor), middle_factor = broadcast(terms.middle_factor);
  for (int token = 0; token < kPage; token += 16) {
    const std::uint8_t* group = codes + token / 4 * vectors * 32;
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int v = 0; v < vectors; ++v) {
      const __m256i query = load_bytes(operand + 32 * v);
      for (int g = 0; g < 4; ++g) {
        const __m256i products = _mm256_maddubs_epi16(load_bytes(group + (g * vectors + v) * 32), query);
        sums[g] = _mm256_add_epi16(sums[g], products);
      }
    }
    for (__m256i& sum : sums) sum = _mm256_madd_epi16(sum, ones);
    for (int half = 0; half < 2; ++half) {
      const __m256i dots = add_halves(sums[2 * half], sums[2 * half + 1]);
      const Vec deviation = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_add_epi32(dots, dots), three_sums));
      const int t = token + 8 * half;
      const Vec common = multiply_add(middle_factor, load(middle + t), load(offset + t));
      store(logits + t, multiply_add(multiply(code_factor, load(step + t)), deviation, common));
    }
  }
}

void key_logits(const std::uint8_t* codes, const std::int8_t* operand, int head_dim, const KeyTerms& terms,
                const float* step, const float* middle, const float* offset, float* logits) {
  switch (head_dim) {
    case 64: return key_logits_for<8>(codes, operand, 8, terms, step, middle, offset, logits);
    case 128: return key_logits_for<16>(codes, operand, 16, terms, step, middle, offset, logits);
    default: return key_logits_for<0>(codes, operand, (head_dim + 31) / 32 * 4, terms, step, middle, offset, logits);
  }
}

// ---- values ----

// Weights as digits, one vector per vector of unpacked codes: [words 0..1 and 2..3, plane j].
struct Digits {
  __m256i high[8], low[8];
};

// From 32 bytes of tokens 32 half .. 32 half + 31, where lane 0 holds tokens 0..3, 8..11, 16..19, 24..27 and lane 1 the
// others: plane 2 half takes tokens 0, 1, 4, 5 of every eight, plane 2 half + 1 tokens 2, 3, 6, 7.
inline void arrange_digits(__m256i bytes, int half, __m256i* digits) {
  const __m128i first = _mm256_castsi256_si128(bytes), second = _mm256_extracti128_si256(bytes, 1);
  for (int pair = 0; pair < 2; ++pair) {
    const __m128i words = pair == 0 ? _mm_unpacklo_epi16(first, second) : _mm_unpackhi_epi16(first, second);
    const __m256i lanes = _mm256_permute4x64_epi64(_mm256_castsi128_si256(words), 0x50);
    digits[4 * pair + 2 * half] = _mm256_shuffle_epi32(lanes, 0x00);
    digits[4 * pair + 2 * half + 1] = _mm256_shuffle_epi32(lanes, 0x55);
  }
}

// Returns the unit of the fixed-point weights; *middle_gain = sum weight middle - 1.5 sum w.
inline float quantize_weights(const float* weights, const float* step, const float* middle, Digits* digits,
                              float* middle_gain) {
  Vec products[8];
  Vec largest_lanes = broadcast(0.0f), middles = broadcast(0.0f);
  for (int i = 0; i < 8; ++i) {
    const Vec weight = load(weights + 8 * i);
    products[i] = multiply(weight, load(step + 8 * i));
    largest_lanes = maximum(largest_lanes, products[i]);
    middles = multiply_add(weight, load(middle + 8 * i), middles);
  }
  const float largest = max_lane(largest_lanes);
  const float inverse = largest > 0 ? 65535.0f / largest : 0.0f;
  const float unit = largest / 65535.0f;
  __m256i fixed[8], total = _mm256_setzero_si256();
  for (int i = 0; i < 8; ++i) {
    const Vec scaled = _mm256_min_ps(multiply(products[i], broadcast(inverse)), broadcast(65535.0f));
    fixed[i] = _mm256_cvtps_epi32(scaled);
    total = _mm256_add_epi32(total, fixed[i]);
  }
  for (int half = 0; half < 2; ++half) {
    const __m256i* of_half = fixed + 4 * half;
    const __m256i front = _mm256_packus_epi32(of_half[0], of_half[1]),
                  back = _mm256_packus_epi32(of_half[2], of_half[3]);
    const __m256i low_byte = _mm256_set1_epi16(0xFF);
    arrange_digits(_mm256_packus_epi16(_mm256_srli_epi16(front, 8), _mm256_srli_epi16(back, 8)), half, digits->high);
    arrange_digits(_mm256_packus_epi16(_mm256_and_si256(front, low_byte), _mm256_and_si256(back, low_byte)), half,
                   digits->low);
  }
  *middle_gain = sum_lanes(middles) - 1.5f * unit * sum_lanes(_mm256_cvtepi32_ps(total));
  return unit;
}

void add_values(const std::uint8_t* codes, int head_dim, const float* weights, const float* step, const float* middle,
                float rescale, float* accumulator, float* middle_sum) {
  Digits digits;
  float middle_gain;
  const Vec unit = broadcast(quantize_weights(weights, step, middle, &digits, &middle_gain));
  *middle_sum = *middle_sum * rescale + middle_gain;
  const __m256i ones = _mm256_set1_epi16(1), high_factor = _mm256_set1_epi16(256);
  for (int channel = 0; channel < head_dim; channel += 8) {
    const std::uint8_t* group = codes + channel * kPage;
    __m256i high[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, low[2] = {high[0], high[0]};
    for (int v = 0; v < 8; ++v) {
      for (int g = 0; g < 2; ++g) {
        const __m256i code = load_bytes(group + (8 * g + v) * 32);
        high[g] = _mm256_add_epi16(high[g], _mm256_maddubs_epi16(digits.high[v], code));
        low[g] = _mm256_add_epi16(low[g], _mm256_maddubs_epi16(digits.low[v], code));
      }
    }
    __m256i sums[2];
    for (int g = 0; g < 2; ++g) {
      sums[g] = _mm256_add_epi32(_mm256_madd_epi16(high[g], high_factor), _mm256_madd_epi16(low[g], ones));
    }
    const Vec gained = multiply(unit, _mm256_cvtepi32_ps(add_halves(sums[0], sums[1])));
    store(accumulator + channel, multiply_add(load(accumulator + channel), broadcast(rescale), gained));
  }
}

}  // namespace

const AttentionKernels& avx2_attention_kernels() {
  static constexpr AttentionKernels kKernels = {
      .arrange_query = arrange_query,
      .unpack_keys = unpack_keys,
      .unpack_values = unpack_values,
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
