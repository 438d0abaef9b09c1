#pragma once
// Host side of one instance.

#include <cuda_runtime.h>

#include "kernel.cuh"

namespace oscar::cuda {

template <int kHeadDim, int kColumnTiles>
cudaError_t launch_decode(const DecodeParams& params, const DecodePlan& plan, cudaStream_t stream) {
  using Config = DecodeConfig<kHeadDim, kColumnTiles>;
  if (const cudaError_t error = cudaFuncSetAttribute(decode_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                     static_cast<int>(plan.shared_bytes));
      error != cudaSuccess)
    return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.num_blocks);
  config.blockDim = dim3(Config::kNumThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = params.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, decode_kernel<Config>, params, plan);
}

}  // namespace oscar::cuda
