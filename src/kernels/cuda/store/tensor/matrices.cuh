#pragma once
// Matrices of one head as tensor-core operands in shared memory, in the order that lanes read them: 16 bytes a lane are
// both halves (depth) of two column tiles, so that no load conflicts and none needs ldmatrix.
//
// Lane (g, t) = (lane / 4, lane % 4). Columns are taken so that a lane's accumulators of two tiles are channels
// 16 J + 4 t + {0..3} of rows g and g + 8: four neighbours of a key word, and in order over t for the feedback.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "config.hpp"

namespace oscar::cuda {

__device__ __forceinline__ std::uint32_t bits_of(__half2 pair) { return *reinterpret_cast<std::uint32_t*>(&pair); }
__device__ __forceinline__ __half2 half2_of(std::uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ std::uint32_t bits_of(__nv_bfloat162 pair) {
  return *reinterpret_cast<std::uint32_t*>(&pair);
}

// Channel of the first of the four depths that lane t holds in step `step`: {0, 1} of the low half, {2, 3} of the high.
// Rows come from memory in 16-byte pieces of 8 channels, which serve two steps.
__device__ __forceinline__ int transform_channel(int step, int t) { return 32 * (step / 2) + 8 * t + 4 * (step % 2); }
__device__ __forceinline__ int block_channel(int step, int t) { return 16 * step + 4 * t; }

// Calls put(index, b) for every 16 bytes of the matrix: b[k][c] = elements of depth k (0..3) and column c (0, 1 of one
// tile, 2, 3 of the next), already scaled. Threads of a warp cover 4 depths x 4 column quads x 2 blocks.
template <typename Config, typename Channel, typename Put>
__device__ __forceinline__ void for_each_operand(const float* __restrict__ g_matrix, Channel channel, Put put) {
  constexpr int kD = Config::kHeadDim, kBlocks = Config::kBlocks;
#pragma unroll
  for (int k = threadIdx.x; k < kBlocks * kBlocks * 16; k += Config::kNumThreads) {
    const int t = k % 4, quad = k / 4 % 4, block = k / 16 % kBlocks, step = k / (16 * kBlocks);
    const int row = channel(step, t), column = 16 * block + 4 * quad;
    float4 element[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) element[i] = __ldg(reinterpret_cast<const float4*>(g_matrix + (row + i) * kD + column));
    const int index = (step * kBlocks + block) * 32 + 8 * quad + t;  // lane (2 quad, t), then (2 quad + 1, t)
    const float4 a = element[0], b = element[1], c = element[2], d = element[3];
    put(index, row, column, make_float4(a.x, b.x, c.x, d.x), make_float4(a.z, b.z, c.z, d.z));
    put(index + 4, row, column + 1, make_float4(a.y, b.y, c.y, d.y), make_float4(a.w, b.w, c.w, d.w));
  }
}

template <typename Config>
__device__ __forceinline__ void load_transform(const float* g_matrix, uint4* s_high, uint4* s_low) {
  for_each_operand<Config>(g_matrix, transform_channel, [&](int index, int, int, float4 first, float4 second) {
    const float2 pairs[4] = {{first.x, first.y}, {first.z, first.w}, {second.x, second.y}, {second.z, second.w}};
    std::uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 rounded = __floats2bfloat162_rn(pairs[i].x, pairs[i].y);
      high[i] = bits_of(rounded);
      low[i] = bits_of(__floats2bfloat162_rn(pairs[i].x - __low2float(rounded), pairs[i].y - __high2float(rounded)));
    }
    s_high[index] = make_uint4(high[0], high[1], high[2], high[3]);
    if (Config::kSplit) s_low[index] = make_uint4(low[0], low[1], low[2], low[3]);
  });
}

__device__ __forceinline__ float to_half_range(float value) { return fminf(fmaxf(value, -65504.0f), 65504.0f); }

// -W / 3, or -W_ij scale_j / 3 without the diagonal when scales are given.
template <typename Config>
__device__ __forceinline__ void load_descent(const float* g_matrix, const float* g_column_scale,
                                             typename Config::DescentMatrix& s) {
  constexpr int kD = Config::kHeadDim;
  const auto element = [&](float value, int row, int column) {
    const float third = value * (-1.0f / 3.0f);
    if (g_column_scale == nullptr) return to_half_range(third);
    return row == column ? 0.0f : to_half_range(third * __ldg(g_column_scale + column));
  };
  for_each_operand<Config>(g_matrix, block_channel, [&](int index, int row, int column, float4 first, float4 second) {
    const auto pair = [&](float a, float b, int i, int c) {
      return bits_of(__floats2half2_rn(element(a, row + i, column + c), element(b, row + i + 1, column + c)));
    };
    s.fragments[index] = make_uint4(pair(first.x, first.y, 0, 0), pair(first.z, first.w, 2, 0),
                                    pair(second.x, second.y, 0, 2), pair(second.z, second.w, 2, 2));
  });
  // Inside a block of 16: 12 pieces [turn k = 0..2][lane t] of W[4k + a][4t + c], zero unless t > k, then 4 pieces
  // [lane t] of W[4t + a][4t + c], zero unless c > a. A piece is 4 x 4 float16.
  auto* s_upper = reinterpret_cast<__half*>(s.upper);
  for (int k = threadIdx.x; k < Config::kBlocks * 256; k += Config::kNumThreads) {
    const int c = k % 4, a = k / 4 % 4, piece = k / 16 % 16, block = k / 256, t = piece % 4;
    const int turn = piece < 12 ? piece / 4 : t;
    const int row = 16 * block + 4 * turn + a, column = 16 * block + 4 * t + c;
    const bool used = piece < 12 ? t > turn : c > a;
    s_upper[k] = __float2half_rn(used ? element(__ldg(g_matrix + row * kD + column), row, column) : 0.0f);
  }
}

}  // namespace oscar::cuda
