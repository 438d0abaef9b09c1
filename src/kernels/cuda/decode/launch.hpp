#pragma once
// The one dispatch from run-time shape to compiled instance.

#include <cuda_runtime_api.h>

#include "params.hpp"

namespace oscar::cuda {

// Enqueues one kernel on `stream` that writes params.schedule from params.seq_lens: once a step, before the first layer
// that reads it. Layers of one shape and one rule of windows share it.
cudaError_t schedule(const DecodeParams& params, const DecodePlan& plan, cudaStream_t stream);

// Enqueues one kernel on `stream`; allocates nothing, waits for nothing, capturable in a graph.
cudaError_t decode(const DecodeParams& params, const DecodePlan& plan, int head_dim, cudaStream_t stream);

}  // namespace oscar::cuda
