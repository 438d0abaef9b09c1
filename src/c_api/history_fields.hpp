#pragma once
// The fields that decode and prefill share: queries, INT2 pages, 16-bit rows, value and key offsets, output.

#include "kernels/cuda/decode/params.hpp"

namespace oscar::c_api {

template <typename Params, typename CParams>
void copy_history_fields(const CParams& from, Params& to) {
  to.sliding_window = from.sliding_window;
  to.scale = from.scale;
  to.soft_cap = from.soft_cap;
  to.q = static_cast<const __nv_bfloat16*>(from.q);
  to.q_token_stride = from.q_token_stride;
  to.q_head_stride = from.q_head_stride;
  to.pages = from.pages;
  to.block_table = from.block_table;
  to.block_table_stride = from.block_table_stride;
  to.page_stride_bytes = from.page_stride_bytes;
  to.head_stride_bytes = from.head_stride_bytes;
  to.window_k = static_cast<const __nv_bfloat16*>(from.window_k);
  to.window_v = static_cast<const __nv_bfloat16*>(from.window_v);
  to.window_table = from.window_table;
  to.window_table_stride = from.window_table_stride;
  to.window_block_stride = from.window_block_stride;
  to.window_token_stride = from.window_token_stride;
  to.window_head_stride = from.window_head_stride;
  to.window_block = from.window_block;
  to.key_offset = reinterpret_cast<const cuda::OffsetScale*>(from.key_offset);
  to.value_offset = reinterpret_cast<const cuda::OffsetScale*>(from.value_offset);
  to.out = static_cast<__nv_bfloat16*>(from.out);
  to.out_token_stride = from.out_token_stride;
  to.out_head_stride = from.out_head_stride;
  to.lse = from.lse;
  to.workspace = from.workspace;
}

}  // namespace oscar::c_api
