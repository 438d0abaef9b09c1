#pragma once
// Compile-time shape of the prefill kernel and its shared memory.

#include <cuda_fp16.h>

#include "layout.hpp"
#include "params.hpp"
#include "wgmma.cuh"

namespace oscar::cuda {

template <int kHeadDimension>
struct PrefillConfig {
  static constexpr int kHeadDim = kHeadDimension;               // 64, 128, 256
  static constexpr int kTileKeys = kHeadDim == 256 ? 64 : 128;  // keys of one step
  static constexpr int kTilePages = kTileKeys / kPageTokens;
  static constexpr int kStages = kHeadDim == 256 ? 2 : 3;
  static constexpr int kGroupRows = 64;  // of one consumer warpgroup
  static constexpr int kConsumers = kPrefillRows / kGroupRows;
  static constexpr int kNumThreads = 128 * (1 + kConsumers);
  // A thread starts with 168, and a block has no more than it started with: 88 + 2 208 = 3 168.
  static constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;
  static constexpr int kBlocks = kHeadDim / 64;  // 128-byte columns of a key or query tile
  static constexpr int kCodeBytes = 16 * kHeadDim, kHalfBytes = kCodeBytes + 2 * kPageTokens;
  static constexpr int kTileBytes = 2 * kTileKeys * kHeadDim;  // K or V
  static constexpr float kValueScale = 256.0f;  // keys and values in shared memory are 1 / 256 of the true ones

  struct Shared {
    alignas(1024) std::uint8_t query[kConsumers][2 * kGroupRows * kHeadDim];  // [block of 64 channels][row]
    alignas(1024) std::uint8_t key[kStages][kTileBytes];                      // [block of 64 channels][key]
    alignas(1024) std::uint8_t value[kStages][kTileBytes];                    // [page][channel], keys along a row
    __half parameters[2][kTilePages][2][2][kPageTokens];  // [parity of the tile][page][side][step, base][position]
    std::uint64_t full[kStages], empty[kStages];
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
};

}  // namespace oscar::cuda
