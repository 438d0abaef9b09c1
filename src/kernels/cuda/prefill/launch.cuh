#pragma once
// Host side of one instance: attributes and the launches.

#include <cuda_runtime.h>

#include <algorithm>

#include "kernel.cuh"

namespace oscar::cuda {

template <int kHeadDim>
cudaError_t launch_prefill(const PrefillParams& params, const PrefillPlan& plan, cudaStream_t stream) {
  using Config = PrefillConfig<kHeadDim>;
  constexpr int kShared = sizeof(typename Config::Shared), kFragments = 2 * 128 * kHeadDim;
  const auto allow = [](auto kernel, int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  if (const cudaError_t error = allow(prefill_kernel<Config>, kShared); error != cudaSuccess) return error;
  if (const cudaError_t error = allow(rotate_kernel<kHeadDim, true>, kFragments); error != cudaSuccess) return error;
  if (const cudaError_t error = allow(rotate_kernel<kHeadDim, false>, kFragments); error != cudaSuccess) return error;
  const int row_tiles = (params.num_tokens * (params.num_qo_heads / params.num_kv_heads) + 63) / 64;
  const dim3 rotate(std::min(row_tiles, 64), params.num_kv_heads, kHeadDim / 64);
  rotate_kernel<kHeadDim, true><<<rotate, 128, kFragments, stream>>>(params);
  if (params.block_means != nullptr)
    page_means_kernel<kHeadDim>
        <<<dim3(plan.mean_groups * Config::kMeanPages / kMeanPagesOfBlock<kHeadDim>, params.num_kv_heads), kHeadDim, 0,
           stream>>>(params, plan);
  if (plan.sink_tiles + plan.recent_tiles > 0)
    window_kernel<kHeadDim>
        <<<dim3(plan.sink_tiles + plan.recent_tiles, params.num_kv_heads, params.num_requests), 256, 0, stream>>>(
            params, plan);
  prefill_kernel<Config>
      <<<dim3(plan.row_tiles, params.num_kv_heads), Config::kNumThreads, kShared, stream>>>(params, plan);
  rotate_kernel<kHeadDim, false><<<rotate, 128, kFragments, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace oscar::cuda
