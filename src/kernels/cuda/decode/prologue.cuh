#pragma once
// What a block prepares before it streams the rows of a pass: q' = q A_k^{-T} in the digits that the tensor cores read,
// and the coefficients of the page-mean term.

#include "../common/copy.cuh"
#include "history.cuh"
#include "product.cuh"
#include "segments.cuh"

namespace oscar::cuda {

__device__ __forceinline__ float bf16_value(std::uint16_t bits) {
  return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
}

// Starts the copies of what the rows of a pass read besides their items; a warp copies what it prepares itself: the
// query rows warp, warp + warps, ... of the pass, and for each the page mean of its head. Offsets go to whoever
// streams.
template <typename Config>
__device__ __forceinline__ void load_constants(const DecodeParams& p, typename Config::Shared& shared,
                                               typename Config::Scratch& scratch) {
  constexpr int kPieces = Config::kHeadDim / 4;  // of a mean
  const int thread = fresh_thread(), lane = thread % 32;
#pragma unroll 1
  for (int k = thread / 32; k < shared.share.num_rows * Config::kRows; k += Config::kNumWarps) {
    const float* mean = p.page_mean + shared.share.row[k / Config::kRows].head * Config::kHeadDim;
    for (int piece = lane; piece < kPieces; piece += 32)
      copy_by_thread<16>(&scratch.mean[k][4 * piece], mean + 4 * piece);
  }
  if (thread < 2 * shared.share.num_rows) {
    const int slot = thread / 2;
    const OffsetScale* from = thread % 2 == 0 ? p.key_offset : p.value_offset;
    copy_by_thread<8>(&shared.data[slot].offsets[2 * (thread % 2)], from + shared.share.row[slot].head);
  }
}
template <typename Config>
__device__ __forceinline__ void load_queries(const DecodeParams& p, const DecodePlan& plan,
                                             typename Config::Shared& shared) {
  constexpr int kPieces = Config::kHeadDim / 8;  // of a query row
  const int thread = fresh_thread(), lane = thread % 32;
#pragma unroll 1
  for (int k = thread / 32; k < shared.share.num_rows * Config::kRows; k += Config::kNumWarps) {
    const int r = k % Config::kRows;
    const Row& row = shared.share.row[k / Config::kRows];
    const QueryRow query = query_row<Config>(p, plan, row, r);
    const std::int64_t token = static_cast<std::int64_t>(row.request) * p.query_length + query.token;
    const __nv_bfloat16* from = query.valid ? p.q + token * p.q_token_stride + query.head * p.q_head_stride : p.q;
    if (lane < kPieces)
      copy_by_thread<16>(&shared.data[k / Config::kRows].query[r][8 * lane], from + (query.valid ? 8 * lane : 0),
                         query.valid);
  }
}

// Once the warp's copies are there: the coefficients of its rows' page-mean terms, and their digits for the product.
template <typename Config>
__device__ __forceinline__ void prepare_queries(const DecodeParams& p, typename Config::Shared& shared,
                                                const typename Config::Scratch& scratch) {
  constexpr int kPairVectors = Config::kPairs / 32;
  const int thread = fresh_thread(), lane = thread % 32, half = p.rotary_dim / 2;
#pragma unroll 1
  for (int k = thread / 32; k < shared.share.num_rows * Config::kRows; k += Config::kNumWarps) {
    auto& data = shared.data[k / Config::kRows];
    const int row = k % Config::kRows;
    const float* mean = scratch.mean[k];
    WarpRow<Config> query;
#pragma unroll
    for (int v = 0; v < WarpRow<Config>::kVectors; ++v) {
      const bool exists = WarpRow<Config>::exists(v);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        query.value[v][i] = exists ? bf16_value(data.query[row][WarpRow<Config>::channel(v) + i]) : 0;
    }
    query.to_digits(data, row);
    // pair i turns channels i, i + rotary / 2; the rest pair up in order and do not turn
    float2 value[kPairVectors];
    float largest = 0;
#pragma unroll
    for (int j = 0; j < kPairVectors; ++j) {
      const int pair = 32 * j + lane;
      const int a = pair < half ? pair : p.rotary_dim + 2 * (pair - half), b = pair < half ? pair + half : a + 1;
      const float q1 = bf16_value(data.query[row][a]), q2 = bf16_value(data.query[row][b]);
      value[j] = make_float2(q1 * mean[a] + q2 * mean[b], q2 * mean[a] - q1 * mean[b]);
      largest = fmaxf(largest, fmaxf(fabsf(value[j].x), fabsf(value[j].y)));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    // a power of two brings the largest to 2^13 .. 2^14, so that FP16 holds it at any angle
    const std::uint32_t exponent = max(__float_as_uint(largest) >> 23, 20u);
    const float raise = __uint_as_float((127 + 13 + 127 - exponent) << 23);
#pragma unroll
    for (int j = 0; j < kPairVectors; ++j)
      data.coefficients[row][32 * j + lane] = make_float2(value[j].x * raise, value[j].y * raise);
    if (lane == 0) data.term_scale[row] = p.scale * kLog2E * __uint_as_float((exponent - 13) << 23);
  }
}

// From the turned queries, a warp a query row: digits and factors of the scores.
template <typename Config>
__device__ __forceinline__ void prepare_scores(const DecodeParams& p, typename Config::Shared& shared,
                                               const typename Config::Scratch& scratch) {
  constexpr int kVectors = WarpRow<Config>::kVectors;
  const int thread = fresh_thread(), lane = thread % 32;
#pragma unroll 1
  for (int k = thread / 32; k < shared.share.num_rows * Config::kRows; k += Config::kNumWarps) {
    auto& data = shared.data[k / Config::kRows];
    const int row = k % Config::kRows;
    WarpRow<Config> query;
    float largest = 0, sum_exact = 0, sum_fixed = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float4 x = make_float4(0, 0, 0, 0);
      if (WarpRow<Config>::exists(v))
        x = *reinterpret_cast<const float4*>(&scratch.product[k / Config::kRows][row][WarpRow<Config>::channel(v)]);
      query.value[v][0] = x.x, query.value[v][1] = x.y, query.value[v][2] = x.z, query.value[v][3] = x.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        largest = fmaxf(largest, fabsf(query.value[v][i]));
        sum_exact += query.value[v][i];
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
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint2 digits = digits_of(query.value[v], factor, sum_fixed);
      if (WarpRow<Config>::exists(v)) store_digits<Config>(data, row, WarpRow<Config>::channel(v), digits);
    }
    if (quarter != 1.0f) sum_fixed *= 4.0f;
#pragma unroll
    for (int s = 16; s > 0; s /= 2) sum_fixed += __shfl_xor_sync(~0u, sum_fixed, s);
    if (lane == 0) {
      const float unit_scale = p.scale * kLog2E, exact = sum_exact * unit_scale;
      data.factors[row] = score_factors(step * unit_scale * kStep2, sum_fixed, exact, data.offsets[1]);
      data.term_base[row] = exact * data.offsets[0];
    }
  }
}

// Reads the fragments of a row's query; low, high: INT2 tokens that each query row reads.
template <typename Config>
__device__ __forceinline__ void load_fragments(const DecodeParams& p, const DecodePlan& plan, const Row& row,
                                               const typename Config::RowData& data,
                                               QueryFragments<Config>& fragments) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  fragments.whole_low = 0;
  fragments.whole_high = 1 << 30;
#pragma unroll
  for (int n = 0; n < Config::kColumnTiles; ++n) {
#pragma unroll
    for (int step = 0; step < Config::kKeySteps; ++step) {
      fragments.digits[n][step][0] = data.digits[n][step][0][lane];
      fragments.digits[n][step][1] = data.digits[n][step][1][lane];
    }
    fragments.row[n] = data.factors[4 * n + t];
    fragments.term_base[n] = data.term_base[4 * n + t];
    const QueryRow query = query_row<Config>(p, plan, row, 4 * n + t);
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
