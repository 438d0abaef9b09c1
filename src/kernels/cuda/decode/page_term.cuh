#pragma once
// The page-mean term of every page of a row, before the loop over its pages: c(page, row) = sum over channel pairs of
// alpha cos(angle of the page) + beta sin(..). Pages go in sixteens: alpha and beta are turned by the angle of a
// sixteen's first page (FP32), then one product [16 pages x head_dim] [head_dim x rows] with a table that is the same
// for every sixteen. FP16 high and low parts of both factors keep 22 bits: the term is large (hundreds) on models with
// key biases. 4 head_dim bytes from L2 and about 150 instructions a sixteen.
//
// MMA lane (g, t): rows are pages g and g + 8, columns 2r, 2r + 1 the high and low part of query row r. A step of 16
// channels is 8 pairs; in steps 2m, 2m + 1 lane t takes the four pairs 16 m + 4 t .., so that its B operands are 16
// neighbouring bytes.

#include <cuda_fp16.h>

#include "config.hpp"

namespace oscar::cuda {

__device__ __forceinline__ std::uint32_t half_bits(__half2 x) { return *reinterpret_cast<const std::uint32_t*>(&x); }

// (x, y) as FP16, and what the rounding left.
struct SplitPair {
  std::uint32_t high, low;
  __device__ __forceinline__ SplitPair(float x, float y) {
    const __half2 rounded = __floats2half2_rn(x, y);
    high = half_bits(rounded);
    low = half_bits(__floats2half2_rn(x - __low2float(rounded), y - __high2float(rounded)));
  }
};

// shared.fine: the A operands of pages 0..15, by the whole block, once. angles [16 + sixteens, head_dim / 2, 2].
template <typename Config>
class FineAngles {
  static constexpr int kAThread = (16 * Config::kPairs + Config::kNumThreads - 1) / Config::kNumThreads;

 public:
  __device__ __forceinline__ explicit FineAngles(const float2* angles) {
#pragma unroll
    for (int i = 0; i < kAThread; ++i)
      angle_[i] = __ldg(angles + min(static_cast<int>(threadIdx.x) + i * Config::kNumThreads, 16 * Config::kPairs - 1));
  }
  __device__ __forceinline__ void store(typename Config::Shared& shared) const {
#pragma unroll
    for (int i = 0; i < kAThread; ++i) {
      const int k = threadIdx.x + i * Config::kNumThreads, page = k / Config::kPairs, pair = k % Config::kPairs;
      if (page >= 16) break;
      const SplitPair split(angle_[i].x, angle_[i].y);
      const int step = pair / 16 * 2 + pair % 4 / 2, lane = 4 * (page % 8) + pair % 16 / 4;
      const int word = page / 8 + 2 * (pair % 2);
      shared.fine[0][step][lane][word] = split.high;
      shared.fine[1][step][lane][word] = split.low;
    }
  }

 private:
  float2 angle_[kAThread];
};

// Terms of pages [first, end) into shared.terms, from page first / 16 * 16 on; the block's warps take sixteens in turn.
template <typename Config>
class PageTerms {
  static constexpr int kPairsALane = Config::kPairs / 32;

 public:
  // Starts the loads of this warp's first sixteen. last: last page of the row.
  __device__ __forceinline__ void load(const float2* angles, int first, int last) {
    const int thread = fresh_thread();
    angles_ = angles + 16 * Config::kPairs + kPairsALane * (thread % 32);
    last_ = last / 16;
    load_sixteen(first / 16 + thread / 32);
  }
  // Uses shared.acc[warp].
  __device__ __forceinline__ void compute(typename Config::Shared& shared, int first, int end) {
    const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    auto* operand = reinterpret_cast<std::uint32_t*>(shared.acc[warp]);  // [2 rows, pairs], 16-byte chunks swizzled
    const auto chunk = [](int column, int c) { return column * Config::kPairs + 4 * (c ^ (column % 8)); };
#pragma unroll 1
    for (int sixteen = warp; 16 * (first / 16 + sixteen) < end; sixteen += Config::kNumWarps) {
      if (sixteen > warp) __syncwarp();
#pragma unroll
      for (int row = 0; row < Config::kRows; ++row)
#pragma unroll
        for (int j = 0; j < kPairsALane; ++j) {
          const int pair = kPairsALane * lane + j;
          const float2 x = shared.coefficients[row][pair], turn = angle_[j];
          const SplitPair split(x.x * turn.x + x.y * turn.y, x.y * turn.x - x.x * turn.y);
          operand[chunk(2 * row, pair / 4) + pair % 4] = split.high;
          operand[chunk(2 * row + 1, pair / 4) + pair % 4] = split.low;
        }
      __syncwarp();
      load_sixteen(first / 16 + sixteen + Config::kNumWarps);
      float c[Config::kColumnTiles][4] = {};
#pragma unroll 4
      for (int m = 0; m < Config::kPairs / 16; ++m) {
        uint4 b[Config::kColumnTiles];
#pragma unroll
        for (int n = 0; n < Config::kColumnTiles; ++n)
          b[n] = *reinterpret_cast<const uint4*>(operand + chunk(8 * n + g, 4 * m + t));
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint4 a0 = *reinterpret_cast<const uint4*>(shared.fine[part][2 * m][lane]);
          const uint4 a1 = *reinterpret_cast<const uint4*>(shared.fine[part][2 * m + 1][lane]);
#pragma unroll
          for (int n = 0; n < Config::kColumnTiles; ++n) {
            mma_f16_k16(c[n], a0.x, a0.y, a0.z, a0.w, b[n].x, b[n].y);
            mma_f16_k16(c[n], a1.x, a1.y, a1.z, a1.w, b[n].z, b[n].w);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < Config::kColumnTiles; ++n) {
        const float scale = shared.term_scale[4 * n + t];
        shared.terms[16 * sixteen + g][4 * n + t] = (c[n][0] + c[n][1]) * scale;
        shared.terms[16 * sixteen + g + 8][4 * n + t] = (c[n][2] + c[n][3]) * scale;
      }
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void load_sixteen(int sixteen) {
    const float2* from = angles_ + max(min(sixteen, last_), 0) * Config::kPairs;
#pragma unroll
    for (int j = 0; j < kPairsALane; ++j) angle_[j] = __ldg(from + j);
  }

  const float2* angles_;
  int last_;
  float2 angle_[kPairsALane];
};

}  // namespace oscar::cuda
