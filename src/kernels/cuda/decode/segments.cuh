#pragma once
// The flat list of work items on the device: prefix sums over requests, and where an index of the list lies.

#include "items.hpp"

namespace oscar::cuda {

// Lengths and prefix sums of items over requests, in shared memory: under load, an access to L2 takes microseconds, and
// rows change on the critical path.
struct Requests {
  int* prefix;  // [num_requests + 1]; the last is the total, below 2^31 (check_decode)
  int* length;  // [num_requests]
};

__device__ __forceinline__ Row find_row(const DecodeParams& p, const DecodePlan& plan, const Requests& requests,
                                        int index) {
  int low = 0, high = p.num_requests;  // prefix[low] <= index < prefix[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (requests.prefix[middle] <= index)
      low = middle;
    else
      high = middle;
  }
  Row row;
  row.request = low;
  row.items = request_items(p, requests.length[low]);
  const int total = row.items.total();
  const int order = (index - requests.prefix[low]) / total;
  row.head = order / plan.row_groups;
  row.group = order - row.head * plan.row_groups;
  row.begin = requests.prefix[low] + order * total;
  row.end = row.begin + total;
  return row;
}

// By one warp.
__device__ inline void scan_requests(const DecodeParams& p, const DecodePlan& plan, const Requests& requests) {
  const int lane = threadIdx.x % 32;
  const int groups = p.num_kv_heads * plan.row_groups;
  int carry = 0;
  for (int first = 0; first < p.num_requests; first += 32) {
    const int b = first + lane;
    const int length = b < p.num_requests ? p.seq_lens[b] : 0;
    int sum = request_items(p, length).total() * groups;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (b < p.num_requests) {
      requests.prefix[b + 1] = carry + sum;
      requests.length[b] = length;
    }
    carry += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) requests.prefix[0] = 0;
}

// The list cut into contiguous ranges, one a block, that differ by one item at most; num_items >= num_blocks.
struct Cut {
  int quotient, remainder;
  __device__ __forceinline__ Cut(int num_items, int num_blocks)
      : quotient(num_blocks > 0 ? num_items / num_blocks : 0), remainder(num_items - quotient * num_blocks) {}
  __device__ __forceinline__ int begin(int block) const { return block * quotient + min(block, remainder); }
  __device__ __forceinline__ int block_of(int index) const {
    const int longer = remainder * (quotient + 1);
    return index < longer ? index / (quotient + 1) : remainder + (index - longer) / quotient;
  }
};

// Query rows of a group, counted over query tokens first: row -> query token of the request and query head.
struct QueryRow {
  int token, head;
  bool valid;
};
template <typename Config>
__device__ __forceinline__ QueryRow query_row(const DecodeParams& p, const Row& row, int r) {
  const int ratio = p.num_qo_heads / p.num_kv_heads;
  const int index = row.group * Config::kRows + r;
  return {index / ratio, row.head * ratio + index % ratio, index < p.query_length * ratio};
}

}  // namespace oscar::cuda
