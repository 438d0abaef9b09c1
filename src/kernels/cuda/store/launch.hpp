#pragma once
// The one dispatch from run-time shape to compiled instance.

#include <cuda_runtime_api.h>

#include "plan.hpp"

namespace oscar::cuda {

// Enqueues one kernel on `stream`; allocates nothing, waits for nothing, capturable in a graph.
cudaError_t store(const StoreParams& params, const StoreShape& shape, const StorePlan& plan, cudaStream_t stream);

}  // namespace oscar::cuda
