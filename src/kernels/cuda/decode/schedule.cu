#include "schedule.cuh"

#include "geometry.hpp"
#include "launch.hpp"

namespace oscar::cuda {
namespace {

constexpr int kScheduleWarps = 4;  // a block of the schedule kernel; each makes one share

// A list cut into contiguous ranges that differ by one item at most.
struct Cut {
  int quotient, remainder;
  __device__ __forceinline__ Cut(int num_items, int num_ranges)
      : quotient(num_ranges > 0 ? num_items / num_ranges : 0), remainder(num_items - quotient * num_ranges) {}
  __device__ __forceinline__ int begin(int range) const { return range * quotient + min(range, remainder); }
  __device__ __forceinline__ int range_of(int index) const {
    const int longer = remainder * (quotient + 1);
    return index < longer ? index / (quotient + 1) : remainder + (index - longer) / quotient;
  }
};

__device__ __forceinline__ void make_share(const DecodeParams& p, const DecodePlan& plan, const Requests& requests,
                                           int block, BlockShare& share) {
  const int lane = threadIdx.x % 32, total = requests.prefix[p.num_requests] * p.num_kv_heads;
  const int blocks = min(plan.num_blocks, total);
  const Cut cut(total, blocks);
  for (int k = lane; k < static_cast<int>(sizeof(BlockShare) / sizeof(int)); k += 32)
    reinterpret_cast<int*>(&share)[k] = 0;
  __syncwarp();
  const int first = cut.begin(min(block, blocks)), end = cut.begin(min(block + 1, blocks));
  int has_empty = 0;
  for (int b = block + lane * plan.num_blocks; b < p.num_requests; b += 32 * plan.num_blocks)
    has_empty |= requests.prefix[b] == requests.prefix[b + 1];
  has_empty = __any_sync(~0u, has_empty);
  if (first < end) find_rows(p, plan, requests, first, end, plan.max_rows, share);
  __syncwarp();
  if (lane == 0) {
    share.first = first, share.end = end;
    share.has_empty = has_empty;
    share.first_block = first < end ? cut.range_of(share.row[0].begin) : 0;
  }
}

__global__ __launch_bounds__(32 * kScheduleWarps) void schedule_kernel(const DecodeParams p, const DecodePlan plan) {
  __shared__ int prefix[kMaxRequests + 1], length[kMaxRequests];
  const Requests requests{prefix, length};
  const Schedule schedule(p, plan);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int b = threadIdx.x; b < p.num_requests; b += blockDim.x) length[b] = p.seq_lens[b];
  __syncthreads();
  if (warp == 0) {
    int carry = 0;
    for (int first = 0; first < p.num_requests; first += 32) {
      const int b = first + lane;
      int sum = b < p.num_requests ? request_items(p, length[b]).total() * plan.row_groups : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (b < p.num_requests) prefix[b + 1] = carry + sum;
      carry += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) prefix[0] = 0;
  }
  __syncthreads();
  if (blockIdx.x == 0)
    for (int b = threadIdx.x; b <= p.num_requests; b += blockDim.x) {
      schedule.requests.prefix[b] = prefix[b];
      if (b < p.num_requests) schedule.requests.length[b] = length[b];
    }
  const int block = blockIdx.x * kScheduleWarps + warp;
  if (block < plan.num_blocks) make_share(p, plan, requests, block, schedule.share[block]);
}

}  // namespace

cudaError_t schedule(const DecodeParams& params, const DecodePlan& plan, cudaStream_t stream) {
  const int blocks = (plan.num_blocks + kScheduleWarps - 1) / kScheduleWarps;
  schedule_kernel<<<blocks, 32 * kScheduleWarps, 0, stream>>>(params, plan);
  return cudaGetLastError();
}

}  // namespace oscar::cuda
