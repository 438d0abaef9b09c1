#pragma once
// What a store launch reads and writes. Plain data, passed by value to the kernel. The structs are also the C ABI's
// (include/oscar/c_api.h) field for field, so that an array of layers can live in device memory.

#include <cstddef>
#include <cstdint>

namespace oscar::cuda {

inline constexpr int kStorePageTokens = 64;

// One side's constants of one KV head.
struct StoreConstants {
  float center, spread;  // c0, sd of the 8-bit offset
  float clip_ratio;      // min/max: quantile of |y| that is kept; 0 = no clip
  float total;           // feedback: 1 M 1
};

// K or V of one layer. Row of token i, KV head h: rows + i token_stride + h head_stride (params). Page half of page p:
// pages + p page_stride_bytes + h head_stride_bytes. Matrices are [num_kv_heads, head_dim, head_dim], float32
// row-major.
struct StoreSide {
  const std::uint16_t* rows;  // after RoPE, halves order; null: this side is not stored
  std::uint8_t* pages;
  std::uint16_t* window;   // row of window slot s: window + s window_token_stride + h window_head_stride, or null
  const float* transform;  // A
  const float* feedback;   // T, kFeedback only
  const float* metric;     // M, kFeedback only
  const float* row_sum;    // [num_kv_heads, head_dim] 1 M, kFeedback only
  const float* inverse_diagonal;    // [num_kv_heads, head_dim] 1 / M_ii, kFeedback only
  const StoreConstants* constants;  // [num_kv_heads]
  const float* block_means;         // [num_blocks, num_kv_heads, head_dim], subtracted from the rows, or null (values)
};

struct StoreLayer {
  StoreSide key, value;
};

struct StoreParams {
  int num_tokens, num_layers, num_kv_heads;
  int num_blocks;  // of the block means; later positions take the last one

  const std::int32_t* slot_mapping;  // [num_tokens] 64 page + slot in the page; negative: the token is not stored
  const std::int32_t* positions;     // [num_tokens] absolute, for the block means; null when no layer has any
  const std::int32_t* window_slots;  // [num_tokens] row of the 16-bit window; negative or null: no copy

  std::int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;  // elements, multiples of 8
  std::int64_t page_stride_bytes, head_stride_bytes;                                      // multiples of 16
  std::int64_t window_token_stride, window_head_stride;                                   // elements, multiples of 8

  StoreLayer layer;          // when num_layers is 1 and `layers` is null
  const StoreLayer* layers;  // [num_layers] in device memory
};

}  // namespace oscar::cuda
