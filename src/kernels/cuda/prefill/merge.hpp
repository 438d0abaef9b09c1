#pragma once
// What a merge launch reads and writes.

#include <cstdint>

struct __nv_bfloat16;

namespace oscar::cuda {

struct MergeParams {
  int num_tokens, num_heads, head_dim;  // head_dim a multiple of 8
  __nv_bfloat16* out;                   // row of token i, head h: out + i out_token_stride + h out_head_stride
  float* lse;                           // [num_tokens, num_heads] natural log
  std::int64_t out_token_stride, out_head_stride;
  const __nv_bfloat16* other;
  const float* other_lse;  // of token i, head h: other_lse + i other_lse_token_stride + h other_lse_head_stride
  std::int64_t other_token_stride, other_head_stride, other_lse_token_stride, other_lse_head_stride;
};

}  // namespace oscar::cuda
