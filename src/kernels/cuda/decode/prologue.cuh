#pragma once
// What a block prepares at the start of a row: q' = q A_k^{-T} in the digits that the tensor cores read, and the
// coefficients of the page-mean term.

#include "history.cuh"
#include "product.cuh"
#include "segments.cuh"

namespace oscar::cuda {

// What a row reads besides its items: the queries, two neighbouring channels a word, and the head's page mean and
// offsets. Loaded a row ahead, stored once their place is free.
template <typename Config>
class RowInputs {
  static constexpr int kWords = Config::kRows * Config::kHeadDim / 2;
  static constexpr int kAThread = (kWords + Config::kNumThreads - 1) / Config::kNumThreads;
  static constexpr int kConstantsAThread = (Config::kHeadDim + 4 + Config::kNumThreads - 1) / Config::kNumThreads;

 public:
  __device__ __forceinline__ void load_constants(const DecodeParams& p, int head) {
    const int thread = fresh_thread();
#pragma unroll
    for (int i = 0; i < kConstantsAThread; ++i) {
      const int k = thread + i * Config::kNumThreads, offset = k - Config::kHeadDim;
      constant_[i] = 0;
      if (k < Config::kHeadDim)
        constant_[i] = p.page_mean[head * Config::kHeadDim + k];
      else if (offset < 4)
        constant_[i] =
            reinterpret_cast<const float*>(offset < 2 ? p.key_offset : p.value_offset)[2 * head + offset % 2];
    }
  }
  __device__ __forceinline__ void load_queries(const DecodeParams& p, const Row& row) {
    const int thread = fresh_thread();
#pragma unroll
    for (int i = 0; i < kAThread; ++i) {
      const int k = thread + i * Config::kNumThreads, r = k / (Config::kHeadDim / 2);
      word_[i] = 0;
      if (k >= kWords) break;
      const QueryRow query = query_row<Config>(p, row, r);
      if (query.valid)
        word_[i] = *reinterpret_cast<const std::uint32_t*>(
            p.q + (static_cast<std::int64_t>(row.request) * p.query_length + query.token) * p.q_token_stride +
            query.head * p.q_head_stride + 2 * (k % (Config::kHeadDim / 2)));
    }
  }
  __device__ __forceinline__ void store(typename Config::Shared& shared) const {
    const int thread = fresh_thread();
#pragma unroll
    for (int i = 0; i < kConstantsAThread; ++i) {
      const int k = thread + i * Config::kNumThreads, offset = k - Config::kHeadDim;
      if (offset < 0)
        shared.mean[k] = constant_[i];
      else if (offset < 4)
        shared.offsets[offset] = constant_[i];
    }
#pragma unroll
    for (int i = 0; i < kAThread; ++i) {
      const int k = thread + i * Config::kNumThreads, r = k / (Config::kHeadDim / 2);
      const int channel = 2 * (k % (Config::kHeadDim / 2));
      if (k >= kWords) break;
      *reinterpret_cast<std::uint32_t*>(&shared.query[r][channel]) = word_[i];
      shared.columns[channel][r] = __uint_as_float(word_[i] << 16);
      shared.columns[channel + 1][r] = __uint_as_float(word_[i] & 0xFFFF0000u);
    }
  }

