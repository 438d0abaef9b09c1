#pragma once
// One INT2 page against up to 8 query rows, by one warp.
//
// Codes go to the integer tensor cores as they are: the word masked by 0x03030303 holds c, by 0x0C0C0C0C it holds 4c;
// the other operand carries the 1/4. Scores: 16-bit fixed-point queries, two signed digits. Values: 16-bit fixed-point
// weights relative to the page's largest, two unsigned digits.
//
// Fragment lane (g, t) = (lane / 4, lane % 4):
//   scores: rows are tokens 32h + 4g + {0..3}, columns 2r, 2r + 1 the high and low digit of query row r; a lane owns
//   row t of each column tile and 8 tokens of it;
//   values: rows are channels 32v + 4g + {0..3}, K are tokens; a lane owns those channels of row t.
//
// Sums of the tensor cores stay integers below 2^23 and not negative (the accumulators start at a bias), so that their
// bits, read as a float, are the denormal n 2^-149: the multiply-add that joins two digits takes them without any
// conversion. Its factors carry the 2^149, shared with a second factor so that neither overflows.

#include <type_traits>

#include "config.hpp"

namespace oscar::cuda {

inline constexpr float kStep2 = 0.9957f;  // distance of neighbouring levels (oscar/codec.hpp)
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kWeightScale = 65280.0f;      // largest weight: digits 255 and 0
inline constexpr float kRoundingMagic = 8388608.0f;  // 2^23: adding it leaves the rounded integer in the low bits
inline constexpr int kHighBias = 1 << 16, kLowBias = 1 << 18;  // above the largest negative sum of a score's digits
inline constexpr float kKeyExponent = 60.0f;   // token scales are stored times 2^60, query factors times 2^(149 - 60)
inline constexpr float kValueUnit = 0x1p125f;  // 2^149 of the denormals times the 2^-24 that the accumulators carry
inline constexpr float kValueScale = 0x1p24f;  // of the accumulators, undone at the end of a row
inline constexpr float kNoMaximum = -1e37f;    // below every score, above -infinity: its differences are never NaN

// A query row's factors of a score: token.scale (high sum * high + low sum * low + constant) + token.offset * offset.
__device__ __forceinline__ float4 score_factors(float logit_unit, float fixed_sum, float exact_sum, float offset_step) {
  const float low = logit_unit * 0x1p89f;
  return make_float4(256.0f * low, low, -(256.0f * kHighBias + kLowBias + 1.5f * fixed_sum) * logit_unit * 0x1p-60f,
                     exact_sum * offset_step);
}

// State of one warp over the pages of a row: this lane's channels of row t of each column tile.
template <typename Config>
struct HistoryState {
  float acc[Config::kColumnTiles][Config::kValueTiles][4];  // times 2^-24
  float max[Config::kColumnTiles];                          // log2, running, the same in all lanes of a row
  float sum[Config::kColumnTiles];                          // this lane's share
  float offset[Config::kColumnTiles];                       // this lane's share of sum p (m_v - 1.5 step_v)

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < Config::kColumnTiles; ++n) {
      max[n] = kNoMaximum;
      sum[n] = offset[n] = 0;
#pragma unroll
      for (int v = 0; v < Config::kValueTiles; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][v][i] = 0;
    }
  }
};

template <typename Config>
struct QueryFragments {
  std::uint32_t digits[Config::kColumnTiles][Config::kKeySteps][2];
  float4 row[Config::kColumnTiles];                           // score_factors of row t
  float term_base[Config::kColumnTiles];                      // joins every page term
  int low[Config::kColumnTiles], high[Config::kColumnTiles];  // INT2 tokens that row t reads, inclusive
  int whole_low, whole_high;                                  // pages inside need no mask
};

// Parameters of two tokens a lane, decoded once a page and read by the four lanes that hold a token's scores:
// s_token = (2^60 s_k, offset code of k, log2 s_v, 1 / s_v), s_middle = m_v / s_v - 1.5 step. Token 32 h + 4 g + i lies
// at 8 (4 h + i) + g: a load of the eight g is one row of banks.
struct PackedParameters {
  std::uint32_t key_scale, key_offset, value_scale, value_offset;  // two bytes each

