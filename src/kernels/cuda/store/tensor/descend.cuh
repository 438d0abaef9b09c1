#pragma once
// Rounds 16 rows channel by channel, each channel's change moving the ones after it, in blocks of 16: inside a block on
// the ordinary units in packed float16, from other blocks by tensor cores just before the block's turn. The same
// routine is error feedback (change = code - wanted, W = T) and a sweep of coordinate descent (change = new - old code,
// W = M_ij / M_jj off the diagonal).
//
// Wanted values and changes are in units of codes, 0..3; sums are in thirds of that, so that a saturating operation
// clamps them, and W carries the 1/3. Float16 moves a value by at most 2^-10, so it decides otherwise only within
// that of a tie, where both codes are as good. A code is computed as 1536 + code in float16, whose low two bits it is;
// a pair holds rows g and g + 8.

#include "matrices.cuh"

namespace oscar::cuda {

template <typename Config>
using Accumulators = float[Config::kBlocks][2][4];  // [block][tile]: {row g: c, c + 1; row g + 8: c, c + 1}
template <typename Config>
using Pairs = __half2[Config::kBlocks][4];  // [block]: the lane's four channels, rows g and g + 8
template <typename Config>
using Operands = std::uint32_t[Config::kBlocks][4];  // [block]: the same as the left operand of a product

// A lane's value n (channel 16 (n / 4) + 4 t + n % 4) of row g (r = 0) or g + 8 (r = 1).
template <typename Values>
__device__ __forceinline__ auto& value_at(Values& values, int r, int n) {
  return values[n / 4][n % 4 / 2][2 * r + n % 2];
}

// Two bits a code: 8 channels of row g in the low half of a word, of row g + 8 in the high half.
template <typename Config>
struct PackedCodes {
  std::uint32_t words[Config::kBlocks / 2];
  __device__ __forceinline__ std::uint32_t at(int n) const { return words[n / 8] >> (2 * (n % 8)) & 0x00030003u; }
  __device__ __forceinline__ void set_block(int block, const std::uint32_t (&code)[4]) {
    std::uint32_t four = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) four |= (code[c] & 0x00030003u) << (2 * c);
    words[block / 2] =
        block % 2 == 0 ? (words[block / 2] & 0xff00ff00u) | four : (words[block / 2] & 0x00ff00ffu) | four << 8;
  }
};

inline constexpr std::uint32_t kCodeBase = 0x66006600u;  // a pair of 1536 in float16

__device__ __forceinline__ __half2 code_pair(std::uint32_t code) { return half2_of(code | kCodeBase); }
// code - 1.5
__device__ __forceinline__ __half2 level_pair(std::uint32_t code) {
  return __hsub2(__hsub2(code_pair(code), half2_of(kCodeBase)), __float2half2_rn(1.5f));
}

// a[16 x 16]: this lane's four channels of both rows
__device__ __forceinline__ void pack_operand(const __half2 (&value)[4], std::uint32_t (&a)[4]) {
  const std::uint32_t v0 = bits_of(value[0]), v1 = bits_of(value[1]), v2 = bits_of(value[2]), v3 = bits_of(value[3]);
  a[0] = __byte_perm(v0, v1, 0x5410);
  a[1] = __byte_perm(v0, v1, 0x7632);
  a[2] = __byte_perm(v2, v3, 0x5410);
  a[3] = __byte_perm(v2, v3, 0x7632);
}

// acc = start + operands[0 .. kDepth) W[.., block]
template <typename Config, int kDepth>
__device__ __forceinline__ void multiply_column(const uint4* s_fragments, const Operands<Config>& a, int block,
                                                float (&acc)[2][4]) {
  const uint4* s_column = s_fragments + block * 32 + threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    const uint4 b = s_column[32 * Config::kBlocks * k];
    mma_f16_k16(acc[0], a[k][0], a[k][1], a[k][2], a[k][3], b.x, b.y);
    mma_f16_k16(acc[1], a[k][0], a[k][1], a[k][2], a[k][3], b.z, b.w);
  }
}

// W[a][column] twice, `row` = row a of a 4 x 4 piece
__device__ __forceinline__ __half2 weight_of(uint2 row, int column) {
  const __half2 pair = half2_of(column < 2 ? row.x : row.y);
  return column % 2 == 0 ? __low2half2(pair) : __high2half2(pair);
}

