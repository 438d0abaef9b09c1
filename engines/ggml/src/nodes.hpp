#pragma once
// Reading llama.cpp's graphs: what a node does, which cache tensor it touches, how RoPE turned its keys and what its
// mask shows. Operations are known by their names, so a library whose enum moved is noticed instead of misread.

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <oscar/model.hpp>
#include <oscar/result.hpp>
#include <span>
#include <string>
#include <vector>

namespace oscar::ggml {

enum class Side { kKey, kValue };

enum class Op { kNone, kView, kSetRows, kFlashAttention, kRope, kOther };  // kView: view, reshape, permute, transpose
Op op_of(const ggml_tensor* node);

// The tensor that owns the memory behind a chain of views; the tensor itself when it is no view.
const ggml_tensor* root_of(const ggml_tensor* tensor);

// `cache_k_l7` -> {7, kKey}; nothing for any other name.
struct CacheTensorName {
  int layer = 0;
  Side side = Side::kKey;
};
std::optional<CacheTensorName> parse_cache_name(const char* name);

// The tensor's bytes from its first to its last element: in place when they are in host memory, else copied to
// `scratch`.
const std::byte* host_bytes(const ggml_tensor* tensor, std::vector<std::byte>& scratch);

// The ROPE node that turned `rows` (the source of a SET_ROWS), found through views, copies and scalings of whole heads;
// null when the rows come straight from a projection. Error kUnsupported: RoPE followed by something that is not a
// rotation.
Result<const ggml_tensor*> find_rope(const ggml_tensor* rows);

// Pairing, width and effective inverse frequencies (base, linear scaling, YaRN, frequency factors) of a ROPE node.
// Error kUnsupported: multi-section or offset RoPE, or one that turns a part of a head apart from the rest.
Result<RopeSpec> read_rope(const ggml_tensor* rope, int head_dim);

// Positions of the batch's tokens, from a ROPE node.
std::vector<std::int32_t> read_positions(const ggml_tensor* rope);

// Attention parameters of a FLASH_ATTN_EXT node.
struct AttentionNode {
  float scale = 1;
  float max_bias = 0;  // ALiBi
  float soft_cap = 0;
};
AttentionNode read_attention(const ggml_tensor* node);

// Bit j % 64 of word j / 64 = key j is visible: an F16 mask row of num_keys entries, 0 or -infinity. Returns false when
// the row holds anything else (ALiBi, soft masks). Bits past the last key are clear. Words: ceil(num_keys / 64).
bool visible_bits(const ggml_fp16_t* mask_row, std::int64_t num_keys, std::uint64_t* words);

// The sliding window that the mask of `num_tokens` tokens in cells 0, 1, ... shows; 0 when every query sees all keys up
// to its own. Error kUnsupported: no mask, or one of another shape (bidirectional, chunked, ALiBi).
Result<int> read_window(const ggml_tensor* mask, std::int64_t num_tokens);

// "ROPE 'Kcur-3'" and the like, for messages.
std::string describe(const ggml_tensor* node);

}  // namespace oscar::ggml
