#pragma once
// All query rows of a pass times a head's [head_dim, head_dim] matrix: out = rows matrix, computed as matrix^T rows^T
// on the integer tensor cores, a warp 16 output channels. Both are 16-bit fixed point, two signed digits: a step for
// each output channel of the matrix, a step for each row. The matrix of the pass's first head waits in shared memory,
// 32 KB at head_dim 128; those of other heads, and all at head_dim 256, come from L2.
//
// Not inlined: under load a miss of the instruction cache takes as long as one of data, and the end of a pass finds
// here what its beginning has run.
//
// MMA lane (g, t): A rows are output channels g, g + 8 of a block; B columns 2 r, 2 r + 1 are the digits of query row
// r, as in history.cuh; C has both channels of row t.

#include "history.cuh"

namespace oscar::cuda {

inline constexpr float kDigitScale = 32512.0f;  // largest value: digits 127 and 0

// Fixed point of four neighbouring channels: their high and their low digits, a byte each. `sum` gets the values'.
__device__ __forceinline__ uint2 digits_of(const float (&value)[4], float factor, float& sum) {
  std::uint32_t high_word = 0, low_word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int fixed = __float2int_rn(value[i] * factor);
    const int high = (fixed + 128) >> 8, low = fixed - 256 * high;
    high_word |= (static_cast<std::uint32_t>(high) & 0xFFu) << (8 * i);
    low_word |= (static_cast<std::uint32_t>(low) & 0xFFu) << (8 * i);
    sum += static_cast<float>(fixed);
  }
  return make_uint2(high_word, low_word);
}
// Where the digits of channels `channel` .. + 3 of query row `row` lie.
template <typename Config>
__device__ __forceinline__ void store_digits(typename Config::RowData& data, int row, int channel, uint2 digits) {
  auto& fragment = data.digits[row / 4][channel / 32][channel / 16 % 2];
  fragment[8 * (row % 4) + channel / 4 % 4] = digits.x;
  fragment[8 * (row % 4) + 4 + channel / 4 % 4] = digits.y;
}

// A query row held by a warp, four neighbouring channels a lane and vector; lanes past the row hold zeros.
template <typename Config>
struct WarpRow {
  static constexpr int kVectors = Config::kHeadDim <= 128 ? 1 : Config::kHeadDim / 128;
  float value[kVectors][4];

  static __device__ __forceinline__ int channel(int vector) { return 128 * vector + 4 * (fresh_thread() % 32); }
  static __device__ __forceinline__ bool exists(int vector) { return channel(vector) < Config::kHeadDim; }
  // Fixed point of the row as the operand of a product, into data.digits and digit_step.
  __device__ __forceinline__ void to_digits(typename Config::RowData& data, int row) const {
    float largest = 0, unused = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(value[v][i]));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float step = largest > 0 ? largest * (1.0f / kDigitScale) : 1.0f, factor = __fdividef(1.0f, step);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (exists(v)) store_digits<Config>(data, row, channel(v), digits_of(value[v], factor, unused));
    if (fresh_thread() % 32 == 0) data.digit_step[row] = step;
  }
};

template <typename Config>
__device__ __forceinline__ const typename Config::Matrix* matrix_of(const std::uint8_t* matrices, int head) {
  using Matrix = typename Config::Matrix;
  return reinterpret_cast<const Matrix*>(matrices + static_cast<std::int64_t>(head) * sizeof(Matrix));
}

// shared.data[row].digits times the matrices of the rows' heads: channel c of query row r of row s goes to
// out[s stride + r head_dim + c]. first: the matrix of the first head.
template <typename Config>
__device__ __noinline__ void multiply(const std::uint8_t* matrices, const typename Config::Matrix* first,
                                      const typename Config::Shared& shared, float* out, int stride) {
  constexpr int kSteps = Config::kKeySteps, kBlocks = Config::kHeadDim / 16;
  const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int num_rows = shared.share.num_rows;
#pragma unroll 1
  for (int block = warp; block < kBlocks; block += Config::kNumWarps) {
    int head = -1;
    float step0 = 0, step1 = 0;
    uint4 a[kSteps][2];
#pragma unroll 1
    for (int slot = 0; slot < num_rows; ++slot) {
      if (shared.share.row[slot].head != head) {
        head = shared.share.row[slot].head;
        const auto* matrix = slot == 0 ? first : matrix_of<Config>(matrices, head);
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
          for (int digit = 0; digit < 2; ++digit) a[k][digit] = matrix->tiles[block][k][digit][lane];
        step0 = matrix->step[16 * block + g], step1 = matrix->step[16 * block + g + 8];
      }
      const auto& data = shared.data[slot];
#pragma unroll
      for (int n = 0; n < Config::kColumnTiles; ++n) {
        std::int32_t high[4] = {}, low[4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const std::uint32_t b0 = data.digits[n][k][0][lane], b1 = data.digits[n][k][1][lane];
          mma_s8s8(high, a[k][0].x, a[k][0].y, a[k][0].z, a[k][0].w, b0, b1);
          mma_s8s8(low, a[k][1].x, a[k][1].y, a[k][1].z, a[k][1].w, b0, b1);
        }
        const float row_step = data.digit_step[4 * n + t];
        const auto join = [&](int i, float step) {
          const float both = static_cast<float>(high[i + 1] + low[i]);
          return ((static_cast<float>(high[i]) * 256.0f + both) * 256.0f + static_cast<float>(low[i + 1])) *
                 (row_step * step);
        };
        float* to = out + slot * stride + (4 * n + t) * Config::kHeadDim + 16 * block + g;
        to[0] = join(0, step0);
        to[8] = join(2, step1);
      }
    }
  }
}

}  // namespace oscar::cuda
