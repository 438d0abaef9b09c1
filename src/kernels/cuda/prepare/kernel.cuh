#pragma once
// Prologue of a decode launch: q' = q A_k^{-T} of every query row, in the digits that the tensor cores read, and the
// coefficients of the page-mean term. One block a (KV head, some requests); it keeps the head's matrix in registers,
// read before the queries are there. Four threads share a channel's sum.

#include "../decode/config.hpp"
#include "../decode/kernel.cuh"

namespace oscar::cuda {

inline constexpr int kTermPages = 128;  // pages of one page_terms block

// How a block of prepare and combine shares a [head_dim, head_dim] product. kKeep, for few rows: four threads a channel
// hold the matrix in registers, read before the kernels ahead have finished. Otherwise two threads a channel read it
// from L2, many blocks at once.
template <int kHeadDim, bool kKeep>
struct MatrixShare {
  static constexpr int kSumParts = kKeep && kHeadDim <= 128 ? 4 : 2;
  static constexpr int kTerms = kHeadDim / kSumParts;
  static constexpr int kThreads = kSumParts * kHeadDim;
  static constexpr bool kRegisters = kKeep && kHeadDim <= 128;
  float kept[kRegisters ? kTerms : 1];
  const float* g_matrix;

  __device__ __forceinline__ explicit MatrixShare(const float* head_matrix)
      : g_matrix(head_matrix + threadIdx.x / kHeadDim * kTerms * kHeadDim + threadIdx.x % kHeadDim) {
    if constexpr (kRegisters) {
#pragma unroll
      for (int c = 0; c < kTerms; ++c) kept[c] = __ldg(g_matrix + c * kHeadDim);
    }
  }
  // sum[row] = this thread's terms of rows[row] . matrix[:, channel]
  template <int kRows>
  __device__ __forceinline__ void multiply(const float (&s_rows)[kRows][kHeadDim], float (&sum)[kRows]) const {
    const int first = threadIdx.x / kHeadDim * kTerms;
#pragma unroll
    for (int row = 0; row < kRows; ++row) sum[row] = 0;
#pragma unroll(kRegisters ? kTerms : 16)
    for (int c = 0; c < kTerms; ++c) {
      float m;
      if constexpr (kRegisters)
        m = kept[c];
      else
        m = __ldg(g_matrix + c * kHeadDim);
#pragma unroll
      for (int row = 0; row < kRows; ++row) sum[row] += s_rows[row][first + c] * m;
    }
  }
};

// Page-mean term of each query row and INT2 page: c = sum over pairs of alpha cos + beta sin (accuracy: FP32, c is
// large on models with key biases). One block a (KV head, request, row group, chunk of pages): a thread a page and some
// rows.
template <typename Config, int kThreads>
__device__ void page_terms(const DecodeParams& p, const DecodePlan& plan, int head, int unit, int chunk) {
  constexpr int kD = Config::kHeadDim, kR = Config::kRows;
  __shared__ float2 s_mean[Config::kPairs][kR];
  const int request = unit / plan.row_groups, row_group = unit % plan.row_groups;
  const RequestItems items = request_items(p, p.seq_lens[request]);
  const int first = chunk * kTermPages;
  if (first >= items.num_pages) return;
  // pair i turns channels i, i + rotary / 2; the rest pair up in order and do not turn
  const int group = p.num_qo_heads / p.num_kv_heads, half = p.rotary_dim / 2;
  const float* mean = p.page_mean + head * kD;
  const float unit_scale = p.scale * kLog2E;
  for (int k = threadIdx.x; k < kR * Config::kPairs; k += kThreads) {
    const int row = k % kR, pair = k / kR, index = row_group * kR + row;
    const int token = index / group, qo_head = head * group + index % group;
    const int a = pair < half ? pair : p.rotary_dim + 2 * (pair - half), b = pair < half ? pair + half : a + 1;
    float2 value = make_float2(0, 0);
    if (token < p.query_length) {
      const __nv_bfloat16* q = p.q + (static_cast<std::int64_t>(request) * p.query_length + token) * p.q_token_stride +
                               qo_head * p.q_head_stride;
      const float q1 = __bfloat162float(q[a]), q2 = __bfloat162float(q[b]), m1 = mean[a], m2 = mean[b];
      value = make_float2((q1 * m1 + q2 * m2) * unit_scale, (q2 * m1 - q1 * m2) * unit_scale);
    }
    s_mean[pair][row] = value;
  }
  __syncthreads();
  auto* terms =
      reinterpret_cast<float*>(reinterpret_cast<std::uint8_t*>(p.workspace) + plan.prepared_bytes) +
      (static_cast<std::int64_t>(request * p.num_kv_heads + head) * plan.row_groups + row_group) * plan.max_pages * kR;
  constexpr int kShares = kThreads / kTermPages, kShareRows = kR / kShares;
  static_assert(kShareRows * kShares == kR);
  const int page = items.first_page + first + threadIdx.x % kTermPages, row0 = threadIdx.x / kTermPages * kShareRows;
  if (first + threadIdx.x % kTermPages >= items.num_pages) return;
  const float2* angle = reinterpret_cast<const float2*>(p.angles) + page;
  float sum[kShareRows];
#pragma unroll
  for (int row = 0; row < kShareRows; ++row) sum[row] = 0;
#pragma unroll 16
  for (int pair = 0; pair < Config::kPairs; ++pair) {
    const float2 turn = __ldg(angle + pair * p.num_angle_blocks);
#pragma unroll
    for (int row = 0; row < kShareRows; ++row)
      sum[row] += s_mean[pair][row0 + row].x * turn.x + s_mean[pair][row0 + row].y * turn.y;
  }
#pragma unroll
  for (int row = 0; row < kShareRows; ++row) terms[static_cast<std::int64_t>(page) * kR + row0 + row] = sum[row];
}

template <typename Config, bool kKeep>
__global__ __launch_bounds__(MatrixShare<Config::kHeadDim, kKeep>::kThreads) void prepare_kernel(
    const __grid_constant__ DecodeParams p, const __grid_constant__ DecodePlan plan) {
  using Share = MatrixShare<Config::kHeadDim, kKeep>;
  constexpr int kD = Config::kHeadDim, kR = Config::kRows, kThreads = Share::kThreads, kSumParts = Share::kSumParts;
  __shared__ float s_q[kR][kD];
  __shared__ float s_part[kSumParts][kR][kD];
  __shared__ float s_fixed[kR][kD];
  const int channel = threadIdx.x % kD, part = threadIdx.x / kD, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y;
  const int group = p.num_qo_heads / p.num_kv_heads;
  const int query_blocks = (p.num_requests * plan.row_groups + plan.units_per_block - 1) / plan.units_per_block;
  if (static_cast<int>(blockIdx.x) >= query_blocks) {
    const int chunks = (plan.max_pages + kTermPages - 1) / kTermPages, task = blockIdx.x - query_blocks;
    wait_for_previous_kernel();
    let_next_kernel_start();
    page_terms<Config, kThreads>(p, plan, head, task / chunks, task % chunks);
    return;
  }
  const Share matrix(p.key_matrix + static_cast<std::int64_t>(head) * kD * kD);
  auto* prepared = reinterpret_cast<typename Config::Prepared*>(p.workspace);
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int i = 0; i < plan.units_per_block; ++i) {
    const int unit = blockIdx.x * plan.units_per_block + i;  // request, row group
    if (unit >= p.num_requests * plan.row_groups) return;
    const int request = unit / plan.row_groups, row_group = unit % plan.row_groups;
    auto& out = prepared[(request * p.num_kv_heads + head) * plan.row_groups + row_group];
    for (int k = threadIdx.x; k < kR * kD; k += kThreads) {
      const int row = k / kD, index = row_group * kR + row;
      const int token = index / group, qo_head = head * group + index % group;
      s_q[row][k % kD] =
          token < p.query_length
              ? __bfloat162float(p.q[(static_cast<std::int64_t>(request) * p.query_length + token) * p.q_token_stride +
                                     qo_head * p.q_head_stride + k % kD])
              : 0.0f;
    }
    __syncthreads();
    float acc[kR];
    matrix.multiply(s_q, acc);
#pragma unroll
    for (int row = 0; row < kR; ++row) s_part[part][row][channel] = acc[row];
    const float unit_scale = p.scale * kLog2E;
    __syncthreads();
    // a warp a row: fixed point. Planes 1 and 3 read 4 c, so their q is a quarter
    for (int row = warp; row < kR; row += kThreads / 32) {
      float value[kD / 32], largest = 0, sum_exact = 0, sum_fixed = 0;
#pragma unroll
      for (int k = 0; k < kD / 32; ++k) {
        value[k] = 0;
#pragma unroll
        for (int w = 0; w < kSumParts; ++w) value[k] += s_part[w][row][32 * k + lane];
        largest = fmaxf(largest, fabsf(value[k]));
        sum_exact += value[k];
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        sum_exact += __shfl_xor_sync(~0u, sum_exact, step);
      }
      const float unit_step = largest > 0 ? largest / Config::kQueryScale : 1.0f;
      const float quarter = lane / 16 == 1 ? 0.25f : 1.0f;
#pragma unroll
      for (int k = 0; k < kD / 32; ++k) {
        const float fixed = rintf(value[k] / unit_step * quarter);
        s_fixed[row][32 * k + lane] = fixed;
        sum_fixed += fixed / quarter;
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum_fixed += __shfl_xor_sync(~0u, sum_fixed, step);
      if (lane == 0) {
        const float logit_unit = unit_step * unit_scale * kStep2;
        out.row[row] = make_float4(logit_unit, 1.5f * sum_fixed * logit_unit, sum_exact * unit_scale, 0);
      }
    }
    __syncthreads();
    // B fragments: lane (g, t), column g = row g / 2, digit g % 2; k = channels 32 step + 4 t (+ 16) + {0..3}
    for (int k = threadIdx.x; k < Config::kColumnTiles * Config::kKeySteps * 2 * 32; k += kThreads) {
      const int target = k % 32, half_step = k / 32 % 2, step = k / 64 % Config::kKeySteps,
                n = k / (64 * Config::kKeySteps);
      const int row = 4 * n + target / 8, digit = target / 4 % 2;
      std::uint32_t word = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int fixed = static_cast<int>(s_fixed[row][32 * step + 16 * half_step + 4 * (target % 4) + b]);
        const int high = (fixed + 128) >> 8, low = fixed - 256 * high;
        word |= (static_cast<std::uint32_t>(digit == 0 ? high : low) & 0xFFu) << (8 * b);
      }
      out.digits[n][step][half_step][target] = word;
    }
  }
}

}  // namespace oscar::cuda
