// Plain read of device memory: the roof that the kernels are measured against.
#include <cstddef>
#include <cstdint>

namespace {

__global__ __launch_bounds__(512) void read_kernel(const uint4* data, std::size_t count, unsigned* sink) {
  uint4 x = make_uint4(0, 0, 0, 0);
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(data + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; ++k) x.x ^= v[k].x, x.y ^= v[k].y, x.z ^= v[k].z, x.w ^= v[k].w;
  }
  for (; i < count; i += stride) {
    const uint4 v = __ldcs(data + i);
    x.x ^= v.x, x.y ^= v.y, x.z ^= v.z, x.w ^= v.w;
  }
  if ((x.x ^ x.y ^ x.z ^ x.w) == 0x9E3779B9u) *sink = x.x;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int oscar_bench_read(const void* data, std::size_t bytes,
                                                                       int num_blocks, void* sink, void* stream) {
  read_kernel<<<num_blocks, 512, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(data), bytes / 16,
                                                                         static_cast<unsigned*>(sink));
  return static_cast<int>(cudaGetLastError());
}
