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
  static constexpr int kMaxRows = rows_at_once(kHeadDim, kColumnTiles);
  static_assert(kMaxRows <= kMaxRowsAtOnce);
  // Largest query in fixed point: a score's digits then stay inside the accumulators' biases (history.cuh).
  static constexpr float kQueryScale = kHeadDim == 256 ? 16256.0f : 32512.0f;
  static constexpr int kPairs = kHeadDim / 2;
  static constexpr int kKeySteps = kHeadDim / 32;    // MMAs a 16-token tile
  static constexpr int kValueTiles = kHeadDim / 32;  // 32-channel blocks

  static constexpr int kCodeBytes = 16 * kHeadDim;  // of one half
  static constexpr int kHalfBytes = kCodeBytes + 2 * kPageTokens;
  static constexpr int kPageBytes = 2 * kHalfBytes;
  // A window item is 8 K rows and 8 V rows, each padded by 16 bytes against bank conflicts: exactly a page's bytes.
  static constexpr int kWindowRowBytes = 2 * kHeadDim + 16;
  static_assert(2 * kWindowTokens * kWindowRowBytes == kPageBytes);
  static_assert(kPageBytes == page_bytes(kHeadDim));

  // Part of a row that one warp or one block computed. In the workspace, where blocks hand it over, a word of zero is
  // not written yet.
  struct Part {
    float acc[kRows][kHeadDim];
    float2 max_sum[kRows];
  };
  static_assert(sizeof(Part) == part_bytes(kHeadDim, kColumnTiles));
  static_assert(kNumStages * kPageBytes >= sizeof(Part));  // a warp's last part lies in its ring

  // What a row's queries become.
  struct alignas(16) RowData {
    // Sixteen-bit fixed point of kRows vectors, two digits, as b0, b1 of each lane: the queries, then the turned
    // queries that the stream reads, at the end the INT2 part.
    std::uint32_t digits[kColumnTiles][kKeySteps][2][32];
    alignas(16) float digit_step[kRows];
    std::uint16_t query[kRows][kHeadDim + 8];  // BF16, as given
    union {
      float2 coefficients[kRows][kPairs];  // the page-mean term's alpha, beta, times a power of two
      float product[kRows][kHeadDim];      // at the end: the INT2 part turned back
    };
    float4 factors[kRows];    // score_factors
    float term_scale[kRows];  // of the coefficients' power of two
    float term_base[kRows];   // the key offset's centre times the query
    float offsets[4];         // centre and step of the keys' and of the values' 8-bit offsets
  };

  // A head's matrix as the products read it.
  struct Matrix {
    uint4 tiles[kHeadDim / 16][kKeySteps][2][32];  // A operands: output block, input step, digit, lane
    float step[kHeadDim];                          // of each output channel's fixed point
  };
  static_assert(sizeof(Matrix) == matrix_bytes(kHeadDim));
  static constexpr bool kKeepsMatrix = keeps_matrix(kHeadDim);

  // Warps that hold a part of a row; whether the last one's ends inside its range.
  struct Parts {
    std::int16_t first, last;
    bool ends_inside;
  };

  struct Shared {
    alignas(128) std::uint8_t ring[kNumWarps][kNumStages][kPageBytes];
    // Parts that end inside a warp's range: the INT2 part of row i at 2 i, its window part at 2 i + 1. Before the
    // stream: Scratch.
    alignas(16) Part parts[2 * kMaxRows];
    float4 token[kNumWarps][kPageTokens];  // decoded parameters of the page in hand
    float middle[kNumWarps][kPageTokens];
    alignas(16) float2 angles[kNumWarps][kPairs];  // of the next sixteen pages
    RowData data[kMaxRows];
    alignas(16) std::uint8_t
        matrix[kKeepsMatrix ? sizeof(Matrix) : 16];           // of the pass's first head: the keys', then the values'
    alignas(16) std::uint32_t fine[2][kHeadDim / 16][32][4];  // A operands of the angles of pages 0..15
    Part kept;                                                // of the block's first row, if an earlier block began it
    float2 history_max_sum[kMaxRows][kRows];
    std::uint64_t full[kNumWarps][kNumStages];
    Row kept_row;
    BlockShare share;
    Parts parts_of[2 * kMaxRows];
    int has_history;  // of any row of the pass
  };
  static_assert(sizeof(Shared) == decode_shared_bytes(kHeadDim, kColumnTiles));

  struct Scratch {
    float mean[kMaxRows * kRows][kHeadDim];    // a copy a query row: whoever prepares the row reads it alone
    float product[kMaxRows][kRows][kHeadDim];  // q A_k^{-T}
  };
  static_assert(sizeof(Scratch) <= 2 * kMaxRows * sizeof(Part));
};

}  // namespace oscar::cuda
