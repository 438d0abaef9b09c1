#pragma once
// Function table of the CPU attention kernels: what src/attention calls, once per instruction set. Each table is
// compiled in its own file with its own flags, so this header holds plain types only (an inline function here would be
// emitted with AVX-512 code in it and might be picked by the linker for every machine).
//
// A "page" is kPageTokens = 64 tokens of one KV head. Masks are 64-bit words, bit t = token t of the page. Float arrays
// of a page have 64 entries. Query operands are in an order private to the table that made them. Every pointer to
// floats and operands is 64-byte aligned; packed pages may have any alignment.

#include <cstdint>

namespace oscar::cpu {

inline constexpr int kPage = 64;
inline constexpr int kMaxDim = 256;
// Query rows that share one pass over a packed page (unpacking costs a fifth of a row's products) and over an exact
// tile (6 x 16 float accumulators fill 12 of 16 AVX2 registers).
inline constexpr int kMaxPackedRows = 8;
inline constexpr int kMaxExactRows = 6;

// The kernels pad a row to whole vectors of 64 channels. (static: see above.)
static constexpr int padded_dim(int head_dim) { return (head_dim + 63) / 64 * 64; }
static constexpr int operand_bytes(int head_dim) { return 4 * padded_dim(head_dim); }

// How the stored parameters of a page half become a step and a middle: y^ = middle + step (code - 1.5).
struct ParameterSource {
  const std::uint8_t* stored =
      nullptr;  // behind the codes: i8 scale [64], i8 offset [64], or f32 scale [64], f32 zero [64]
  bool log8 = true;
  const float* log_steps = nullptr;  // [256] step of scale code i at i + 128 (kLog8)
  float offset_center = 0;           // kLog8
  float offset_unit = 0;             // kLog8: offset_spread / 20
};

// One query row against packed keys: logit = code_factor step (2 dot - three_sums) + middle_factor middle + offset,
// where dot is the integer dot product of the row's int8 values with the codes and three_sums is 3 times the sum of
// these values. The difference is 2 sum(q (code - 1.5)), an exact integer: the middle of a key meets the float sum of
// the query, never int8.
struct KeyTerms {
  float code_factor = 0;    // softmax scale * int8 scale / 2
  float middle_factor = 0;  // softmax scale * sum of the float query
  std::int32_t three_sums = 0;
};
struct KeyRow {
  const std::int8_t* operand = nullptr;
  KeyTerms terms;
  float offset = 0;                // of every token, or
  const float* offsets = nullptr;  // [64], of each, when not null
};

// Online softmax of one query row over one kind of keys.
struct Running {
  float max = 0;  // largest logit so far, -inf before the first
  float sum = 0;  // sum of exp(logit - max)
};

// What packed values add up to besides the accumulator.
struct ValueSums {
  float middle = 0;  // belongs to every channel of the accumulator
  float weight = 0;  // sum of w = weight * step so far: what kSingleDigitShare is a share of
};
struct ValueRow {
  const float* weights = nullptr;  // [64], exp(logit - max), >= 0
  float rescale = 1;               // of what was accumulated before
  float* accumulator = nullptr;    // [head_dim]
  ValueSums* sums = nullptr;
};

// w = weight * step enters an integer product as a fixed-point number relative to the page's largest w: 16 bits (two
// digits), or 8 bits (one) where that largest w is at most this share of all w so far. One digit is off by 1/510 of the
// largest, so a page of 64 tokens by .01 of it (rms, codes deviate by 1.1 from the middle): 1.6e-4 of the row's total
// weight.
inline constexpr float kSingleDigitShare = 1.0f / 64;

struct AttentionKernels {
  // Rounds a float row to int8 (nearest, scale max|q| / 127) and lays it out for key_logits. Sets the row's terms.
  void (*arrange_query)(const float* row, int head_dim, float softmax_scale, std::int8_t* operand, KeyTerms* terms);

  // Step and middle of the page's tokens; zero for tokens outside `tokens`, whatever bytes lie there.
  void (*decode_parameters)(const ParameterSource& source, std::uint64_t tokens, float* step, float* middle);

  // logits [num_rows, 64] of up to kMaxPackedRows rows.
  void (*key_logits)(const std::uint8_t* packed, int head_dim, const KeyRow* rows, int num_rows, const float* step,
                     const float* middle, float* logits);

  // Soft cap (0 = none), mask and exponentials in place: logits become exp(logit - new max), 0 where `visible` has no
  // bit. `visible` is not zero. Returns the factor exp(old max - new max) for what was accumulated before.
  float (*softmax_page)(std::uint64_t visible, float soft_cap, float* logits, Running* running);

  // accumulator = rescale * accumulator + sum_t w_t code_t; sums likewise gain middle: sum_t weight_t middle_t - 1.5
  // sum w, weight: sum w. Steps >= 0. Up to kMaxPackedRows rows.
  void (*add_values)(const std::uint8_t* packed, int head_dim, const ValueRow* rows, int num_rows, const float* step,
                     const float* middle);

  // 16-bit rows to float tiles; a null row becomes zeros. Keys are transposed: tile [head_dim, 64]; values: tile [64,
  // head_dim].
  void (*load_keys)(const std::uint16_t* const* rows, bool f16, int head_dim, float* tile);
  void (*load_values)(const std::uint16_t* const* rows, bool f16, int head_dim, float* tile);
  // logits [num_rows, 64] = scale * (query row . key) for keys [0, num_keys); num_keys is a multiple of 16. Up to
  // kMaxExactRows.
  void (*exact_logits)(const float* const* queries, int num_rows, const float* tile, int head_dim, int num_keys,
                       float scale, float* logits);
  // accumulators[r] [head_dim] = rescale[r] * accumulators[r] + sum_t weights [r, t] * value row t, t in [0, num_keys).
  void (*exact_values)(const float* weights, const float* rescale, int num_rows, const float* tile, int head_dim,
                       int num_keys, float* const* accumulators);

  float (*dot)(const float* a, const float* b, int n);
};

const AttentionKernels& scalar_attention_kernels();
const AttentionKernels& avx2_attention_kernels();    // call only where isa_supported(Isa::kAvx2)
const AttentionKernels& avx512_attention_kernels();  // call only where isa_supported(Isa::kAvx512)

}  // namespace oscar::cpu