 private:
  std::uint32_t word_[kAThread];
  float constant_[kConstantsAThread];
};

__device__ __forceinline__ float bf16_value(std::uint16_t bits) {
  return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
}

// Coefficients of the page-mean term, a warp a row.
template <typename Config>
__device__ __forceinline__ void prepare_coefficients(const DecodeParams& p, typename Config::Shared& shared) {
  constexpr int kPairVectors = Config::kPairs / 32;
  const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32, half = p.rotary_dim / 2;
  for (int row = warp; row < Config::kRows; row += Config::kNumWarps) {
    // pair i turns channels i, i + rotary / 2; the rest pair up in order and do not turn
    float2 value[kPairVectors];
    float largest = 0;
#pragma unroll
    for (int j = 0; j < kPairVectors; ++j) {
      const int pair = 32 * j + lane;
      const int a = pair < half ? pair : p.rotary_dim + 2 * (pair - half), b = pair < half ? pair + half : a + 1;
      const float q1 = bf16_value(shared.query[row][a]), q2 = bf16_value(shared.query[row][b]);
      const float m1 = shared.mean[a], m2 = shared.mean[b];
      value[j] = make_float2(q1 * m1 + q2 * m2, q2 * m1 - q1 * m2);
      largest = fmaxf(largest, fmaxf(fabsf(value[j].x), fabsf(value[j].y)));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    // a power of two brings the largest to 2^13 .. 2^14, so that FP16 holds it at any angle
    const std::uint32_t exponent = max(__float_as_uint(largest) >> 23, 20u);
    const float raise = __uint_as_float((127 + 13 + 127 - exponent) << 23);
#pragma unroll
    for (int j = 0; j < kPairVectors; ++j)
      shared.coefficients[row][32 * j + lane] = make_float2(value[j].x * raise, value[j].y * raise);
    if (lane == 0) shared.term_scale[row] = p.scale * kLog2E * __uint_as_float((exponent - 13) << 23);
  }
}

// From the warps' shares of q', a warp a row: digits and factors.
template <typename Config>
__device__ __forceinline__ void prepare_digits(const DecodeParams& p, typename Config::Shared& shared) {
  constexpr int kD = Config::kHeadDim, kVectors = kD <= 128 ? 1 : kD / 128;
  const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32;
  for (int row = warp; row < Config::kRows; row += Config::kNumWarps) {
    float value[kVectors][4], largest = 0, sum_exact = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int channel = 128 * j + 4 * lane;
      const float4 x = channel < kD ? sum_shares<Config>(shared, row, channel) : make_float4(0, 0, 0, 0);
      value[j][0] = x.x, value[j][1] = x.y, value[j][2] = x.z, value[j][3] = x.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        largest = fmaxf(largest, fabsf(value[j][i]));
        sum_exact += value[j][i];
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      sum_exact += __shfl_xor_sync(~0u, sum_exact, step);
    }
    // planes 1 and 3 read 4 c, so their q is a quarter
    const float step = largest > 0 ? largest * (1.0f / Config::kQueryScale) : 1.0f;
    const float quarter = lane / 4 % 2 == 1 ? 0.25f : 1.0f, factor = __fdividef(quarter, step);
    float sum_fixed = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      std::uint32_t high_word = 0, low_word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int fixed = __float2int_rn(value[j][i] * factor);
        const int high = (fixed + 128) >> 8, low = fixed - 256 * high;
        high_word |= (static_cast<std::uint32_t>(high) & 0xFFu) << (8 * i);
        low_word |= (static_cast<std::uint32_t>(low) & 0xFFu) << (8 * i);
        sum_fixed += static_cast<float>(fixed) * (quarter == 1.0f ? 1.0f : 4.0f);
      }
      if (128 * j + 4 * lane < kD) {
        auto& fragment = shared.digits[row / 4][4 * j + lane / 8][lane / 4 % 2];
        fragment[8 * (row % 4) + lane % 4] = high_word;
        fragment[8 * (row % 4) + 4 + lane % 4] = low_word;
      }
    }
#pragma unroll
    for (int s = 16; s > 0; s /= 2) sum_fixed += __shfl_xor_sync(~0u, sum_fixed, s);
    if (lane == 0) {
      const float unit_scale = p.scale * kLog2E, exact = sum_exact * unit_scale;
      shared.factors[row] = score_factors(step * unit_scale * kStep2, sum_fixed, exact, shared.offsets[1]);
      shared.term_base[row] = exact * shared.offsets[0];
    }
  }
}

// Reads the fragments of a row's query; low, high: INT2 tokens that each query row reads.
template <typename Config>
__device__ __forceinline__ void load_fragments(const DecodeParams& p, const Row& row,
                                               const typename Config::Shared& shared,
                                               QueryFragments<Config>& fragments) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  fragments.whole_low = 0;
  fragments.whole_high = 1 << 30;
#pragma unroll
  for (int n = 0; n < Config::kColumnTiles; ++n) {
#pragma unroll
    for (int step = 0; step < Config::kKeySteps; ++step) {
      fragments.digits[n][step][0] = shared.digits[n][step][0][lane];
      fragments.digits[n][step][1] = shared.digits[n][step][1][lane];
    }
    fragments.row[n] = shared.factors[4 * n + t];
    fragments.term_base[n] = shared.term_base[4 * n + t];
    const QueryRow query = query_row<Config>(p, row, 4 * n + t);
    const int position = row.items.length - p.query_length + (query.valid ? query.token : 0);
    fragments.low[n] = p.sink;
    if (p.sliding_window > 0) fragments.low[n] = max(p.sink, position - p.sliding_window + 1);
    fragments.high[n] = position - p.recent;
    fragments.whole_low = max(fragments.whole_low, fragments.low[n]);
    fragments.whole_high = min(fragments.whole_high, fragments.high[n]);
  }
  fragments.whole_low = __reduce_max_sync(~0u, fragments.whole_low);
  fragments.whole_high = __reduce_min_sync(~0u, fragments.whole_high);
}

}  // namespace oscar::cuda
