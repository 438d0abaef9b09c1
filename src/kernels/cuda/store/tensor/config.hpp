#pragma once
// Compile-time shape of the tensor-core store and its shared memory.

#include <oscar/rotation.hpp>

#include "../../common/ptx.cuh"
#include "../params.hpp"

namespace oscar::cuda {

template <int kHeadDimension, Quantizer kRowQuantizer>
struct TensorStoreConfig {
  static constexpr int kHeadDim = kHeadDimension;  // 64, 128; the matrices of 256 do not fit shared memory
  static constexpr Quantizer kQuantizer = kRowQuantizer;
  static constexpr bool kFloatPair = kQuantizer == Quantizer::kMinMax;
  static constexpr bool kFeedback = kQuantizer == Quantizer::kFeedback;
  static constexpr int kGroupWarps = 4;  // warps of one tile of 64 tokens, 16 rows each
  static constexpr int kGroupThreads = 32 * kGroupWarps;
  static constexpr int kNumGroups = kFeedback ? 4 : 2;
  static constexpr int kNumThreads = kNumGroups * kGroupThreads;
  static constexpr int kBlocksPerSm = kFeedback ? 1 : 2;  // 16 warps an SM, 128 registers a thread
  // A = high + low in bfloat16, relative error 2^-17: a fitted transform mixes channels of very different size. Min/max
  // goes with orthogonal rotations, where the 2^-9 of `high` alone is nothing beside its steps.
  static constexpr bool kSplit = kQuantizer != Quantizer::kMinMax;

  static constexpr int kBlocks = kHeadDim / 16;  // of 16 channels: the depth of one product, the width of two
  static constexpr int kValues = 4 * kBlocks;    // a lane and row: channels 16 J + 4 t + {0..3}
  static constexpr int kMatrixVectors = kBlocks * kBlocks * 32;
  static constexpr int kUpperVectors = kBlocks * 32;  // see load_upper
  static constexpr int kCodeStride = kHeadDim + 16;   // bytes; rows fall on different banks
  static constexpr int kCodeBytes = 16 * kHeadDim;    // of a page half

  struct DescentMatrix {
    uint4 fragments[kFeedback ? kMatrixVectors : 1];  // float16, times -1/3
    uint4 upper[kFeedback ? kUpperVectors : 1];
  };
  struct Shared {
    uint4 transform_high[kMatrixVectors], transform_low[kSplit ? kMatrixVectors : 1];
    DescentMatrix feedback;                                // T
    DescentMatrix metric;                                  // M_ij / M_jj without its diagonal
    alignas(16) float diagonal[kFeedback ? kHeadDim : 4];  // M_jj
    alignas(16) float row_sum[kFeedback ? kHeadDim : 4];   // 1 M
    alignas(16) std::uint8_t codes[kNumGroups][kStorePageTokens * kCodeStride];
    std::int32_t slots[kNumGroups][kStorePageTokens];
  };
};

}  // namespace oscar::cuda
