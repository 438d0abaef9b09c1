#pragma once
// Compile-time shape of the store kernel and its shared memory.

#include <oscar/rotation.hpp>

#include "params.hpp"

namespace oscar::cuda {

template <int kHeadDimension, Quantizer kRowQuantizer>
struct StoreConfig {
  static constexpr int kHeadDim = kHeadDimension;  // 64, 128, 256
  static constexpr Quantizer kQuantizer = kRowQuantizer;
  static constexpr bool kFloatPair = kQuantizer == Quantizer::kMinMax;
  static constexpr int kNumWarps = 8;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kBlocksPerSm = kHeadDim == 256 ? 1 : 2;  // 256 needs up to 255 registers a thread
  static constexpr int kWarpRows = 8;
  static constexpr int kTileRows = kNumWarps * kWarpRows;  // tokens of one tile: a page when it is aligned
  static_assert(kTileRows == kStorePageTokens);

  // Encoding layout of a warp's 8 rows: lane 4k + t holds channels 8n + k of rows 2t and 2t + 1. Eight lanes a row are
  // the eight partial sums of the format, and it is the accumulator layout of m16n8 tensor-core products.
  static constexpr int kChannels = kHeadDim / 8;  // a lane and row
  // Row stride in floats: rows 2t and lanes k then fall on banks 8t + k, no conflicts.
  static constexpr int kRowStride = kHeadDim + 4;
  static constexpr int kCodeStride = kHeadDim + 16;  // bytes, likewise
  static constexpr int kCodeBytes = 16 * kHeadDim;   // of a page half
  static constexpr int kBuffers = kQuantizer == Quantizer::kFeedback ? 2 : 1;

  struct Shared {
    float rows[kNumWarps][kBuffers][kWarpRows * kRowStride];
    alignas(16) std::uint8_t codes[kTileRows * kCodeStride];
    std::int32_t slots[kTileRows];
    float2 parameters[kTileRows];  // scale and zero, or the two codes
  };
};

}  // namespace oscar::cuda
