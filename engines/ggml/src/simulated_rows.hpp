#pragma once
// Rows of one layer as a simulated method would read them back, beside the exact ones; and attention over both. Serves
// evaluation only: such a cache is larger than a 16-bit one.

#include <ggml.h>

#include <cstdint>
#include <oscar/attention.hpp>
#include <oscar/ggml.hpp>
#include <vector>

#include "layer_cache.hpp"

namespace oscar::ggml {

class SimulatedRows {
 public:
  // Takes the exact rows of the tokens [first, last) and of the rest of their groups, and keeps what the method reads
  // back of them. Tokens of stream 0, each at the position that is its index; last: tokens that the cache holds.
  // `positions` [last]. Errors: kUnsupported (other positions), kInvalidArgument (a row was not kept).
  Status update(LayerCache& layer, const Simulation& simulation, int first, int last, const std::int32_t* positions,
                Executor& executor);
  // The tokens [0, num_tokens).
  ExactSpan span(const LayerCache& layer, int num_tokens) const;

 private:
  std::vector<std::uint16_t> k_, v_;  // [num_cells, num_kv_heads, head_dim], F16
};

// Which of the visible keys a query reads exactly, and which simulated. [num_queries, words_per_query] each.
struct SplitVisibility {
  std::vector<std::uint64_t> exact, simulated;
  // By the window rule of oscar/attention.hpp, from params.visible, its positions, sink and recent.
  void split(const AttentionParams& params, int num_queries, int num_tokens);
};

// Attention of one call over exact rows where `split` says so and over `simulated` elsewhere: two passes, merged by
// LSE. params.spans hold the exact rows.
class SimulatedAttention {
 public:
  void attend(const AttentionPlan& plan, const PagedLayer& layer, const AttentionParams& params,
              const SplitVisibility& split, const ExactSpan& simulated, void* workspace, Executor& executor);

 private:
  std::vector<float> out_, lse_[2];  // of the second pass [num_queries, num_qo_heads, head_dim]; of both
};

}  // namespace oscar::ggml
