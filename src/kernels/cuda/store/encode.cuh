#pragma once
// The three encoders on a warp's eight rows, in the layout of StoreConfig: lane 4k + t, channels 8n + k, rows 2t + r.
// Every operation and its order is docs/format.md, "Encoder arithmetic": the codes are the CPU's, bit for bit.

#include "multiply.cuh"

namespace oscar::cuda {

// Where a lane's element (r, n) lies in a buffer of eight rows.
template <typename Config>
struct LaneView {
  float* s_first;
  __device__ explicit LaneView(float* s_rows)
      : s_first(s_rows + threadIdx.x % 4 * 2 * Config::kRowStride + threadIdx.x % 32 / 4) {}
  __device__ __forceinline__ float& operator()(int r, int n) const { return s_first[r * Config::kRowStride + 8 * n]; }
};

struct EncodedRows {
  float2 parameters[2];  // scale and zero, or the two codes
};

// ---- min and max ----

// The |y| of rank min(trunc(ratio D), D - 1): bisection on the bit patterns, which order like the magnitudes, until one
// element is left between the bounds. Starts two octaves below the largest: the usual rank lies there.
template <int kChannels>
__device__ __forceinline__ float clip_threshold(const float (&y)[kChannels], float ratio) {
  constexpr int kD = 8 * kChannels;
  if (!(ratio > 0.0f)) return INFINITY;
  const int rank = min(static_cast<int>(mul(ratio, static_cast<float>(kD))), kD - 1);
  const int above = kD - 1 - rank;  // elements that may be larger
  const auto magnitude = [&](int n) { return static_cast<int>(__float_as_uint(y[n]) & 0x7fffffffu); };
  const auto larger = [](int a, int b) { return max(a, b); };
  int high = 0;
#pragma unroll
  for (int n = 0; n < kChannels; ++n) high = max(high, magnitude(n));
  high = over_row(high, larger);
  int low = -1, above_low = kD, above_high = 0;  // elements > low are more than `above`, > high are not
  int pivot = max(high - (2 << 23), low + (high - low) / 2);
  bool open = above_high != above && above_low != above + 1 && high - low > 1;
  while (__any_sync(~0u, open)) {
    int count = 0;
#pragma unroll
    for (int n = 0; n < kChannels; ++n) count += magnitude(n) > pivot ? 1 : 0;
    count = over_row(count, [](int a, int b) { return a + b; });
    if (open) {
      if (count > above) {
        low = pivot;
        above_low = count;
      } else {
        high = pivot;
        above_high = count;
      }
    }
    open = above_high != above && above_low != above + 1 && high - low > 1;
    pivot = low + (high - low) / 2;
  }
  const bool from_high = above_high == above || high - low <= 1;  // else the smallest above low
  int best = from_high ? 0 : 0x7fffffff;
#pragma unroll
  for (int n = 0; n < kChannels; ++n) {
    const int value = magnitude(n);
    if (from_high && value <= high) best = max(best, value);
    if (!from_high && value > low) best = min(best, value);
  }
  // both, since rows of a warp may differ in which they need and a shuffle takes every lane
  const int largest = over_row(best, larger);
  const int smallest = over_row(best, [](int a, int b) { return min(a, b); });
  return __uint_as_float(static_cast<std::uint32_t>(from_high ? largest : smallest));
}

template <typename Config>
__device__ __forceinline__ float2 encode_min_max(float (&y)[Config::kChannels], const StoreConstants& constants) {
  constexpr int kN = Config::kChannels;
  const float clip = clip_threshold(y, constants.clip_ratio);
  float low = INFINITY, high = -INFINITY;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    y[n] = fminf(fmaxf(y[n], -clip), clip);
    low = fminf(low, y[n]);
    high = fmaxf(high, y[n]);
  }
  low = over_row(low, [](float a, float b) { return fminf(a, b); });
  high = over_row(high, [](float a, float b) { return fmaxf(a, b); });
  const float scale = divide(at_least(sub(high, low), kMinScale), 3.0f);
  const float zero = sub(0.0f, divide(low, scale));
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float code = add(add(divide(y[n], scale), zero), 0.5f);
    y[n] = truncf(fminf(fmaxf(code, 0.0f), 3.0f));
  }
  return make_float2(scale, zero);
}

