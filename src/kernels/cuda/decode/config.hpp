#pragma once
// Compile-time shape of the decode kernel and the memory it plans with.

#include <cuda_bf16.h>

#include "../common/ptx.cuh"
#include "items.hpp"
#include "params.hpp"

namespace oscar::cuda {

template <int kHeadDimension, int kColumnTileCount>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDimension;        // 64, 128, 256
  static constexpr int kColumnTiles = kColumnTileCount;  // 1 or 2: 4 query rows (two digits each) a tile
  static constexpr int kRows = 4 * kColumnTiles;
  static constexpr int kNumWarps = kHeadDim == 256 ? 8 : 12;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kNumStages = 2;  // pages a warp keeps in flight; deeper rings only lengthen the queue to memory
  // Largest query in fixed point: 3 head_dim times it stays below 2^24, where float holds every integer.
  static constexpr float kQueryScale = kHeadDim == 256 ? 16256.0f : 32512.0f;
  static constexpr int kPairs = kHeadDim / 2;
  static constexpr int kKeySteps = kHeadDim / 32;    // MMAs a 16-token tile
  static constexpr int kValueTiles = kHeadDim / 32;  // 32-channel blocks

  static constexpr int kCodeBytes = 16 * kHeadDim;  // of one half
  static constexpr int kHalfBytes = kCodeBytes + 2 * kPageTokens;
  static constexpr int kPageBytes = 2 * kHalfBytes;
  static constexpr int kStageBytes = kPageBytes;
  // A window item is 8 K rows and 8 V rows, each padded by 16 bytes against bank conflicts: exactly a page's bytes.
  static constexpr int kWindowRowBytes = 2 * kHeadDim + 16;
  static_assert(2 * kWindowTokens * kWindowRowBytes == kPageBytes);

  // One prepared query group: digits as B fragments and the rows' floats.
  struct Prepared {
    std::uint32_t digits[kColumnTiles][kKeySteps][2][32];  // b0, b1 of each lane
    float4 row[kRows];  // logit per integer, 1.5 sum(q^) * that, sum(q') (all times scale log2 e), unused
  };
  // Piece of a row that one block computed; head_dim floats, then maximum (log2) and sum.
  struct Partial {
    float acc[kRows][kHeadDim];
    float2 max_sum[kRows];
  };
  struct Shared {
    alignas(128) std::uint8_t ring[kNumWarps][kNumStages][kStageBytes];
    alignas(16) float acc[kNumWarps][kRows][kHeadDim];
    float4 token[kNumWarps][kPageTokens];  // decoded parameters of the page in hand
    float middle[kNumWarps][kPageTokens];
    float2 max_sum[kNumWarps][kRows];
    std::uint64_t full[kNumWarps][kNumStages];
    // followed by the prefix sums of items [num_requests + 1]
  };
  // plan.cpp computes the same sizes without this header
  static_assert(sizeof(Prepared) == kColumnTiles * kKeySteps * 256 + kRows * 16);
  static_assert(sizeof(Partial) == kRows * kHeadDim * 4 + kRows * 8);
  static_assert(sizeof(Shared) == (kNumWarps * (kNumStages * kStageBytes + kRows * kHeadDim * 4 + kPageTokens * 20 +
                                                kRows * 8 + kNumStages * 8) +
                                   127) /
                                      128 * 128);
};

}  // namespace oscar::cuda
