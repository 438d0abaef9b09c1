#pragma once
// Host side of prefill: how a batch is cut, how much workspace, what it refuses. Plain C++, tested without a GPU.

#include <oscar/result.hpp>

#include "params.hpp"

namespace oscar::cuda {

struct PrefillShape {
  int num_requests = 0, num_tokens = 0;  // upper bounds
  int num_qo_heads = 0, num_kv_heads = 0, head_dim = 0;
  int max_pages = 0;  // of 64 tokens, of the longest history
  int sink = 64, recent = 256;
};

Result<PrefillPlan> plan_prefill(const PrefillShape& shape);
// Errors of values that would read out of bounds or give a wrong answer.
Status check_prefill(const PrefillParams& params, const PrefillShape& shape);

}  // namespace oscar::cuda
