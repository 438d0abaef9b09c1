#pragma once
// What every layer of a step would compute alike, computed once a step: the lengths' prefix sums and the share of each
// block. A layer's kernel then starts with one load instead of a scan and a search, 1.5 us.

#include "segments.cuh"

namespace oscar::cuda {

// plan.schedule_bytes of p.schedule.
struct Schedule {
  Requests requests;
  BlockShare* share;  // [num_blocks]
  __device__ __forceinline__ Schedule(const DecodeParams& p, const DecodePlan& plan) {
    share = static_cast<BlockShare*>(p.schedule);
    requests.prefix = reinterpret_cast<int*>(share + plan.num_blocks);
    requests.length = requests.prefix + p.num_requests + 1;
  }
};

}  // namespace oscar::cuda
