#pragma once
// Host side of one instance: attributes and the three launches.

#include <cuda_runtime.h>

#include "../combine/kernel.cuh"
#include "../prepare/kernel.cuh"
#include "decode_kernel.cuh"

namespace oscar::cuda {

template <typename Kernel>
cudaError_t launch_dependent(Kernel kernel, dim3 grid, int threads, std::size_t shared, cudaStream_t stream,
                             bool dependent, const DecodeParams& params, const DecodePlan& plan) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params, plan);
}

template <int kHeadDim, int kColumnTiles, bool kKeep>
cudaError_t launch_decode_kernels(const DecodeParams& params, const DecodePlan& plan, cudaStream_t stream,
                                  bool dependent) {
  using Config = DecodeConfig<kHeadDim, kColumnTiles>;
  constexpr int kThreads = MatrixShare<kHeadDim, kKeep>::kThreads;
  if (const cudaError_t error = cudaFuncSetAttribute(decode_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                     static_cast<int>(plan.shared_bytes));
      error != cudaSuccess)
    return error;
  const int units = params.num_requests * plan.row_groups;
  const dim3 per_head((units + plan.units_per_block - 1) / plan.units_per_block, params.num_kv_heads);
  const dim3 with_terms(per_head.x + units * ((plan.max_pages + kTermPages - 1) / kTermPages), params.num_kv_heads);
  if (const cudaError_t error =
          launch_dependent(prepare_kernel<Config, kKeep>, with_terms, kThreads, 0, stream, dependent, params, plan);
      error != cudaSuccess)
    return error;
  if (const cudaError_t error = launch_dependent(decode_kernel<Config>, dim3(plan.num_blocks), Config::kNumThreads,
                                                 plan.shared_bytes, stream, true, params, plan);
      error != cudaSuccess)
    return error;
  return launch_dependent(combine_kernel<Config, kKeep>, per_head, kThreads,
                          combine_shared_bytes(params.num_requests, Config::kRows, plan.num_blocks), stream, true,
                          params, plan);
}

// `dependent`: the first kernel may start before the stream's preceding one has finished (programmatic dependent
// launch).
template <int kHeadDim, int kColumnTiles>
cudaError_t launch_decode(const DecodeParams& params, const DecodePlan& plan, cudaStream_t stream, bool dependent) {
  const bool few_rows = params.num_requests * plan.row_groups * params.num_kv_heads <= plan.num_blocks;
  return few_rows ? launch_decode_kernels<kHeadDim, kColumnTiles, true>(params, plan, stream, dependent)
                  : launch_decode_kernels<kHeadDim, kColumnTiles, false>(params, plan, stream, dependent);
}

}  // namespace oscar::cuda