// ---- mean and deviation ----

template <int kChannels>
__device__ __forceinline__ Fit mean_and_deviation(const float (&y)[kChannels]) {
  constexpr float kCount = 8 * kChannels;
  const float mean = divide(interleaved_sum<kChannels>([&](int n) { return y[n]; }), kCount);
  const float squares = interleaved_sum<kChannels>([&](int n) {
    const float centered = sub(y[n], mean);
    return mul(centered, centered);
  });
  return {mean, __fsqrt_rn(divide(squares, kCount))};
}

__device__ __forceinline__ float normalize(float y, Fit fit) { return divide(sub(y, fit.mean), fit.scale); }

// ---- least squares ----

template <typename Config>
__device__ __forceinline__ float2 encode_least_squares(float (&y)[Config::kChannels], const StoreConstants& constants) {
  constexpr int kN = Config::kChannels;
  constexpr float kCount = Config::kHeadDim;
  Fit fit = mean_and_deviation(y);
  fit.scale = at_least(fit.scale, kMinScale);
  const float mean = fit.mean;
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    float level[kN];
#pragma unroll
    for (int n = 0; n < kN; ++n) level[n] = nearest_level(normalize(y[n], fit));
    const float level_mean = divide(interleaved_sum<kN>([&](int n) { return level[n]; }), kCount);
#pragma unroll
    for (int n = 0; n < kN; ++n) level[n] = sub(level[n], level_mean);
    const float square = interleaved_sum<kN>([&](int n) { return mul(level[n], level[n]); });
    const float cross = interleaved_sum<kN>([&](int n) { return mul(sub(y[n], mean), level[n]); });
    if (square > kSingular) {  // else one code for the whole row: any scale fits
      fit.scale = at_least(divide(cross, square), kMinScale);
      fit.mean = sub(mean, mul(fit.scale, level_mean));
    }
  }
  const Log8 stored = store_fit(constants.center, constants.spread, fit);
#pragma unroll
  for (int n = 0; n < kN; ++n) y[n] = static_cast<float>(nearest_code(normalize(y[n], fit)));
  return make_float2(static_cast<float>(stored.scale_code), static_cast<float>(stored.offset_code));
}

// ---- feedback ----

// level_i is the nearest one to u_i - T_0i e_0 - T_1i e_1 ... in this order, e_i = level_i - u_i. A channel's owner
// decides and its error moves all later channels of the row; `w` ends as the levels.
template <typename Config>
__device__ __forceinline__ void round_with_feedback(const float* __restrict__ g_feedback,
                                                    const float (&u)[2][Config::kChannels],
                                                    float (&w)[2][Config::kChannels]) {
  constexpr int kN = Config::kChannels;
  const int own = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
  const float* g_row = g_feedback + own;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll 1
    for (int k = 0; k < 8; ++k, g_row += Config::kHeadDim) {
      float error[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float level = nearest_level(w[r][n]);
        error[r] = __shfl_sync(~0u, sub(level, u[r][n]), 4 * k + pair);
        if (own == k) w[r][n] = level;
      }
      const float here = __ldg(g_row + 8 * n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (own > k) w[r][n] = sub(w[r][n], mul(here, error[r]));
      }
#pragma unroll
      for (int m = n + 1; m < kN; ++m) {
        const float later = __ldg(g_row + 8 * m);
#pragma unroll
        for (int r = 0; r < 2; ++r) w[r][m] = sub(w[r][m], mul(later, error[r]));
      }
    }
  }
}

