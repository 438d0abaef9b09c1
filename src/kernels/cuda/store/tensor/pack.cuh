#pragma once
// Codes of a warp's 16 rows from registers into pages (docs/format.md, "Page"). A lane holds a whole key word of each
// row and 64 channels. The rows of warp q of a tile are slots 8 q + g and 32 + 8 q + g: all 16 slots of value word q.

#include "../pack.cuh"
#include "encode.cuh"

namespace oscar::cuda {

template <typename Config>
__device__ __forceinline__ void store_parameters(std::uint8_t* page, int slot, float2 parameters) {
  std::uint8_t* first = page + Config::kCodeBytes;
  if constexpr (Config::kFloatPair) {
    reinterpret_cast<float*>(first)[slot] = parameters.x;
    reinterpret_cast<float*>(first)[kStorePageTokens + slot] = parameters.y;
  } else {
    first[slot] = static_cast<std::uint8_t>(static_cast<int>(parameters.x));
    first[kStorePageTokens + slot] = static_cast<std::uint8_t>(static_cast<int>(parameters.y));
  }
}

// Four codes of a block, one a byte, of rows g and g + 8.
template <typename Config>
__device__ __forceinline__ uint2 bytes_of(const PackedCodes<Config>& codes, int block) {
  const std::uint32_t first = __byte_perm(codes.at(4 * block), codes.at(4 * block + 1), 0x6240);
  const std::uint32_t second = __byte_perm(codes.at(4 * block + 2), codes.at(4 * block + 3), 0x6240);
  return make_uint2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

// Key words of rows g and g + 8; pages of rows that are not stored are null.
template <typename Config>
__device__ __forceinline__ void store_keys(const PackedCodes<Config>& codes, std::uint8_t* const (&page)[2],
                                           const int (&slot)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int u = 0; u < Config::kHeadDim / 64; ++u) {
    std::uint32_t word[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint2 four = bytes_of(codes, 4 * u + j);
      word[0] |= four.x << (2 * j);
      word[1] |= four.y << (2 * j);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (page[r] != nullptr)
        reinterpret_cast<std::uint32_t*>(page[r])[256 * u + (slot[r] / 4 * 4 + t) * 4 + slot[r] % 4] = word[r];
  }
}

// Value words `word` (0..3) of all channels of one page. Every lane has two codes of each word of its channels; lanes
// of equal t exchange halves until each has the whole words of a few channels.
template <typename Config>
__device__ __forceinline__ void store_value_words(const PackedCodes<Config>& codes, std::uint8_t* page, int word) {
  constexpr int kN = Config::kValues;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int shift = 8 * (g % 2 + 2 * (g / 4)) + 2 * (g / 2 % 2);
  std::uint32_t words[kN];
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const std::uint32_t pair = codes.at(n);
    words[n] = ((pair | pair >> 12) & 0x33u) << shift;
  }
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int half = kN >> (step + 1), other = 16 >> step;
    const bool upper = (lane & other) != 0;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const std::uint32_t sent = upper ? words[n] : words[n + half], kept = upper ? words[n + half] : words[n];
      words[n] = kept | __shfl_xor_sync(~0u, sent, other);
    }
  }
  constexpr int kOwn = kN / 8;  // channels first .. of the lane's
  const int first = kOwn * g, channel = 16 * (first / 4) + 4 * t + first % 4;
  auto* to = reinterpret_cast<std::uint32_t*>(page) + (channel / 4 * 4 + word) * 4 + channel % 4;
  if constexpr (kOwn == 4)
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  else
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}

// Codes of rows g and g + 8 as bytes, for pack_value_slots.
template <typename Config>
__device__ __forceinline__ void stage_codes(const PackedCodes<Config>& codes, std::uint8_t* s_codes,
                                            const int (&row)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) {
    const uint2 four = bytes_of(codes, block);
    *reinterpret_cast<std::uint32_t*>(s_codes + row[0] * Config::kCodeStride + 16 * block + 4 * t) = four.x;
    *reinterpret_cast<std::uint32_t*>(s_codes + row[1] * Config::kCodeStride + 16 * block + 4 * t) = four.y;
  }
}

}  // namespace oscar::cuda
