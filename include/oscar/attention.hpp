#pragma once
// Stage "attention": queries of one layer and sequence over INT2 history and 16-bit rows, on the CPU.
// Serves decode (one query token) and prefill over history (many) alike. Grouped queries: query head h reads KV head
// h / (num_qo_heads / num_kv_heads). Scores: soft_cap(scale * (q . k)); natural-log LSE.
//
// For query token i (position p_i) and visible key j (position p_j): the key is read exactly when it lies in a span and
// span.always, or exact_all, or p_j < sink, or p_j > p_i - recent; otherwise from its INT2 page. An invisible key is
// not read.
//
// Accuracy, against double over the same codes and rows: a transformed query is rounded to int8, at most 1/254 of its
// largest channel a channel. That puts a logit off by scale * step * .29 max|q'| / 127 * 1.12 sqrt(head_dim) rms (0.01
// on SmolLM2, whose 2-bit keys are off by 0.5), an output by 1e-3 of its row's largest value on average. The keys'
// common offset and page mean meet the float query. Values meet weights of 8 or 16 bits (kSingleDigitShare in
// attention_kernels.hpp). Exact rows: float sums.

#include <cstddef>
#include <cstdint>
#include <oscar/cache.hpp>
#include <oscar/executor.hpp>
#include <oscar/isa.hpp>

namespace oscar {

struct AttentionShape {
  int num_queries = 0;  // query tokens
  int num_tokens = 0;   // keys in the cache that may be visible: [0, num_tokens)
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
};

struct AttentionParams {
  const float* q =
      nullptr;  // row of token i, head h: q + i * q_token_stride + h * q_head_stride; post-RoPE, halves order, unscaled
  std::int64_t q_token_stride = 0;  // elements
  std::int64_t q_head_stride = 0;
  const std::int32_t* q_positions = nullptr;    // [num_queries]
  const std::int32_t* key_positions = nullptr;  // [num_tokens]
  // Bit j % 64 of word j / 64 of row i: key j is visible to query i. [num_queries, visible_stride]. Null: causal by
  // position (p_j <= p_i) and, when sliding_window > 0, p_j > p_i - sliding_window.
  const std::uint64_t* visible = nullptr;
  std::int64_t visible_stride = 0;  // words
  float scale = 1;
  float soft_cap = 0;  // 0 = none; else cap * tanh(score / cap)
  int sliding_window = 0;
  int sink = 64;
  int recent = 256;
  bool exact_all = false;            // every key that has a span is read exactly
  const ExactSpan* spans = nullptr;  // ascending, not overlapping
  int num_spans = 0;
  float* out =
      nullptr;  // token i, head h: out + i * out_token_stride + h * out_head_stride, float32 [head_dim], original space
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;  // [num_queries, num_qo_heads] or null; -inf and a zero row when nothing is visible
};

// How one shape is cut into work items. Reusable for every call of that shape.
struct AttentionPlan {
  AttentionShape shape;
  int queries_per_tile = 1;
  int num_tiles = 1;
  int num_splits = 1;  // ranges of pages, merged by LSE
  int pages_per_split = 1;
  int num_workers = 1;  // bodies that attend() starts; each has its own scratch
  Isa isa = Isa::kScalar;
  std::size_t workspace_bytes = 0;
};

// num_qo_heads is a multiple of num_kv_heads, head_dim a multiple of 16 in 16..256, isa one of supported_isas().
// `concurrency`: Executor::concurrency() of the executor that attend() will get.
AttentionPlan plan_attention(const AttentionShape& shape, int concurrency, Isa isa);

// `workspace` has plan.workspace_bytes, 64-byte aligned, and needs no initialisation. Allocates nothing. The same plan
// and input give the same bits whatever the threads do. Steps of the pages' parameters are not negative.
void attend(const AttentionPlan& plan, const PagedLayer& layer, const AttentionParams& params, void* workspace,
            Executor& executor);

}  // namespace oscar
