#pragma once
// Host side of one instance: attributes and the launch.

#include <cuda_runtime.h>

#include "kernel.cuh"
#include "plan.hpp"

namespace oscar::cuda {

template <typename Config, int kRows>
cudaError_t launch_store_kernel(const StoreParams& params, const StorePlan& plan, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(typename Config::Shared);
  if (const cudaError_t error =
          cudaFuncSetAttribute(store_kernel<Config, kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess)
    return error;
  const dim3 grid(plan.blocks_a_head, 2 * params.num_kv_heads, params.num_layers);
  store_kernel<Config, kRows><<<grid, Config::kNumThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

template <int kHeadDim, Quantizer kQuantizer>
cudaError_t launch_store(const StoreParams& params, const StorePlan& plan, cudaStream_t stream) {
  using Config = StoreConfig<kHeadDim, kQuantizer>;
  static_assert(sizeof(typename Config::Shared) <= 227 * 1024);
  return plan.tile_tokens == Config::kTileRows ? launch_store_kernel<Config, 8>(params, plan, stream)
                                               : launch_store_kernel<Config, 2>(params, plan, stream);
}

}  // namespace oscar::cuda
