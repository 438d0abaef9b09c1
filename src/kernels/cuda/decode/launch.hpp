#pragma once
// The one dispatch from run-time shape to compiled instance.

#include <cuda_runtime_api.h>

#include "params.hpp"

namespace oscar::cuda {

// Enqueues one kernel on `stream`; allocates nothing, waits for nothing, capturable in a graph.
cudaError_t decode(const DecodeParams& params, const DecodePlan& plan, int head_dim, cudaStream_t stream);

}  // namespace oscar::cuda