// One block: `value` is a third of what each channel would like, without the moves inside the block; `from` is what a
// change is measured from. kSweep: `from` is a code (1536 + code).
template <typename Config, bool kSweep>
__device__ __forceinline__ void settle_block(const uint4* s_upper, int block, __half2 (&value)[4],
                                             const __half2 (&from)[4], std::uint32_t (&code)[4], __half2 (&change)[4]) {
  const uint4* s_piece = s_upper + 32 * block + 2 * (threadIdx.x % 4);
  const uint4 own0 = s_piece[24], own1 = s_piece[25];
  const uint2 own[3] = {{own0.x, own0.y}, {own0.z, own0.w}, {own1.x, own1.y}};
  // Turn k settles the channels of lanes t = k; every lane computes, and only later lanes are moved, so that the last
  // turn settles all of them.
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    __half2 next[4] = {value[0], value[1], value[2], value[3]};
    __half2 clamped = __hadd2_sat(value[0], __float2half2_rn(0.0f));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const __half2 nearest = __hfma2(clamped, __float2half2_rn(3.0f), half2_of(kCodeBase));
      code[c] = bits_of(nearest);
      change[c] = __hsub2(kSweep ? nearest : __hsub2(nearest, half2_of(kCodeBase)), from[c]);
      if (c == 3) break;
      clamped = __hfma2_sat(change[c], weight_of(own[c], c + 1), next[c + 1]);
#pragma unroll
      for (int column = c + 2; column < 4; ++column)
        next[column] = __hfma2(change[c], weight_of(own[c], column), next[column]);
    }
    if (k == 3) break;
    const uint4 low = s_piece[8 * k], high = s_piece[8 * k + 1];
    const uint2 later[4] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const __half2 theirs = __shfl_sync(~0u, change[c], k, 4);
#pragma unroll
      for (int column = 0; column < 4; ++column)
        value[column] = __hfma2(theirs, weight_of(later[c], column), value[column]);
    }
  }
}

// wanted / 3 + the block's sums
__device__ __forceinline__ __half2 third_plus(__half2 wanted, const float (&acc)[2][4], int c) {
  return __hfma2(wanted, __float2half2_rn(1.0f / 3.0f), __floats2half2_rn(acc[c / 2][c % 2], acc[c / 2][2 + c % 2]));
}

template <typename Config, int kBlock>
__device__ __forceinline__ void feedback_block(const typename Config::DescentMatrix& s, const Pairs<Config>& wanted,
                                               Operands<Config>& change, PackedCodes<Config>& codes) {
  float acc[2][4] = {};
  multiply_column<Config, kBlock>(s.fragments, change, kBlock, acc);
  __half2 value[4], moves[4];
  std::uint32_t code[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) value[c] = third_plus(wanted[kBlock][c], acc, c);
  settle_block<Config, false>(s.upper, kBlock, value, wanted[kBlock], code, moves);
  pack_operand(moves, change[kBlock]);
  codes.set_block(kBlock, code);
  if constexpr (kBlock + 1 < Config::kBlocks) feedback_block<Config, kBlock + 1>(s, wanted, change, codes);
}

// Codes of `wanted` by feedback; `change` is room for their differences.
template <typename Config>
__device__ __forceinline__ void round_with_feedback(const typename Config::DescentMatrix& s,
                                                    const Pairs<Config>& wanted, Operands<Config>& change,
                                                    PackedCodes<Config>& codes) {
#pragma unroll
  for (int i = 0; i < Config::kBlocks / 2; ++i) codes.words[i] = 0;
  feedback_block<Config, 0>(s, wanted, change, codes);
}

// One pass of coordinate descent; error = codes - wanted, kept so.
template <typename Config>
__device__ __forceinline__ void sweep(const typename Config::DescentMatrix& s, const Pairs<Config>& wanted,
                                      Operands<Config>& error, PackedCodes<Config>& codes) {
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) {
    float acc[2][4] = {};
    multiply_column<Config, Config::kBlocks>(s.fragments, error, block, acc);
    __half2 value[4], from[4], moves[4];
    std::uint32_t code[4], packed[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      value[c] = third_plus(wanted[block][c], acc, c);
      from[c] = code_pair(codes.at(4 * block + c));
    }
    settle_block<Config, true>(s.upper, block, value, from, code, moves);
    pack_operand(moves, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) error[block][i] = bits_of(__hadd2(half2_of(error[block][i]), half2_of(packed[i])));
    codes.set_block(block, code);
  }
}

}  // namespace oscar::cuda