// One pass of coordinate descent over the warp's eight rows: channels in ascending order; those that no row changes are
// passed over eight at a time.
template <typename Config, int kRows>
__device__ __forceinline__ void sweep(const float* __restrict__ g_metric, const float* __restrict__ g_inverse,
                                      float (&gradient)[2][Config::kChannels], float (&level)[2][Config::kChannels]) {
  constexpr int kN = Config::kChannels;
  const int own = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
  const bool present = 2 * pair < kRows;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float inverse = __ldg(g_inverse + 8 * n + own);
    int first_open = 0;
#pragma unroll 1
    while (true) {
      float change[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        change[r] = sub(nearest_level(sub(level[r][n], mul(gradient[r][n], inverse))), level[r][n]);
      const unsigned changed =
          __ballot_sync(~0u, present && own >= first_open && (change[0] != 0.0f || change[1] != 0.0f));
      if (changed == 0) break;
      const int k = (__ffs(static_cast<int>(changed)) - 1) / 4;
      const float* g_row = g_metric + (8 * n + k) * Config::kHeadDim + own;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // the level itself, not the sum: new - old need not add up to new
        if (own == k) level[r][n] = nearest_level(sub(level[r][n], mul(gradient[r][n], inverse)));
        change[r] = __shfl_sync(~0u, change[r], 4 * k + pair);
      }
#pragma unroll
      for (int m = 0; m < kN; ++m) {
        const float metric = __ldg(g_row + 8 * m);
#pragma unroll
        for (int r = 0; r < 2; ++r) gradient[r][m] = add(gradient[r][m], mul(metric, change[r]));
      }
      first_open = k + 1;
    }
  }
}

// s_y holds the rows and keeps them, s_work is free. The codes end in s_work, as whole numbers.
template <typename Config, int kRows>
__device__ __forceinline__ void encode_feedback(const StoreSide& side, int head, float* s_y, float* s_work,
                                                float2 (&parameters)[2]) {
  constexpr int kN = Config::kChannels, kD = Config::kHeadDim;
  const StoreConstants constants = side.constants[head];
  const std::int64_t matrix = static_cast<std::int64_t>(head) * kD * kD;
  const int own = threadIdx.x % 32 / 4;
  const LaneView<Config> y(s_y), work(s_work);
  Fit fit[2];
  float level[2][kN];
  {
    float u[2][kN];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < kN; ++n) u[r][n] = y(r, n);
      fit[r] = mean_and_deviation(u[r]);
      fit[r].scale = at_least(mul(1.05f, fit[r].scale), kMinScale);
#pragma unroll
      for (int n = 0; n < kN; ++n) level[r][n] = u[r][n] = normalize(u[r][n], fit[r]);
    }
    round_with_feedback<Config>(side.feedback + matrix, u, level);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kN; ++n) work(r, n) = level[r][n];
    __syncwarp();
    multiply_rows<Config, kRows>(side.metric + matrix, s_work);
    const float* g_row_sum = side.row_sum + head * kD + own;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float ones_level = interleaved_sum<kN>([&](int n) { return mul(level[r][n], __ldg(g_row_sum + 8 * n)); });
      const float level_level = interleaved_sum<kN>([&](int n) { return mul(level[r][n], work(r, n)); });
      const float ones_u = interleaved_sum<kN>([&](int n) { return mul(u[r][n], __ldg(g_row_sum + 8 * n)); });
      const float level_u = interleaved_sum<kN>([&](int n) { return mul(u[r][n], work(r, n)); });
      const float diagonal = mul(constants.total, level_level);
      const float determinant = sub(diagonal, mul(ones_level, ones_level));
      if (determinant > mul(kSingular, diagonal)) {  // else (nearly) constant levels: keep the start
        const float alpha = divide(sub(mul(level_level, ones_u), mul(ones_level, level_u)), determinant);
        const float beta = divide(sub(mul(constants.total, level_u), mul(ones_level, ones_u)), determinant);
        fit[r].mean = add(fit[r].mean, mul(fit[r].scale, alpha));
        fit[r].scale = at_least(mul(fit[r].scale, beta), kMinScale);
      }
      const Log8 stored = store_fit(constants.center, constants.spread, fit[r]);
      parameters[r] = make_float2(static_cast<float>(stored.scale_code), static_cast<float>(stored.offset_code));
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < kN; ++n) work(r, n) = sub(level[r][n], normalize(y(r, n), fit[r]));
  __syncwarp();
  multiply_rows<Config, kRows>(side.metric + matrix, s_work);
  float gradient[2][kN];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < kN; ++n) gradient[r][n] = work(r, n);
#pragma unroll 1
  for (int i = 0; i < 2; ++i)
    sweep<Config, kRows>(side.metric + matrix, side.inverse_diagonal + head * kD, gradient, level);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < kN; ++n) work(r, n) = static_cast<float>(nearest_code(level[r][n]));
}

}  // namespace oscar::cuda
