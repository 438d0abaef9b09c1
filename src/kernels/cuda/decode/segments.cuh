#pragma once
// The flat list of work items on the device: prefix sums over requests, where an index of the list lies, and how the
// list is cut: between blocks, into passes of a few rows each where a block has many, and between a block's warps.

#include "config.hpp"

namespace oscar::cuda {

// Lengths and prefix sums of one head's items over requests, in shared memory.
struct Requests {
  int* prefix;  // [num_requests + 1]; the last is a head's total; times num_kv_heads below 2^31 (check_decode)
  int* length;  // [num_requests]
};

// By one warp.
__device__ inline void scan_requests(const DecodeParams& p, const DecodePlan& plan, const Requests& requests) {
  const int lane = threadIdx.x % 32;
  int carry = 0;
  for (int first = 0; first < p.num_requests; first += 32) {
    const int b = first + lane;
    const int length = b < p.num_requests ? p.seq_lens[b] : 0;
    int sum = request_items(p, length).total() * plan.row_groups;
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

__device__ __forceinline__ int quotient(int x, Divisor by) {
  return by.magic == 0 ? x : static_cast<int>(__umulhi(static_cast<std::uint32_t>(x), by.magic));
}

// The rows of the list from item `begin` on, as many as fit and lie before `end`: shared.row, num_rows and pass_end,
// the end of the last of them. By one warp; begin < end.
template <typename Config>
__device__ __forceinline__ void find_rows(const DecodeParams& p, const DecodePlan& plan, const Requests& requests,
                                          int begin, int end, typename Config::Shared& shared) {
  const int lane = threadIdx.x % 32, of_head = requests.prefix[p.num_requests];
  int head = -1;
  for (int at = 0; at < p.num_kv_heads; at += 32)
    head += __popc(__ballot_sync(~0u, at + lane < p.num_kv_heads && (at + lane) * of_head <= begin));
  const int inside = begin - head * of_head;
  // the last request with prefix <= inside: among every 32nd, then between two of those
  int request = __popc(
      __ballot_sync(~0u, 32 * lane < p.num_requests && requests.prefix[min(32 * lane, p.num_requests)] <= inside));
  request = 32 * (request - 1) + lane;
  request +=
      __popc(__ballot_sync(~0u, request < p.num_requests && requests.prefix[min(request, p.num_requests)] <= inside)) -
      1 - lane;
  int group = lane;
  if (plan.row_groups > 1)
    group += (inside - requests.prefix[request]) / request_items(p, requests.length[request]).total();
  // each lane looks at one of the next 32 rows; rows without items do not count
  const int later = quotient(group, plan.by_row_groups);
  const int next_head = quotient(request + later, plan.by_requests);
  Row row;
  row.group = group - later * plan.row_groups;
  row.request = request + later - next_head * p.num_requests;
  row.head = head + next_head;
  row.items = request_items(p, requests.length[row.request]);
  row.begin = row.head * of_head + requests.prefix[row.request] + row.group * row.items.total();
  row.end = row.begin + row.items.total();
  const unsigned found = __ballot_sync(~0u, row.head < p.num_kv_heads && row.begin < row.end && row.begin < end);
  const int slot = __popc(found & ((1u << lane) - 1)), count = min(__popc(found), Config::kMaxRows);
  if ((found >> lane & 1) != 0 && slot < count) {
    shared.row[slot] = row;
    if (slot == count - 1) {
      shared.num_rows = count;
      shared.pass_end = min(row.end, end);
    }
  }
}

// Query rows of a group, counted over query tokens first: row -> query token of the request and query head.
struct QueryRow {
  int token, head;
  bool valid;
};
template <typename Config>
__device__ __forceinline__ QueryRow query_row(const DecodeParams& p, const DecodePlan& plan, const Row& row, int r) {
  const int ratio = static_cast<int>(plan.by_ratio.divisor), index = row.group * Config::kRows + r;
  const int token = quotient(index, plan.by_ratio);
  return {token, row.head * ratio + index - token * ratio, token < p.query_length};
}

}  // namespace oscar::cuda
