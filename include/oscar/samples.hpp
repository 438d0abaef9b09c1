#pragma once
// Stage "samples": post-RoPE queries, keys and values of a real run, one layer at a time.

#include <cstdint>
#include <functional>
#include <oscar/model.hpp>
#include <oscar/result.hpp>

namespace oscar {

// Rows of consecutive tokens of one sequence in one layer. Borrows; valid during the call that hands it over.
// Channels of q and k are in halves order (the adapter has permuted them).
struct SampleBlock {
  int layer = 0;
  std::int64_t first_position = 0;
  int num_tokens = 0;
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  const float* q = nullptr;  // [num_tokens, num_qo_heads, head_dim]
  const float* k = nullptr;  // [num_tokens, num_kv_heads, head_dim]
  const float* v = nullptr;  // [num_tokens, num_kv_heads, head_dim]
  const RopeSpec* rope = nullptr;
};

// Receives blocks as the model runs; an error stops the run.
using SampleSink = std::function<Status(const SampleBlock&)>;

}  // namespace oscar
