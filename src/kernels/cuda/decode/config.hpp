#pragma once
// Compile-time shape of the decode kernel and its shared memory.

#include <cuda_bf16.h>

#include "../common/ptx.cuh"
#include "geometry.hpp"
#include "items.hpp"
#include "params.hpp"

namespace oscar::cuda {

template <int kHeadDimension, int kColumnTileCount>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDimension;        // 64, 128, 256
  static constexpr int kColumnTiles = kColumnTileCount;  // 1 or 2: 4 query rows (two digits each) a tile
  static constexpr int kRows = 4 * kColumnTiles;
  static constexpr int kNumWarps = decode_warps(kHeadDim, kColumnTiles);
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kNumStages = decode_stages(kHeadDim);  // pages a warp keeps in flight
  // Largest query in fixed point: a score's digits then stay inside the accumulators' biases (history.cuh).
  static constexpr float kQueryScale = kHeadDim == 256 ? 16256.0f : 32512.0f;
  static constexpr int kPairs = kHeadDim / 2;
  static constexpr int kTermPages = term_pages(kColumnTiles);  // pages whose terms are computed together
  static constexpr int kKeySteps = kHeadDim / 32;              // MMAs a 16-token tile
  static constexpr int kValueTiles = kHeadDim / 32;            // 32-channel blocks

  static constexpr int kCodeBytes = 16 * kHeadDim;  // of one half
  static constexpr int kHalfBytes = kCodeBytes + 2 * kPageTokens;
  static constexpr int kPageBytes = 2 * kHalfBytes;
  // A window item is 8 K rows and 8 V rows, each padded by 16 bytes against bank conflicts: exactly a page's bytes.
  static constexpr int kWindowRowBytes = 2 * kHeadDim + 16;
  static_assert(2 * kWindowTokens * kWindowRowBytes == kPageBytes);
  static_assert(kPageBytes == page_bytes(kHeadDim));

  // Part of a row that one block computed and another one finishes. Lies in the workspace; a word of zero is not
  // written yet.
  struct Part {
    float acc[kRows][kHeadDim];
    float2 max_sum[kRows];
  };
  static_assert(sizeof(Part) == part_bytes(kHeadDim, kColumnTiles));

  struct Shared {
    alignas(128) std::uint8_t ring[kNumWarps][kNumStages][kPageBytes];
    alignas(16) float acc[kNumWarps][kRows][kHeadDim];  // the warps' parts of a row or of a product
    float4 token[kNumWarps][kPageTokens];               // decoded parameters of the page in hand
    float middle[kNumWarps][kPageTokens];
    alignas(16) float columns[kHeadDim][kRows];  // operand of a product with a head's matrix
    float kept[kRows][kHeadDim];                 // part of the block's first row, if an earlier block began it
    std::uint32_t digits[kColumnTiles][kKeySteps][2][32];     // query in fixed point: b0, b1 of each lane
    std::uint16_t query[kRows][kHeadDim + 8];                 // BF16, as given
    alignas(16) float2 coefficients[kRows][kPairs];           // the page-mean term's alpha, beta, times a power of two
    alignas(16) std::uint32_t fine[2][kHeadDim / 16][32][4];  // A operands of the angles of pages 0..15
    float terms[kTermPages + 16][kRows];
    float mean[kHeadDim];
    float4 factors[kRows];    // score_factors
    float term_scale[kRows];  // of the coefficients' power of two
    float term_base[kRows];   // the key offset's centre times the query
    float2 max_sum[kNumWarps][kRows];
    float2 kept_max_sum[kRows];
    std::uint64_t full[kNumWarps][kNumStages];
    float offsets[4];  // centre and step of the keys' and of the values' 8-bit offsets
    Row row[kNumWarps], next_row[kNumWarps], kept_row;
    // followed by Requests: prefix [num_requests + 1], length [num_requests]
  };
  static_assert(sizeof(Shared) == decode_shared_bytes(kHeadDim, kColumnTiles));
};

}  // namespace oscar::cuda