  __device__ __forceinline__ PackedParameters(const std::uint8_t* key, const std::uint8_t* value, int lane) {
    const auto pair = [lane](const std::uint8_t* bytes) {
      return static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(bytes + 2 * lane));
    };
    key_scale = pair(key), key_offset = pair(key + kPageTokens);
    value_scale = pair(value), value_offset = pair(value + kPageTokens);
  }
  __device__ __forceinline__ void decode(OffsetScale scale, float4* s_token, float* s_middle, int lane) const {
    const int slot = 8 * (4 * (lane / 16) + 2 * (lane % 2)) + lane % 16 / 2;  // of token 2 lane
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float value_log = signed_byte(value_scale, i) * 0.0625f;
      const float value_inverse = exp2_fast(-value_log);
      s_token[slot + 8 * i] = make_float4(exp2_fast(signed_byte(key_scale, i) * 0.0625f + kKeyExponent),
                                          signed_byte(key_offset, i), value_log, value_inverse);
      s_middle[slot + 8 * i] =
          (scale.center + signed_byte(value_offset, i) * scale.step) * value_inverse - 1.5f * kStep2;
    }
    __syncwarp();
  }
};

// page_term: the page-mean term of row t of each tile and the key offset's centre, log2.
template <typename Config>
__device__ __forceinline__ void history_page(const std::uint8_t* page, float soft_cap,
                                             const QueryFragments<Config>& query, OffsetScale value_offset,
                                             int first_token, float (&page_term)[Config::kColumnTiles], float4* s_token,
                                             float* s_middle, int lane, HistoryState<Config>& state) {
  constexpr int kD = Config::kHeadDim;
  constexpr int kTiles = Config::kColumnTiles;
  const int g = lane / 4;
  const std::uint8_t* value_half = page + Config::kHalfBytes;

  // scores as integers: 4 tiles of 16 tokens. Tiles side by side, so that their products do not wait for each other.
  const PackedParameters packed(page + Config::kCodeBytes, value_half + Config::kCodeBytes, lane);
  std::int32_t dots[kTiles][4][4];
#pragma unroll
  for (int u = 0; u < kD / 64; ++u) {
    uint4 words[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) words[h] = *reinterpret_cast<const uint4*>(page + 1024 * u + 512 * h + 16 * lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int shift = 4 * half, step = 2 * u + half;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint32_t x = words[h].x >> shift, y = words[h].y >> shift, z = words[h].z >> shift,
                            w = words[h].w >> shift;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const std::uint32_t b0 = query.digits[n][step][0], b1 = query.digits[n][step][1];
          std::int32_t(&first)[4] = dots[n][2 * h];
          std::int32_t(&second)[4] = dots[n][2 * h + 1];
          if (step == 0) {
            mma_u8s8_first(first, x & 0x03030303u, y & 0x03030303u, x & 0x0C0C0C0Cu, y & 0x0C0C0C0Cu, b0, b1, kHighBias,
                           kLowBias);
            mma_u8s8_first(second, z & 0x03030303u, w & 0x03030303u, z & 0x0C0C0C0Cu, w & 0x0C0C0C0Cu, b0, b1,
                           kHighBias, kLowBias);
          } else {
            mma_u8s8(first, x & 0x03030303u, y & 0x03030303u, x & 0x0C0C0C0Cu, y & 0x0C0C0C0Cu, b0, b1);
            mma_u8s8(second, z & 0x03030303u, w & 0x03030303u, z & 0x0C0C0C0Cu, w & 0x0C0C0C0Cu, b0, b1);
          }
        }
      }
    }
  }
  packed.decode(value_offset, s_token, s_middle, lane);

  uint4 value_words[2];  // of the first blocks, ahead of the weights
