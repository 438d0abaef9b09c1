#pragma once
// Eight rows times a matrix, in place in shared memory: y_j = sum over i of x_i B_ij in ascending i, every product
// rounded before it is added. A lane owns 4 columns (8 at head_dim 256) of all rows; the matrix streams through L1,
// where a row of it serves 8 rows: 64 products a lane for 3 to 4 loads.

#include "arithmetic.cuh"
#include "config.hpp"

namespace oscar::cuda {

// kRows: rows that the warp has, 8 or 2; the others are left alone.
template <typename Config, int kRows>
__device__ void multiply_rows(const float* __restrict__ g_matrix, float* s_rows) {
  constexpr int kD = Config::kHeadDim, kStride = Config::kRowStride;
  constexpr int kColumnLanes = kD >= 128 ? 32 : kD / 4, kParts = 32 / kColumnLanes;  // head_dim 64: two halves of rows
  constexpr int kVectors = kD / (4 * kColumnLanes), kLaneRows = kRows / kParts;
  const int lane = threadIdx.x % 32, column = lane % kColumnLanes * 4, first_row = lane / kColumnLanes * kLaneRows;
  float* s_own = s_rows + first_row * kStride;
  float sum[kLaneRows][4 * kVectors];
#pragma unroll
  for (int row = 0; row < kLaneRows; ++row)
#pragma unroll
    for (int c = 0; c < 4 * kVectors; ++c) sum[row][c] = 0.0f;
#pragma unroll(kRows == 8 ? 1 : 4)
  for (int i = 0; i < kD; i += 4) {
    float4 x[kLaneRows];
#pragma unroll
    for (int row = 0; row < kLaneRows; ++row) x[row] = *reinterpret_cast<const float4*>(s_own + row * kStride + i);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 b = __ldg(reinterpret_cast<const float4*>(g_matrix + (i + k) * kD + column + 128 * v));
#pragma unroll
        for (int row = 0; row < kLaneRows; ++row) {
          const float value = k == 0 ? x[row].x : k == 1 ? x[row].y : k == 2 ? x[row].z : x[row].w;
          sum[row][4 * v] = add(sum[row][4 * v], mul(value, b.x));
          sum[row][4 * v + 1] = add(sum[row][4 * v + 1], mul(value, b.y));
          sum[row][4 * v + 2] = add(sum[row][4 * v + 2], mul(value, b.z));
          sum[row][4 * v + 3] = add(sum[row][4 * v + 3], mul(value, b.w));
        }
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int row = 0; row < kLaneRows; ++row)
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      *reinterpret_cast<float4*>(s_own + row * kStride + column + 128 * v) =
          make_float4(sum[row][4 * v], sum[row][4 * v + 1], sum[row][4 * v + 2], sum[row][4 * v + 3]);
  __syncwarp();
}

}  // namespace oscar::cuda
