#pragma once
// Hands a warp its items in order, index, index + warps, ..., and starts their copies into its ring. Each lane holds
// the source of one of the next 32 items, and the 32 after them are on their way: under load a block-table entry takes
// microseconds, longer than an item.

#include "../common/copy.cuh"
#include "config.hpp"
#include "segments.cuh"

namespace oscar::cuda {

template <typename Config>
class Loader {
 public:
  __device__ __forceinline__ Loader(const DecodeParams& p, const DecodePlan& plan, const Requests& requests,
                                    typename Config::Shared& shared, int index, int end)
      : p_(p),
        plan_(plan),
        requests_(requests),
        index_(index),
        end_(end),
        barriers_(shared_address(shared.full[threadIdx.x / 32])),
        ring_(shared_address(shared.ring[threadIdx.x / 32])),
        policy_(evict_first_policy()) {
#pragma unroll 1
    for (int batch = 0; batch < 2; ++batch) {
      now_ = next_;
      next_ = source_of(index + Config::kNumWarps * (32 * batch + static_cast<int>(threadIdx.x) % 32));
    }
  }
  // Whether the next item may be copied before the kernels ahead have finished: history never holds the tokens of this
  // step, the window does.
  __device__ __forceinline__ bool next_is_early() const {
    return index_ >= end_ || (__shfl_sync(~0u, now_.high, count_ % 32) & kWindow) == 0;
  }
  // Starts the copy of the next item into stage `stage`.
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
    index_ += Config::kNumWarps;
    if (++count_ % 32 == 0) {
      now_ = next_;
      next_ = source_of(index_ + Config::kNumWarps * (32 + static_cast<int>(threadIdx.x) % 32));
    }
  }

 private:
  // Offset of an item from the pages (bytes) or the window (elements), 48 bits, and for a window item the first and
  // last of its tokens that exist.
  struct Source {
    std::uint32_t low = 0, high = 0;
  };
  static constexpr std::uint32_t kWindow = 1u << 31, kOffsetMask = 0xFFFFFFu;
  static constexpr int kFirstShift = 24, kLastShift = 27;

  __device__ __forceinline__ Source source_of(int index) const {
    Source source;
    if (index >= end_) return source;
    const Row row = find_row(p_, plan_, requests_, index);
    const int page = index - row.begin, item = page - row.items.num_pages;
    std::int64_t offset;
    if (item < 0) {
      offset =
          p_.block_table[row.request * p_.block_table_stride + row.items.first_page + page] * p_.page_stride_bytes +
          row.head * p_.head_stride_bytes;
    } else {
      const int token = row.items.window_token(item), last = min(row.items.length - 1 - token, kWindowTokens - 1);
      const int floor = item < row.items.num_sink_items ? 0 : row.items.length - p_.query_length - p_.recent + 1;
      const int block = token / p_.window_block;
      offset = p_.window_table[row.request * p_.window_table_stride + block] * p_.window_block_stride +
               (token - block * p_.window_block) * p_.window_token_stride + row.head * p_.window_head_stride;
      source.high = kWindow | static_cast<std::uint32_t>(min(max(floor - token, 0), last)) << kFirstShift |
                    static_cast<std::uint32_t>(last) << kLastShift;
    }
    source.low = static_cast<std::uint32_t>(offset);
    source.high |= static_cast<std::uint32_t>(offset >> 32) & kOffsetMask;
    return source;
  }

  const DecodeParams& p_;
  const DecodePlan& plan_;
  const Requests& requests_;
  int index_, end_, count_ = 0;
  std::uint32_t barriers_, ring_;
  std::uint64_t policy_;
  Source now_, next_;
};

}  // namespace oscar::cuda
