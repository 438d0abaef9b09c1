#pragma once
// What a prefill launch reads and writes: attention of a chunk of queries over the INT2 history and the 16-bit window
// rows before it. The chunk's own keys are the caller's part (any BF16 attention), merged by LSE. Plain data, passed by
// value to every kernel of the launch.

#include "../decode/params.hpp"

namespace oscar::cuda {

struct PrefillParams {
  int num_requests, num_tokens;  // query tokens of all requests
  int num_qo_heads, num_kv_heads;
  int sink, recent;    // window rule: key j is read exactly when j < sink or j > i - recent
  int sliding_window;  // tokens, 0 = none: key j is seen when j > i - sliding_window
  float scale;         // of q . k
  float soft_cap;      // 0 = none

  // Request b has query tokens query_start[b] .. query_start[b + 1) of the batch; the first one's position is
  // history_lens[b], and keys 0 .. history_lens[b] - 1 are attended.
  const std::int32_t* query_start;   // [num_requests + 1]
  const std::int32_t* history_lens;  // [num_requests]

  const __nv_bfloat16* q;                      // row of token i, head h: q + i q_token_stride + h q_head_stride
  std::int64_t q_token_stride, q_head_stride;  // elements

  // as DecodeParams
  const std::uint8_t* pages;
  const std::int32_t* block_table;  // [num_requests, block_table_stride]
  std::int64_t block_table_stride, page_stride_bytes, head_stride_bytes;
  const __nv_bfloat16 *window_k, *window_v;
  const std::int32_t* window_table;  // [num_requests, window_table_stride]
  std::int64_t window_table_stride, window_block_stride, window_token_stride, window_head_stride;  // elements
  int window_block;                                                                                // tokens

  // Rotation of this layer, each [num_kv_heads, head_dim, head_dim] float32
  const float* key_matrix;          // A_k^{-T}: q' = q A_k^{-T}
  const float* key_transform;       // A_k, of window rows and page means
  const float* value_transform;     // A_v
  const float* value_matrix;        // A_v^{-1}: x = y A_v^{-1}
  const float* block_means;         // [num_blocks, num_kv_heads, head_dim] mean key of page p, or null: none
  int num_blocks;                   // later pages take the last one
  const OffsetScale* key_offset;    // [num_kv_heads]
  const OffsetScale* value_offset;  // [num_kv_heads]

  __nv_bfloat16* out;  // row of token i, head h: out + i out_token_stride + h out_head_stride
  std::int64_t out_token_stride, out_head_stride;
  float* lse;  // [num_tokens, num_qo_heads] natural log; -inf and a zero row where a query sees no key

  void* workspace;  // plan.workspace_bytes, 1024-byte aligned, any content
};

inline constexpr int kPrefillRows = 128;  // query rows (token, head of the group) of a thread block

// How a launch is cut, on the host, from upper bounds.
struct PrefillPlan {
  int row_tiles;                             // of kPrefillRows, of one KV head
  int tile_keys;                             // keys of one step of the main loop
  int sink_tiles, recent_tiles;              // window tiles of a request
  int mean_groups;                           // images of page means of a head
  std::int64_t means_offset, window_offset;  // bytes into the workspace; rotated queries are first
  std::int64_t window_tile_bytes;            // image of one tile, layout.hpp
  std::int64_t workspace_bytes;
};

}  // namespace oscar::cuda