#pragma unroll
  for (int v = 0; v < 2; ++v) value_words[v] = *reinterpret_cast<const uint4*>(value_half + 512 * v + 16 * lane);
  std::uint32_t b[kTiles][2][2];  // weights as the B operand of the value MMAs
  float unit[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    // token 32 h + 4 g + i of row t: dots[2 h + i / 2][2 (i % 2)] (high) and the next (low).
    // y = score + log2 of the value's scale, the weight of the value codes; the page term joins at the maximum, it
    // cancels elsewhere.
    float y[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int h = k / 4, i = k % 4;
      const float4 token = s_token[8 * k + g];
      const float high = __int_as_float(dots[n][2 * h + i / 2][2 * (i % 2)]);
      const float low = __int_as_float(dots[n][2 * h + i / 2][2 * (i % 2) + 1]);
      const float dot = high * query.row[n].x + (low * query.row[n].y + query.row[n].z);
      y[k] = token.x * dot + (token.y * query.row[n].w + token.z);
    }
    if (soft_cap > 0) {
      const float cap = soft_cap * kLog2E;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float value_log = s_token[8 * k + g].z;
        y[k] = cap * tanh_fast(__fdividef(y[k] - value_log + page_term[n], cap)) + value_log;
      }
      page_term[n] = 0;
    }
    if (first_token < query.whole_low || first_token + kPageTokens - 1 > query.whole_high) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int token = first_token + 32 * (k / 4) + 4 * g + k % 4;
        if (token < query.low[n] || token > query.high[n]) y[k] = -INFINITY;
      }
    }
    float page_max = fmaxf(fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3])), fmaxf(fmaxf(y[4], y[5]), fmaxf(y[6], y[7])));
    page_max = fmaxf(page_max, __shfl_xor_sync(~0u, page_max, 4));
    page_max = fmaxf(page_max, __shfl_xor_sync(~0u, page_max, 8));
    page_max = fmaxf(page_max, __shfl_xor_sync(~0u, page_max, 16));
    const float reference = fmaxf(page_max, kNoMaximum);  // a page without a readable token gets weights of zero
    page_max = reference + page_term[n];
    if (__any_sync(~0u, page_max > state.max[n])) {  // rare after the first pages
      const float new_max = fmaxf(state.max[n], page_max);
      const float old_factor = exp2_fast(state.max[n] - new_max);
      state.sum[n] *= old_factor;
      state.offset[n] *= old_factor;
#pragma unroll
      for (int v = 0; v < Config::kValueTiles; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.acc[n][v][i] *= old_factor;
      state.max[n] = new_max;
    }
    const float page_factor = exp2_fast(page_max - state.max[n]);

    // Weights in fixed point of the page's maximum: 16 bits for tokens 0, 1 of each four (planes that hold c), 14 for
    // tokens 2, 3 (planes that hold 4 c). p itself is the weight without the value's scale.
    float sum = 0, middle = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::uint32_t fixed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = i < 2 ? kWeightScale : kWeightScale * 0.25f;
        const float w = exp2_fast(y[4 * h + i] - reference);
        fixed[i] = __float_as_uint(w * scale + kRoundingMagic);
        sum += w * s_token[8 * (4 * h + i) + g].w;
        middle += w * s_middle[8 * (4 * h + i) + g];
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        // bytes 1 (high digits) and 0 (low digits) of both tokens; column 2r of the transpose is the high digit of row
        // r
        b[n][h][pair] = transpose_8x8(__byte_perm(fixed[2 * pair], fixed[2 * pair + 1], 0x4051));
      }
    }
    state.sum[n] += sum * page_factor;
    state.offset[n] += middle * page_factor;
    unit[n] = page_factor * (kStep2 / kWeightScale * kValueUnit);
  }

#pragma unroll
  for (int v = 0; v < Config::kValueTiles; ++v) {
    const uint4 words = v < 2 ? value_words[v] : *reinterpret_cast<const uint4*>(value_half + 512 * v + 16 * lane);
    const std::uint32_t x = words.x >> 4, y = words.y >> 4, z = words.z >> 4, w = words.w >> 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      std::int32_t first[4], second[4];
      mma_u8u8_first(first, words.x & 0x03030303u, words.y & 0x03030303u, words.x & 0x0C0C0C0Cu, words.y & 0x0C0C0C0Cu,
                     b[n][0][0], b[n][0][1]);
      mma_u8u8_first(second, words.z & 0x03030303u, words.w & 0x03030303u, words.z & 0x0C0C0C0Cu, words.w & 0x0C0C0C0Cu,
                     b[n][0][0], b[n][0][1]);
      mma_u8u8(first, x & 0x03030303u, y & 0x03030303u, x & 0x0C0C0C0Cu, y & 0x0C0C0C0Cu, b[n][1][0], b[n][1][1]);
      mma_u8u8(second, z & 0x03030303u, w & 0x03030303u, z & 0x0C0C0C0Cu, w & 0x0C0C0C0Cu, b[n][1][0], b[n][1][1]);
      float(&acc)[4] = state.acc[n][v];
      const auto add = [&](float& sum, std::int32_t high, std::int32_t low) {
        sum += __int_as_float(high) * (256.0f * unit[n]);
        sum += __int_as_float(low) * unit[n];
      };
      add(acc[0], first[0], first[1]);
      add(acc[1], first[2], first[3]);
      add(acc[2], second[0], second[1]);
      add(acc[3], second[2], second[3]);
    }
  }
}

}  // namespace oscar::cuda
