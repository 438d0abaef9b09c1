#pragma once
// The flat list of work items on the device: where an index of the list lies, and how the list is cut: between blocks,
// into passes of a few rows each where a block has many, and between a block's warps.

#include "config.hpp"

namespace oscar::cuda {

// Lengths and prefix sums of one head's items over requests.
struct Requests {
  int* prefix;  // [num_requests + 1]; the last is a head's total; times num_kv_heads below 2^31 (check_decode)
  int* length;  // [num_requests]
};

__device__ __forceinline__ int quotient(int x, Divisor by) {
  return by.magic == 0 ? x : static_cast<int>(__umulhi(static_cast<std::uint32_t>(x), by.magic));
}

// A window item takes as long as 13 / 12 pages: sixteen short copies instead of one.
inline constexpr int kPageWeight = 12, kWindowWeight = 13;

// The rows of the list from item `begin` on, at most max_rows and none past `end`: row, num_rows and pass_end of
// `share`. By one warp; begin < end.
__device__ __forceinline__ void find_rows(const DecodeParams& p, const DecodePlan& plan, const Requests& requests,
                                          int begin, int end, int max_rows, BlockShare& share) {
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
  const int slot = __popc(found & ((1u << lane) - 1)), count = min(__popc(found), max_rows);
  if ((found >> lane & 1) != 0 && slot < count) {
    share.row[slot] = row;
    if (slot == count - 1) {
      share.num_rows = count;
      share.pass_end = min(row.end, end);
    }
  }
  __syncwarp();
  // the pass cut between the warps by weight: lane w finds where warp w begins
  const int pass_end = share.pass_end;
  const auto items = [&](int s, bool window) {
    const Row& at = share.row[s];
    return window ? max(min(at.end, pass_end) - max(at.history_end(), begin), 0)
                  : max(min(at.history_end(), pass_end) - max(at.begin, begin), 0);
  };
  std::int64_t weight = 0;
  for (int s = 0; s < count; ++s)
    weight += static_cast<std::int64_t>(items(s, false)) * kPageWeight +
              static_cast<std::int64_t>(items(s, true)) * kWindowWeight;
  if (lane > plan.num_warps) return;
  std::int64_t rest = weight * lane / plan.num_warps;
  int index = begin;
  for (int s = 0; s < 2 * count; ++s) {
    const int unit = s % 2 == 0 ? kPageWeight : kWindowWeight, there = items(s / 2, s % 2 != 0);
    const int taken = static_cast<int>(min(rest / unit, static_cast<std::int64_t>(there)));
    index += taken;
    rest -= static_cast<std::int64_t>(taken) * unit;
    if (taken < there) break;
  }
  if (pass_end - begin <= plan.num_warps) index = min(begin + lane, pass_end);  // no empty warp between others: join()
  share.warp_begin[lane] = lane == plan.num_warps ? pass_end : index;
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
