#pragma once
// Merges two attention results over disjoint keys by their log-sum-exp, into the first.

#include <cuda_bf16.h>

#include "merge.hpp"

namespace oscar::cuda {

// One thread merges 8 channels of a row.
static __global__ void merge_kernel(const __grid_constant__ MergeParams p) {
  const int pieces = p.head_dim / 8;
  const std::int64_t k = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t row = k / pieces;
  const bool present = row < static_cast<std::int64_t>(p.num_tokens) * p.num_heads;
  const int token = present ? static_cast<int>(row / p.num_heads) : 0,
            head = present ? static_cast<int>(row % p.num_heads) : 0;
  const int channel = static_cast<int>(k % pieces) * 8;
  const float a = present ? p.lse[row] : 0.0f;
  const float b = present ? p.other_lse[token * p.other_lse_token_stride + head * p.other_lse_head_stride] : 0.0f;
  __syncthreads();  // a row's threads lie in one block (pieces divides its size): all have read before one writes
  if (!present) return;
  const float top = fmaxf(a, b), reference = top == -INFINITY ? 0.0f : top;
  const float x = __expf(a - reference), y = __expf(b - reference), sum = x + y;
  const float f = sum > 0 ? x / sum : 0.0f, g = sum > 0 ? y / sum : 0.0f;
  auto* to = reinterpret_cast<uint4*>(p.out + token * p.out_token_stride + head * p.out_head_stride + channel);
  uint4 first = *to;
  const uint4 second =
      *reinterpret_cast<const uint4*>(p.other + token * p.other_token_stride + head * p.other_head_stride + channel);
  auto* u = reinterpret_cast<__nv_bfloat162*>(&first);
  const auto* v = reinterpret_cast<const __nv_bfloat162*>(&second);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 s = __bfloat1622float2(u[i]), t = __bfloat1622float2(v[i]);
    // a part of weight zero may hold anything
    u[i] = __floats2bfloat162_rn((f > 0 ? s.x * f : 0.0f) + (g > 0 ? t.x * g : 0.0f),
                                 (f > 0 ? s.y * f : 0.0f) + (g > 0 ? t.y * g : 0.0f));
  }
  *to = first;
  if (channel == 0) p.lse[row] = sum > 0 ? reference + logf(sum) : -INFINITY;
}

}  // namespace oscar::cuda
