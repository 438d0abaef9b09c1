#pragma once
// The three encoders on a warp's 16 rows in the layout of the accumulators: the arithmetic of docs/format.md in a
// convenient order, so codes differ from the exact instance's near ties.

#include "../arithmetic.cuh"
#include "descend.cuh"

namespace oscar::cuda {

// Sum (or another operation) over the four lanes of a row.
template <typename T, typename Operation>
__device__ __forceinline__ T over_quad(T value, Operation operation) {
  value = operation(value, __shfl_xor_sync(~0u, value, 1));
  return operation(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  return over_quad(value, [](float a, float b) { return a + b; });
}

// Codes nearest to y factor + offset; adding 2^23 + 2^22 rounds, and the sum's low bits are the code.
template <typename Config>
__device__ __forceinline__ void nearest_codes(const Accumulators<Config>& y, const float (&factor)[2],
                                              const float (&offset)[2], PackedCodes<Config>& codes) {
#pragma unroll
  for (int i = 0; i < Config::kBlocks / 2; ++i) codes.words[i] = 0;
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) {
    std::uint32_t code[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      std::uint32_t rounded[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float third =
            __saturatef(fmaf(value_at(y, r, 4 * block + c), factor[r] * (1.0f / 3.0f), offset[r] * (1.0f / 3.0f)));
        rounded[r] = __float_as_uint(fmaf(third, 3.0f, 12582912.0f));
      }
      code[c] = __byte_perm(rounded[0], rounded[1], 0x5410);
    }
    codes.set_block(block, code);
  }
}

// ---- min and max ----

// The magnitudes as float16 shares of the row's largest: bit patterns, which order like them. `above` elements or fewer
// may be larger than the threshold; bisection starts two octaves below the largest, where the usual rank lies.
template <typename Config>
__device__ __forceinline__ void clip_thresholds(const Accumulators<Config>& y, float ratio, float (&threshold)[2]) {
  constexpr int kD = Config::kHeadDim, kN = Config::kValues;
  if (!(ratio > 0.0f)) {
    threshold[0] = threshold[1] = INFINITY;
    return;
  }
  const int above = kD - 1 - min(static_cast<int>(mul(ratio, static_cast<float>(kD))), kD - 1);
  float largest[2] = {0.0f, 0.0f}, inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < kN; ++n) largest[r] = fmaxf(largest[r], fabsf(value_at(y, r, n)));
    largest[r] = over_quad(largest[r], [](float a, float b) { return fmaxf(a, b); });
    inverse[r] = largest[r] > 0.0f ? __fdividef(1.0f, largest[r]) : 0.0f;
  }
  __half2 share[kN];
#pragma unroll
  for (int n = 0; n < kN; ++n)
    share[n] = __habs2(__floats2half2_rn(value_at(y, 0, n) * inverse[0], value_at(y, 1, n) * inverse[1]));
  constexpr std::uint32_t kOne = 0x3C00;
  int low[2] = {-1, -1}, high[2] = {kOne, kOne}, pivot[2] = {kOne - 0x800, kOne - 0x800};
  bool open[2] = {above > 0, above > 0};
  while (__any_sync(~0u, open[0] || open[1])) {
    const __half2 bound = half2_of(static_cast<std::uint32_t>(pivot[0]) | static_cast<std::uint32_t>(pivot[1]) << 16);
    __half2 part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = __float2half2_rn(0.0f);
#pragma unroll
    for (int n = 0; n < kN; ++n) part[n % 4] = __hadd2(part[n % 4], __hgt2(share[n], bound));
    const __half2 sum = over_quad(__hadd2(__hadd2(part[0], part[1]), __hadd2(part[2], part[3])),
                                  [](__half2 a, __half2 b) { return __hadd2(a, b); });
    const int count[2] = {static_cast<int>(__low2float(sum)), static_cast<int>(__high2float(sum))};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!open[r]) continue;
      if (count[r] > above)
        low[r] = pivot[r];
      else
        high[r] = pivot[r];
      open[r] = count[r] != above && high[r] - low[r] > 1;
      pivot[r] = low[r] + (high[r] - low[r]) / 2;
    }
  }
  // the largest element that is not above `high`
  const __half2 bound = half2_of(static_cast<std::uint32_t>(high[0]) | static_cast<std::uint32_t>(high[1]) << 16);
  __half2 best = __float2half2_rn(0.0f);
