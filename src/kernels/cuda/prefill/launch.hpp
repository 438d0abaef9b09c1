#pragma once
// The one dispatch from run-time shape to compiled instance.

#include <cuda_runtime_api.h>

#include "merge.hpp"
#include "params.hpp"

namespace oscar::cuda {

// Both enqueue on `stream`, allocate nothing, wait for nothing and can be captured in a graph.
cudaError_t prefill(const PrefillParams& params, const PrefillPlan& plan, int head_dim, cudaStream_t stream);
cudaError_t merge(const MergeParams& params, cudaStream_t stream);

}  // namespace oscar::cuda
