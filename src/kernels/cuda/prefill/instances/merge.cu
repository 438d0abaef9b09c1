#include "../merge.cuh"

#include "../launch.hpp"

namespace oscar::cuda {

cudaError_t merge(const MergeParams& params, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const std::int64_t pieces = static_cast<std::int64_t>(params.num_tokens) * params.num_heads * (params.head_dim / 8);
  if (pieces == 0) return cudaSuccess;
  merge_kernel<<<static_cast<unsigned>((pieces + kThreads - 1) / kThreads), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace oscar::cuda
