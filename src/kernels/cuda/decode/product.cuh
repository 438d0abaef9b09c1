#pragma once
// rows [kRows, head_dim] times one head's [head_dim, head_dim] FP32 matrix, by a whole block: warp w takes the input
// channels w, w + warps, ..., a lane 4 (64: 2) neighbouring output channels of each 128. The matrix comes from L2, 64
// KB at head_dim 128; its loads are started well before the rows are there.

#include "config.hpp"

namespace oscar::cuda {

template <typename Config>
class Product {
  static constexpr int kD = Config::kHeadDim, kR = Config::kRows;
  static constexpr int kVector = kD == 64 ? 2 : 4;
  static constexpr int kVectors = kD / (32 * kVector);
  static constexpr int kTerms = (kD + Config::kNumWarps - 1) / Config::kNumWarps;  // input channels a warp
  static constexpr int kHeld = kD <= 128 ? kTerms : 8;                             // in registers at once

 public:
  // Starts the loads of the first kHeld channels.
  __device__ __forceinline__ void load(const float* matrix) {
    matrix_ = matrix + kVector * (fresh_thread() % 32);
    load_from(0);
  }
  // shared.acc[warp] = this warp's share of shared.columns^T matrix.
  __device__ __forceinline__ void multiply(typename Config::Shared& shared) {
    const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32;
    float sum[kR][kVectors * kVector];
#pragma unroll
    for (int row = 0; row < kR; ++row)
#pragma unroll
      for (int j = 0; j < kVectors * kVector; ++j) sum[row][j] = 0;
#pragma unroll
    for (int first = 0; first < kTerms; first += kHeld) {
      if (first > 0) load_from(first);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int channel = warp + Config::kNumWarps * (first + i);
        if (Config::kNumWarps * (first + i + 1) > kD && channel >= kD) break;
#pragma unroll
        for (int quad = 0; quad < Config::kColumnTiles; ++quad) {
          const float4 x = *reinterpret_cast<const float4*>(&shared.columns[channel][4 * quad]);
#pragma unroll
          for (int j = 0; j < kVectors * kVector; ++j) {
            sum[4 * quad][j] += x.x * held_[i][j];
            sum[4 * quad + 1][j] += x.y * held_[i][j];
            sum[4 * quad + 2][j] += x.z * held_[i][j];
            sum[4 * quad + 3][j] += x.w * held_[i][j];
          }
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kR; ++row)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float* out = &shared.acc[warp][row][32 * kVector * v + kVector * lane];
        if constexpr (kVector == 4)
          *reinterpret_cast<float4*>(out) =
              make_float4(sum[row][4 * v], sum[row][4 * v + 1], sum[row][4 * v + 2], sum[row][4 * v + 3]);
        else
          *reinterpret_cast<float2*>(out) = make_float2(sum[row][0], sum[row][1]);
      }
  }

 private:
  __device__ __forceinline__ void load_from(int first) {
    const int warp = fresh_thread() / 32;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      // no condition: registers that may keep their value would live through the whole kernel
      const int channel = min(warp + Config::kNumWarps * (first + i), kD - 1);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* from = matrix_ + channel * kD + 32 * kVector * v;
        if constexpr (kVector == 4) {
          const float4 x = __ldg(reinterpret_cast<const float4*>(from));
          held_[i][4 * v] = x.x, held_[i][4 * v + 1] = x.y, held_[i][4 * v + 2] = x.z, held_[i][4 * v + 3] = x.w;
        } else {
          const float2 x = __ldg(reinterpret_cast<const float2*>(from));
          held_[i][0] = x.x, held_[i][1] = x.y;
        }
      }
    }
  }

  float held_[kHeld][kVectors * kVector];
  const float* matrix_;
};

// Four neighbouring channels of a row: the sum over the warps' shares of a product.
template <typename Config>
__device__ __forceinline__ float4 sum_shares(const typename Config::Shared& shared, int row, int channel) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int w = 0; w < Config::kNumWarps; ++w) {
    const float4 x = *reinterpret_cast<const float4*>(&shared.acc[w][row][channel]);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  return sum;
}

}  // namespace oscar::cuda
