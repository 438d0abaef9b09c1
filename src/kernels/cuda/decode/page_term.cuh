#pragma once
// The page-mean term of the pages that a warp is about to read: c(page, row) = sum over channel pairs of alpha
// cos(angle of the page) + beta sin(..). Pages go in sixteens: alpha and beta are turned by the angle of a sixteen's
// first page (FP32), then one product [16 pages x head_dim] [head_dim x rows] with a table that is the same for every
// sixteen (fill_page_angles). FP16 high and low parts of both factors keep 22 bits: the term is large (hundreds) on
// models with key biases. 4 head_dim bytes from L2 and about 150 instructions a sixteen.
//
// MMA lane (g, t): rows are pages g and g + 8, columns 2r, 2r + 1 the high and low part of query row r. A step of 16
// channels is 8 pairs; in steps 2m, 2m + 1 lane t takes the four pairs 16 m + 4 t .., so that its B operands are 16
// neighbouring bytes.

#include <cuda_fp16.h>

#include "../common/copy.cuh"
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

// Terms of sixteen pages, by one warp: lane (g, t) holds those of pages g and g + 8 for row t of each column tile.
template <typename Config>
class PageTerms {
 public:
  // Starts the copy of a sixteen's angles into `angles`, this warp's in shared memory; coarse [sixteens, kPairs].
  static __device__ __forceinline__ void load(const float2* coarse, int sixteen, float2* angles) {
    const float2* from = coarse + sixteen * Config::kPairs;
    for (int pair = 2 * (fresh_thread() % 32); pair < Config::kPairs; pair += 64)
      copy_by_thread<16>(angles + pair, from + pair);
  }
  // Terms of the sixteen in `angles`, without the key offset's centre.
  __device__ __forceinline__ void compute(const typename Config::Shared& shared, const typename Config::RowData& data,
                                          const float2* angles) {
    const int lane = fresh_thread() % 32, g = lane / 4, t = lane % 4;
    float c[Config::kColumnTiles][4] = {};
#pragma unroll 2
    for (int m = 0; m < Config::kPairs / 16; ++m) {
      // four neighbouring pairs of row g / 2 of each tile: even lanes g take the high part, odd ones the low part
      const auto* turn = reinterpret_cast<const float4*>(angles + 16 * m + 4 * t);
      const float4 turn01 = turn[0], turn23 = turn[1];
      std::uint32_t b[Config::kColumnTiles][4];
#pragma unroll
      for (int n = 0; n < Config::kColumnTiles; ++n) {
        const auto* from = reinterpret_cast<const float4*>(&data.coefficients[4 * n + g / 2][16 * m + 4 * t]);
        const float4 x01 = from[0], x23 = from[1];
        b[n][0] = turned(x01.x, x01.y, turn01.x, turn01.y, g % 2 != 0);
        b[n][1] = turned(x01.z, x01.w, turn01.z, turn01.w, g % 2 != 0);
        b[n][2] = turned(x23.x, x23.y, turn23.x, turn23.y, g % 2 != 0);
        b[n][3] = turned(x23.z, x23.w, turn23.z, turn23.w, g % 2 != 0);
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint4 a0 = *reinterpret_cast<const uint4*>(shared.fine[part][2 * m][lane]);
        const uint4 a1 = *reinterpret_cast<const uint4*>(shared.fine[part][2 * m + 1][lane]);
#pragma unroll
        for (int n = 0; n < Config::kColumnTiles; ++n) {
          mma_f16_k16(c[n], a0.x, a0.y, a0.z, a0.w, b[n][0], b[n][1]);
          mma_f16_k16(c[n], a1.x, a1.y, a1.z, a1.w, b[n][2], b[n][3]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Config::kColumnTiles; ++n) {
      const float scale = data.term_scale[4 * n + t];
      term_[n][0] = (c[n][0] + c[n][1]) * scale;
      term_[n][1] = (c[n][2] + c[n][3]) * scale;
    }
    __syncwarp();  // the angles may be replaced
  }
  // Of row t of tile n.
  __device__ __forceinline__ float of_page(int page, int n) const {
    return __shfl_sync(~0u, page % 16 < 8 ? term_[n][0] : term_[n][1], 4 * (page % 8) + fresh_lane() % 4);
  }

 private:
  static __device__ __forceinline__ int fresh_lane() { return threadIdx.x % 32; }
  // (alpha, beta) turned by the angle, as FP16, or what that rounding leaves.
  static __device__ __forceinline__ std::uint32_t turned(float alpha, float beta, float cosine, float sine, bool low) {
    const SplitPair split(alpha * cosine + beta * sine, beta * cosine - alpha * sine);
    return low ? split.low : split.high;
  }

  float term_[Config::kColumnTiles][2];
};

}  // namespace oscar::cuda
