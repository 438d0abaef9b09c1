#pragma once
// What a decode launch reads and writes. Plain data, passed by value to every kernel of the launch.

#include <cstddef>
#include <cstdint>

struct __nv_bfloat16;
struct float2;

namespace oscar::cuda {

inline constexpr int kPageTokens = 64;    // tokens of an INT2 page
inline constexpr int kWindowTokens = 8;   // tokens of one work item of the 16-bit window
inline constexpr int kMaxWarps = 16;      // of a block
inline constexpr int kMaxRowsAtOnce = 6;  // of rows_at_once()

// One side's 8-bit offset: offset = center + code * step, step = spread / 20.
struct OffsetScale {
  float center, step;
};

struct DecodeParams {
  int num_requests;
  int query_length;  // query tokens a request, 1 to 8: the last ones of its sequence
  int num_qo_heads, num_kv_heads;
  int sink, recent;    // window rule: key j is read exactly when j < sink or j > i - recent
  int sliding_window;  // tokens, 0 = none
  int rotary_dim;
  float scale;     // of q . k
  float soft_cap;  // 0 = none

  const std::int32_t* seq_lens;  // [num_requests] tokens in the cache, the query tokens included; read by schedule()
  void* schedule;  // plan.schedule_bytes, written by schedule() once a step, read by every layer's decode()

  const __nv_bfloat16*
      q;  // row of query token i of request b, head h: q + (b query_length + i) q_token_stride + h q_head_stride
  std::int64_t q_token_stride, q_head_stride;  // elements

  // INT2 pages: page p of request b, KV head h at pages + block_table[b, p] page_stride_bytes + h head_stride_bytes:
  // key half, then value half
  const std::uint8_t* pages;
  const std::int32_t* block_table;  // [num_requests, block_table_stride]
  std::int64_t block_table_stride, page_stride_bytes, head_stride_bytes;

  // BF16 rows: token j of request b, KV head h at window_k + window_table[b, j / window_block] window_block_stride +
  // (j % window_block) window_token_stride + h window_head_stride. Only tokens of the window are read.
  const __nv_bfloat16 *window_k, *window_v;
  const std::int32_t* window_table;  // [num_requests, window_table_stride]
  std::int64_t window_table_stride, window_block_stride, window_token_stride, window_head_stride;  // elements
  int window_block;  // tokens, a multiple of 8

  // rotation of this layer
  const std::uint8_t* key_matrix;  // [num_kv_heads, matrix_bytes] A_k^{-T}: q' = q A_k^{-T}; fill_matrices() writes it
  const std::uint8_t* value_matrix;  // [num_kv_heads, matrix_bytes] A_v^{-1}: x = y A_v^{-1}
  const float* page_mean;            // [num_kv_heads, head_dim] mu0
  const OffsetScale* key_offset;     // [num_kv_heads]
  const OffsetScale* value_offset;   // [num_kv_heads]
  // The angles inv_freq * 64 page of each channel pair, (cos, sin) and (1, 0) for pairs that do not turn: pages 0..15
  // as MMA operands, FP16 high and low parts [2, head_dim / 16, 32 lanes, 4 words], then [ceil(max_pages / 16),
  // head_dim / 2] of pages 0, 16, 32, ... in FP32. fill_page_angles() writes it.
  const float2* page_angles;

  __nv_bfloat16* out;  // strides as q's
  std::int64_t out_token_stride, out_head_stride;
  float* lse;  // [num_requests, query_length, num_qo_heads] natural log, or null

  void* workspace;  // plan.workspace_bytes, 256-byte aligned, zero before the first launch; a launch leaves it zero

  bool dependent;  // the kernel may start before the stream's preceding one has finished (history is in place by then)
};

// Divides by a number that the host knows, x divisor < 2^32: a multiplication on the device.
struct Divisor {
  std::uint32_t divisor, magic;  // ceil(2^32 / divisor), 0 for 1
};

// How a launch is cut: chosen once a shape, on the host, without looking at lengths.
struct DecodePlan {
  int num_blocks;                                // persistent thread blocks
  int num_warps;                                 // a block
  int column_tiles;                              // of 4 query rows each
  int row_groups;                                // query rows of a KV head / (4 column_tiles), rounded up
  Divisor by_requests, by_row_groups, by_ratio;  // of num_requests, row_groups, query heads a KV head
  int max_rows;                                  // that a block streams together
  std::size_t workspace_bytes;                   // a part a block
  std::size_t schedule_bytes;  // a BlockShare a block, prefix [num_requests + 1], length [num_requests]
  std::size_t shared_bytes;
};

}  // namespace oscar::cuda
