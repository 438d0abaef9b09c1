#pragma once
// Hands a warp the items of its range in order and starts their copies into its ring. Each lane holds the source of
// one of the next 32 items, and the 32 after them are on their way: under load a block-table entry takes microseconds,
// longer than an item.

#include "../common/copy.cuh"
#include "config.hpp"
#include "segments.cuh"

namespace oscar::cuda {

template <typename Config>
class Loader {
 public:
  __device__ __forceinline__ Loader(const DecodeParams& p, typename Config::Shared& shared)
      : p_(p),
        shared_(shared),
        barriers_(shared_address(shared.full[threadIdx.x / 32])),
        ring_(shared_address(shared.ring[threadIdx.x / 32])),
        policy_(evict_first_policy()) {}
  // Items [begin, end) of the rows in shared.share; none of the range before is in flight any more.
  __device__ __forceinline__ void start(int begin, int end) {
    index_ = begin;
    end_ = end;
    count_ = 0;
    request_batch(begin);
  }
  // Whether the next item may be copied before the kernels ahead have finished: history never holds the tokens of this
  // step, the window does.
  __device__ __forceinline__ bool next_is_early() const {
    return index_ >= end_ || (__shfl_sync(~0u, now_.high, count_ % 32) & kWindow) == 0;
  }
  // Starts the copy of the next item into stage `stage`; every 32 items, take_batch() comes before.
  __device__ __forceinline__ void issue(int stage) {
    if (index_ >= end_) return;
    const std::uint32_t barrier = barriers_ + 8 * stage, destination = ring_ + Config::kPageBytes * stage;
    const std::uint32_t low = __shfl_sync(~0u, now_.low, count_ % 32), high = __shfl_sync(~0u, now_.high, count_ % 32);
    const auto offset = static_cast<std::int64_t>(static_cast<std::uint64_t>(high & kOffsetMask) << 32 | low);
    if ((high & kWindow) == 0) {
      copy_by_warp(destination, p_.pages, offset, Config::kPageBytes, barrier, policy_);
    } else {
      const int lane = threadIdx.x % 32;
      copy_begin(barrier, 2 * kWindowTokens * 2 * Config::kHeadDim);
      if (lane < 2 * kWindowTokens) {
        // rows past the end or before the window repeat a valid one: their weight is zero, their bytes must be finite
        const int token = min(max(lane % kWindowTokens, static_cast<int>(high >> kFirstShift & 7)),
                              static_cast<int>(high >> kLastShift & 7));
        const __nv_bfloat16* base = lane < kWindowTokens ? p_.window_k : p_.window_v;
        copy_piece(destination + lane * Config::kWindowRowBytes, base + offset + token * p_.window_token_stride,
                   2 * Config::kHeadDim, barrier, policy_);
      }
      copy_end(barrier);
    }
    ++index_;
    ++count_;
  }

  __device__ __forceinline__ bool needs_batch() const { return count_ % 32 == 0; }
  // Waits for the entries requested before, makes them the sources of the next 32 items and requests those after.
  __device__ __forceinline__ void take_batch() {
    const std::int64_t head = inside_ >> kHeadShift, token = inside_ & ((1 << kHeadShift) - 1);
    const std::int64_t offset =
        flags_ == 0 ? entry_ * p_.page_stride_bytes + head * p_.head_stride_bytes
                    : entry_ * p_.window_block_stride + token * p_.window_token_stride + head * p_.window_head_stride;
    now_.low = static_cast<std::uint32_t>(offset);
    now_.high = flags_ | (static_cast<std::uint32_t>(offset >> 32) & kOffsetMask);
    request_batch(index_ + 32);
  }

 private:
  // Offset of an item from the pages (bytes) or the window (elements), 48 bits, and for a window item the first and
  // last of its tokens that exist.
  struct Source {
    std::uint32_t low = 0, high = 0;
  };
  static constexpr std::uint32_t kWindow = 1u << 31, kOffsetMask = 0xFFFFFFu;
  static constexpr int kFirstShift = 24, kLastShift = 27;
  static constexpr int kHeadShift = 16;  // of an entry's `inside`, above the token in its block; check_decode: both fit

  // Starts the load of the table entries of 32 items from `first` on, one a lane.
  __device__ __forceinline__ void request_batch(int first) {
    const int index = first + static_cast<int>(threadIdx.x) % 32;
    if (index >= end_) return;
    int slot = 0;
    while (shared_.share.row[slot].end <= index) ++slot;
    const Row& row = shared_.share.row[slot];
    const int page = index - row.begin, item = page - row.items.num_pages;
    if (item < 0) {
      flags_ = 0;
      inside_ = row.head << kHeadShift;
      entry_ = __ldg(p_.block_table + row.request * p_.block_table_stride + row.items.first_page + page);
    } else {
      const int token = row.items.window_token(item), last = min(row.items.length - 1 - token, kWindowTokens - 1);
      const int floor = item < row.items.num_sink_items ? 0 : row.items.length - p_.query_length - p_.recent + 1;
      const int block = token / p_.window_block;
      flags_ = kWindow | static_cast<std::uint32_t>(min(max(floor - token, 0), last)) << kFirstShift |
               static_cast<std::uint32_t>(last) << kLastShift;
      inside_ = row.head << kHeadShift | (token - block * p_.window_block);
      entry_ = __ldg(p_.window_table + row.request * p_.window_table_stride + block);
    }
  }
  const DecodeParams& p_;
  const typename Config::Shared& shared_;
  int index_ = 0, end_ = 0, count_ = 0;
  std::uint32_t barriers_, ring_;
  std::uint64_t policy_;
  Source now_;
  std::uint32_t flags_ = 0;
  int inside_ = 0, entry_ = 0;
};

}  // namespace oscar::cuda
