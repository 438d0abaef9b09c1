#pragma once
// Compile-time shape of the prefill kernel, its number scales and its shared memory.

#include <cuda_fp16.h>

#include "layout.hpp"
#include "params.hpp"
#include "wgmma.cuh"

namespace oscar::cuda {

// The tensor cores read codes as they are, so that no key or value is rounded:
//   key    code 4^j 2^-24, the two bits where they lie in a float16 (a subnormal); j = channel / 16 % 4
//   query  u q' 4^(2 - j), u = scale log2(e): products come out as 2^-20 u q' code
//   value  (code - 1.5) 2^-9
// What a token's score has beside its codes, (offset / step - 1.5) sum(u q') + log2(value step) / step, is 16 more
// channels of the same product, in float16 parts that add up to 22 bits (key_terms, query_terms). What is left for a
// score is one multiply-add in float32: step of the key, and the page's mean.
inline constexpr float kLevelSpacing = 0.9957f;  // distance of neighbouring levels (oscar/codec.hpp)
inline constexpr float kLog2OfLevelSpacing = -0.00621698f;
inline constexpr float kScoreUnit = 1048576.0f;     // 2^20
inline constexpr float kValueUnit = 1.0f / 512.0f;  // 2^-9
inline constexpr float kInverseStepUnit = 16.0f;    // row 1 / step of a value tile: its second part stays normal
__host__ __device__ constexpr float query_factor(int j) {
  return j == 0 ? 16.0f : j == 1 ? 4.0f : j == 2 ? 1.0f : 0.25f;
}

template <int kHeadDimension>
struct PrefillConfig {
  static constexpr int kHeadDim = kHeadDimension;  // 64, 128, 256
  static constexpr int kTileKeys = prefill_tile_keys(kHeadDim);
  static constexpr int kTilePages = kTileKeys / kPageTokens;
  static constexpr int kStages = 2;      // of expanded tiles
  static constexpr int kStepStages = 4;  // a tile's are read after its products, when the key stage is free already
  static constexpr int kRawStages = kHeadDim == 256 ? 2 : 4;  // of tiles as they lie in memory
  static constexpr int kGroupRows = 64;                       // of one consumer warpgroup
  static constexpr int kConsumers = kPrefillRows / kGroupRows;
  static constexpr int kNumThreads = 128 * (1 + kConsumers);  // one warpgroup expands pages
  // A thread starts with 168, and a block has no more than it started with: 72 + 2 216 = 3 168.
  static constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
  static constexpr int kBlocks = kHeadDim / 64;  // 128-byte columns of a key or query tile
  static constexpr int kCodeBytes = 16 * kHeadDim, kHalfBytes = kCodeBytes + 2 * kPageTokens;
  static constexpr int kValueRows = kHeadDim + kExtraRows;  // of a value tile, 128 bytes each
  static constexpr int kKeyBytes = prefill_key_bytes(kHeadDim), kValueBytes = prefill_value_bytes(kHeadDim);
  static constexpr int kMeanPages = prefill_mean_pages(kHeadDim), kMeansBytes = prefill_means_bytes(kHeadDim);
  static constexpr int kMeanTermStride = kGroupRows + 8;  // floats: lanes of other pages meet other banks

  struct Shared {
    alignas(1024) std::uint8_t query[kConsumers][2 * kGroupRows * kHeadDim];  // [block of 64 channels][row]
    alignas(1024) std::uint8_t key[kStages][kKeyBytes];
    alignas(1024) std::uint8_t value[kStages][kValueBytes];
    alignas(1024) std::uint8_t means[kMeansBytes];
    alignas(128) std::uint8_t raw[kRawStages][kTilePages][2 * kHalfBytes];  // key half, value half
    alignas(256) std::uint8_t terms[kStages][prefill_term_bytes(kHeadDim)];
    alignas(16) float steps[kStepStages][4 * step_row(kTileKeys)];
    alignas(16) std::int8_t log_weights[kStepStages][kTileKeys];  // with a soft cap: code of log2(value step)
    float mean_terms[kConsumers][kMeanPages][kMeanTermStride];
    std::uint64_t key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
    std::uint64_t raw_full[kRawStages], raw_empty[kRawStages], means_full, means_empty;
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
};

}  // namespace oscar::cuda