#pragma unroll
  for (int n = 0; n < kN; ++n) best = __hmax2(best, __hmul2(share[n], __hle2(share[n], bound)));
  best = over_quad(best, [](__half2 a, __half2 b) { return __hmax2(a, b); });
  threshold[0] = __low2float(best) * largest[0];
  threshold[1] = __high2float(best) * largest[1];
}

template <typename Config>
__device__ __forceinline__ void encode_min_max(Accumulators<Config>& y, const StoreConstants& constants,
                                               PackedCodes<Config>& codes, float2 (&parameters)[2]) {
  float clip[2], factor[2], offset[2];
  clip_thresholds<Config>(y, constants.clip_ratio, clip);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int n = 0; n < Config::kValues; ++n) {
      low = fminf(low, value_at(y, r, n));
      high = fmaxf(high, value_at(y, r, n));
    }
    low = fmaxf(over_quad(low, [](float a, float b) { return fminf(a, b); }), -clip[r]);
    high = fminf(over_quad(high, [](float a, float b) { return fmaxf(a, b); }), clip[r]);
    const float scale = at_least(high - low, kMinScale) / 3.0f, zero = 0.0f - low / scale;
    parameters[r] = make_float2(scale, zero);
    factor[r] = 1.0f / scale;
    offset[r] = zero;
  }
  nearest_codes<Config>(y, factor, offset, codes);  // values beyond the clip take its code
}

// ---- mean and deviation ----

template <typename Config>
__device__ __forceinline__ Fit mean_and_deviation(const Accumulators<Config>& y, int r) {
  constexpr float kCount = Config::kHeadDim;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int n = 0; n < Config::kValues; ++n) sum += value_at(y, r, n);
  const float mean = quad_sum(sum) / kCount;
#pragma unroll
  for (int n = 0; n < Config::kValues; ++n) {
    const float centered = value_at(y, r, n) - mean;
    squares = fmaf(centered, centered, squares);
  }
  return {mean, sqrtf(quad_sum(squares) / kCount)};
}

// Factor and offset of code units: code = y factor + offset.
__device__ __forceinline__ void code_units(Fit fit, float& factor, float& offset) {
  factor = 1.0f / (fit.scale * kLevelStep);
  offset = fmaf(-fit.mean, factor, 1.5f);
}

__device__ __forceinline__ float2 stored_codes(const StoreConstants& constants, Fit& fit) {
  const Log8 stored = store_fit(constants.center, constants.spread, fit);
  return make_float2(static_cast<float>(stored.scale_code), static_cast<float>(stored.offset_code));
}

// ---- least squares ----

template <typename Config>
__device__ __forceinline__ void encode_least_squares(Accumulators<Config>& y, const StoreConstants& constants,
                                                     PackedCodes<Config>& codes, float2 (&parameters)[2]) {
  constexpr float kCount = Config::kHeadDim;
  Fit fit[2];
  float mean[2], factor[2], offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    fit[r] = mean_and_deviation<Config>(y, r);
    fit[r].scale = at_least(fit[r].scale, kMinScale);
    mean[r] = fit[r].mean;
  }
#pragma unroll 1
  for (int round = 0; round < 3; ++round) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (round == 2) parameters[r] = stored_codes(constants, fit[r]);
      code_units(fit[r], factor[r], offset[r]);
    }
    if (round == 2) break;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.0f, squares = 0.0f, cross = 0.0f;
#pragma unroll
      for (int n = 0; n < Config::kValues; ++n) {
        const float third = __saturatef(fmaf(value_at(y, r, n), factor[r] * (1.0f / 3.0f), offset[r] * (1.0f / 3.0f)));
        const float level = (fmaf(third, 3.0f, 12582912.0f) - 12582912.0f) - 1.5f;
        sum += level;
        squares = fmaf(level, level, squares);
        cross = fmaf(value_at(y, r, n) - mean[r], level, cross);
      }
      const float level_mean = quad_sum(sum) * (kLevelStep / kCount);
      const float square = quad_sum(squares) * (kLevelStep * kLevelStep) - level_mean * level_mean * kCount;
      const float total = quad_sum(cross) * kLevelStep;  // of y - mean, whose sum is zero: centring levels is free
      if (square > kSingular) {
        fit[r].scale = at_least(total / square, kMinScale);
        fit[r].mean = fmaf(-fit[r].scale, level_mean, mean[r]);
      }
    }
  }
  nearest_codes<Config>(y, factor, offset, codes);
}

// ---- feedback ----

// Sums of one row for the fit of mean and scale: levels L = code - 1.5, wanted levels u, h = 1 M.
struct FitSums {
  float ones_level = 0, level_level = 0, ones_u = 0, level_u = 0;  // h L, L M L, h u, u M L
};

