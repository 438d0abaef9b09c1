#pragma once
// Host side of one tensor-core instance: attributes and the launch.

#include <cuda_runtime.h>

#include "../plan.hpp"
#include "kernel.cuh"

namespace oscar::cuda {

template <int kHeadDim, Quantizer kQuantizer>
cudaError_t launch_store_tensor(const StoreParams& params, const StorePlan& plan, cudaStream_t stream) {
  using Config = TensorStoreConfig<kHeadDim, kQuantizer>;
  constexpr int kSharedBytes = sizeof(typename Config::Shared);
  static_assert(kSharedBytes <= 227 * 1024);
  if (const cudaError_t error =
          cudaFuncSetAttribute(store_tensor_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess)
    return error;
  const dim3 grid(plan.blocks_a_head, 2 * params.num_kv_heads, params.num_layers);
  store_tensor_kernel<Config><<<grid, Config::kNumThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace oscar::cuda
