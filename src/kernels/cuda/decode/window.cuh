#pragma once
// Eight 16-bit tokens of the window against up to 8 query rows, by one warp: BF16 tensor cores, raw queries and rows.
//
// Lane (g, t): scores are [token g] x [query rows 2t, 2t + 1]; values are [channels 16 i + g, + 8] x [the same rows].

#include "config.hpp"
#include "history.cuh"

namespace oscar::cuda {

template <typename Config>
struct WindowState {
  float acc[Config::kHeadDim / 16][4];  // channels g, g + 8 of rows 2t, 2t + 1
  float max[2], sum[2];                 // of rows 2t, 2t + 1; sum is this lane's share
  __device__ __forceinline__ void clear() {
    max[0] = max[1] = kNoMaximum;
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 16; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0;
  }
};

// B operands of the query rows (BF16, unscaled); rows past the group are zero.
template <typename Config>
struct WindowQuery {
  std::uint32_t fragment[Config::kHeadDim / 16][2];
  int position[2];  // of rows 2t, 2t + 1
  __device__ __forceinline__ void load(const typename Config::RowData& data, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < Config::kHeadDim / 16; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        fragment[c][i] =
            g < Config::kRows ? *reinterpret_cast<const std::uint32_t*>(&data.query[g][16 * c + 8 * i + 2 * t]) : 0;
  }
};

template <typename Config>
__device__ __forceinline__ void window_item(const std::uint8_t* item, const DecodeParams& p,
                                            const WindowQuery<Config>& query, int lane, int first_token, int length,
                                            WindowState<Config>& state) {
  constexpr int kD = Config::kHeadDim;
  const std::uint32_t row = shared_address(item) + (lane % 8) * Config::kWindowRowBytes + 16 * (lane / 8);
  float score[4] = {0, 0, 0, 0};
#pragma unroll
  for (int c = 0; c < kD / 32; ++c) {  // 32 channels a load: matrices of 8 tokens x 8 channels
    std::uint32_t k[4];
    load_matrix_x4(k, row + 64 * c);
    mma_bf16_k16(score, k[0], 0u, k[1], 0u, query.fragment[2 * c][0], query.fragment[2 * c][1]);
    mma_bf16_k16(score, k[2], 0u, k[3], 0u, query.fragment[2 * c + 1][0], query.fragment[2 * c + 1][1]);
  }
  const int token = first_token + lane / 4;
  float x[2], item_max[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int position = query.position[i];
    float logit = score[i] * p.scale;
    if (p.soft_cap > 0) logit = p.soft_cap * tanh_fast(__fdividef(logit, p.soft_cap));
    const bool exact = token < p.sink || token > position - p.recent;
    const bool seen =
        token <= position && token < length && (p.sliding_window <= 0 || token > position - p.sliding_window);
    x[i] = exact && seen ? logit * kLog2E : -INFINITY;
    item_max[i] = x[i];
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) item_max[i] = fmaxf(item_max[i], __shfl_xor_sync(~0u, item_max[i], step));
  if (__any_sync(~0u, item_max[0] > state.max[0] || item_max[1] > state.max[1])) {
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = fmaxf(state.max[i], item_max[i]);
      factor[i] = exp2_fast(state.max[i] - top);
      state.max[i] = top;
      state.sum[i] *= factor[i];
    }
#pragma unroll
    for (int i = 0; i < kD / 16; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) state.acc[i][k] *= factor[k % 2];
  }
  const __nv_bfloat162 weights = __floats2bfloat162_rn(exp2_fast(x[0] - state.max[0]), exp2_fast(x[1] - state.max[1]));
  state.sum[0] += __low2float(weights);
  state.sum[1] += __high2float(weights);
  const std::uint32_t b = transpose_8x8(*reinterpret_cast<const std::uint32_t*>(&weights));
#pragma unroll
  for (int c = 0; c < kD / 32; ++c) {
    std::uint32_t v[4];
    load_matrix_x4_transposed(v, row + kWindowTokens * Config::kWindowRowBytes + 64 * c);
    mma_bf16_k8(state.acc[2 * c], v[0], v[1], b);
    mma_bf16_k8(state.acc[2 * c + 1], v[2], v[3], b);
  }
}

}  // namespace oscar::cuda
