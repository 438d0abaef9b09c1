#pragma once
// A tile's codes and parameters, from shared memory into pages (docs/format.md, "Page").

#include "config.hpp"

namespace oscar::cuda {

__device__ __forceinline__ std::uint8_t* page_half(const StoreParams& p, const StoreSide& side, int head, int page) {
  return side.pages + page * p.page_stride_bytes + head * p.head_stride_bytes;
}

template <typename Config>
__device__ __forceinline__ std::uint32_t four_codes(const std::uint8_t* s_codes, int row, int channel) {
  return *reinterpret_cast<const std::uint32_t*>(s_codes + row * Config::kCodeStride + channel);
}

template <typename Config, int kTokens>
__device__ __forceinline__ void pack_parameters(const StoreParams& p, const StoreSide& side, int head,
                                                const typename Config::Shared& s) {
  const int row = threadIdx.x;
  if (row >= kTokens || s.slots[row] < 0) return;
  const int slot = s.slots[row] % kStorePageTokens;
  std::uint8_t* first = page_half(p, side, head, s.slots[row] / kStorePageTokens) + Config::kCodeBytes;
  if constexpr (Config::kFloatPair) {
    reinterpret_cast<float*>(first)[slot] = s.parameters[row].x;
    reinterpret_cast<float*>(first)[kStorePageTokens + slot] = s.parameters[row].y;
  } else {
    first[slot] = static_cast<std::uint8_t>(static_cast<int>(s.parameters[row].x));
    first[kStorePageTokens + slot] = static_cast<std::uint8_t>(static_cast<int>(s.parameters[row].y));
  }
}

// A key word holds 16 channels of one token: no word has two writers. Neighbouring threads write neighbouring words.
template <typename Config, int kTokens>
__device__ __forceinline__ void pack_keys(const StoreParams& p, const StoreSide& side, int head,
                                          const typename Config::Shared& s) {
  for (int k = threadIdx.x; k < kTokens * Config::kHeadDim / 16; k += Config::kNumThreads) {
    const int t = k / 4 % 4, row = k / 16 * 4 % kTokens + k % 4, block = k / (4 * kTokens);
    if (s.slots[row] < 0) continue;
    const int slot = s.slots[row] % kStorePageTokens, channel = 64 * block + 4 * t;
    std::uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= four_codes<Config>(s.codes, row, channel + 16 * j) << (2 * j);
    auto* words = reinterpret_cast<std::uint32_t*>(page_half(p, side, head, s.slots[row] / kStorePageTokens));
    words[256 * block + (slot / 4 * 4 + t) * 4 + slot % 4] = word;
  }
}

// The tile is one whole page: a thread makes the words of 4 channels and 16 slots, 16 bytes.
template <typename Config>
__device__ __forceinline__ void pack_value_page(const StoreParams& p, const StoreSide& side, int head,
                                                const typename Config::Shared& s) {
  const int t = threadIdx.x % 4, channel = threadIdx.x / 4 * 4;
  if (channel >= Config::kHeadDim) return;
  std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int slot = 32 * (j / 2) + 8 * t + 2 * (j % 2);
    const std::uint32_t a = four_codes<Config>(s.codes, slot, channel),
                        b = four_codes<Config>(s.codes, slot + 1, channel);
    const std::uint32_t c = four_codes<Config>(s.codes, slot + 4, channel),
                        d = four_codes<Config>(s.codes, slot + 5, channel);
    // bytes of 4 slots by 4 channels, transposed
    const std::uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const std::uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    words[0] |= __byte_perm(ab_low, cd_low, 0x5410) << (2 * j);
    words[1] |= __byte_perm(ab_low, cd_low, 0x7632) << (2 * j);
    words[2] |= __byte_perm(ab_high, cd_high, 0x5410) << (2 * j);
    words[3] |= __byte_perm(ab_high, cd_high, 0x7632) << (2 * j);
  }
  auto* half = reinterpret_cast<uint4*>(page_half(p, side, head, s.slots[0] / kStorePageTokens));
  half[threadIdx.x] = make_uint4(words[0], words[1], words[2], words[3]);
}

// Any slots: a thread gathers its 4 channels of 16 slots while the page stays the same, then changes those bits alone.
// Another tile may hold other slots of the page, so words that are not whole change by atomics. `thread`: of at least
// head_dim that share the tile.
template <typename Config, int kTokens>
__device__ __forceinline__ void pack_value_slots(const StoreParams& p, const StoreSide& side, int head,
                                                 const std::uint8_t* s_codes, const std::int32_t* s_slots, int thread) {
  const int t = thread % 4, channel = thread / 4 * 4;
  if (channel >= Config::kHeadDim) return;
  std::uint32_t mask = 0, words[4] = {0, 0, 0, 0};
  int page = -1;
  const auto flush = [&] {
    if (mask == 0) return;
    auto* g_words = reinterpret_cast<std::uint32_t*>(page_half(p, side, head, page)) + 4 * thread;
    if (mask == ~0u) {
      *reinterpret_cast<uint4*>(g_words) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        atomicAnd(g_words + i, ~mask);
        atomicOr(g_words + i, words[i]);
      }
    }
    mask = words[0] = words[1] = words[2] = words[3] = 0;
  };
#pragma unroll 1
  for (int row = 0; row < kTokens; ++row) {
    if (s_slots[row] < 0) continue;
    const int slot = s_slots[row] % kStorePageTokens, row_page = s_slots[row] / kStorePageTokens;
    if (row_page != page) {
      flush();
      page = row_page;
    }
    if (slot / 8 % 4 != t) continue;
    const int j = 2 * (slot / 32) + slot / 2 % 2, shift = 8 * (slot % 2 + 2 * (slot / 4 % 2)) + 2 * j;
    const std::uint32_t codes = four_codes<Config>(s_codes, row, channel);
    mask |= 3u << shift;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] |= ((codes >> (8 * i)) & 3u) << shift;
  }
  flush();
}

}  // namespace oscar::cuda