template <typename Config>
__device__ __forceinline__ void fit_sums(const typename Config::Shared& s, const Pairs<Config>& wanted,
                                         const Operands<Config>& levels, FitSums (&sums)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) {
    float acc[2][4] = {};  // -(L M)_j / (3 M_jj), less the diagonal's part
    multiply_column<Config, Config::kBlocks>(s.metric.fragments, levels, block, acc);
    const float4 d = *reinterpret_cast<const float4*>(s.diagonal + 16 * block + 4 * t);
    const float4 h = *reinterpret_cast<const float4*>(s.row_sum + 16 * block + 4 * t);
    const float diagonal[4] = {d.x, d.y, d.z, d.w}, row_sum[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const __half2 level_pair = half2_of(levels[block][r + c / 2 * 2]);  // channels c - c % 2, c - c % 2 + 1
        const float level = c % 2 == 0 ? __low2float(level_pair) : __high2float(level_pair);
        const float u = (r == 0 ? __low2float(wanted[block][c]) : __high2float(wanted[block][c])) - 1.5f;
        const float metric_level = diagonal[c] * fmaf(-3.0f, acc[c / 2][2 * r + c % 2], level);
        sums[r].ones_level = fmaf(level, row_sum[c], sums[r].ones_level);
        sums[r].ones_u = fmaf(u, row_sum[c], sums[r].ones_u);
        sums[r].level_level = fmaf(level, metric_level, sums[r].level_level);
        sums[r].level_u = fmaf(u, metric_level, sums[r].level_u);
      }
  }
}

template <typename Config>
__device__ __forceinline__ void encode_feedback(const typename Config::Shared& s, const StoreConstants& constants,
                                                const Accumulators<Config>& y, PackedCodes<Config>& codes,
                                                float2 (&parameters)[2]) {
  constexpr int kBlocks = Config::kBlocks;
  Fit fit[2];
  float factor[2], offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    fit[r] = mean_and_deviation<Config>(y, r);
    fit[r].scale = at_least(1.05f * fit[r].scale, kMinScale);
    code_units(fit[r], factor[r], offset[r]);
  }
  Pairs<Config> wanted;
#pragma unroll
  for (int n = 0; n < Config::kValues; ++n)
    wanted[n / 4][n % 4] =
        __floats2half2_rn(fmaf(value_at(y, 0, n), factor[0], offset[0]), fmaf(value_at(y, 1, n), factor[1], offset[1]));
  Operands<Config> operands;
  round_with_feedback<Config>(s.feedback, wanted, operands, codes);

#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    __half2 level[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) level[c] = level_pair(codes.at(4 * block + c));
    pack_operand(level, operands[block]);
  }
  FitSums sums[2];
  fit_sums<Config>(s, wanted, operands, sums);
  float rescale[2], shift[2];  // wanted = wanted rescale + shift
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float ol = quad_sum(sums[r].ones_level), ll = quad_sum(sums[r].level_level);
    const float ou = quad_sum(sums[r].ones_u), lu = quad_sum(sums[r].level_u);
    const float diagonal = constants.total * ll, determinant = diagonal - ol * ol;
    if (determinant > kSingular * diagonal) {  // else (nearly) constant levels: keep the start
      const float alpha = (ll * ou - ol * lu) / determinant, beta = (constants.total * lu - ol * ou) / determinant;
      fit[r].mean = fmaf(fit[r].scale * kLevelStep, alpha, fit[r].mean);
      fit[r].scale = at_least(fit[r].scale * beta, kMinScale);
    }
    parameters[r] = stored_codes(constants, fit[r]);
    const float old_factor = factor[r], old_offset = offset[r];
    code_units(fit[r], factor[r], offset[r]);
    rescale[r] = factor[r] / old_factor;
    shift[r] = fmaf(-old_offset, rescale[r], offset[r]);
  }
  const __half2 rescales = __floats2half2_rn(to_half_range(rescale[0]), to_half_range(rescale[1]));
  const __half2 shifts = __floats2half2_rn(to_half_range(shift[0]), to_half_range(shift[1]));
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    __half2 error[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      wanted[block][c] = __hfma2(wanted[block][c], rescales, shifts);
      error[c] = __hsub2(__hsub2(code_pair(codes.at(4 * block + c)), half2_of(kCodeBase)), wanted[block][c]);
    }
    pack_operand(error, operands[block]);
  }
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) sweep<Config>(s.metric, wanted, operands, codes);
}

}  // namespace oscar::cuda
