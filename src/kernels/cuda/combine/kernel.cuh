#pragma once
// Epilogue of a decode launch: merges the pieces of each row by log-sum-exp, turns the INT2 part back (x = y A_v^{-1}),
// merges it with the 16-bit window's part and writes the output. One block a (KV head, some requests), the head's
// matrix in registers, read before the pieces are there.

#include "../decode/config.hpp"
#include "../decode/decode_kernel.cuh"
#include "../prepare/kernel.cuh"

namespace oscar::cuda {

__device__ inline int block_of(int total, int index, int num_blocks) {
  return static_cast<int>((static_cast<std::int64_t>(index + 1) * num_blocks - 1) / total);
}

// Dynamic shared memory: prefix [num_requests + 1] i32, factors [2, rows, num_blocks] f32.
inline std::size_t combine_shared_bytes(int num_requests, int rows, int num_blocks) {
  return sizeof(int) * (num_requests + 1) + sizeof(float) * 2 * rows * num_blocks;
}

template <typename Config, bool kKeep>
__global__ __launch_bounds__(MatrixShare<Config::kHeadDim, kKeep>::kThreads) void combine_kernel(
    const __grid_constant__ DecodeParams p, const __grid_constant__ DecodePlan plan) {
  using Share = MatrixShare<Config::kHeadDim, kKeep>;
  constexpr int kD = Config::kHeadDim, kR = Config::kRows, kSumParts = Share::kSumParts, kWarps = Share::kThreads / 32;
  __shared__ float s_part[kSumParts][kR][kD];
  __shared__ float s_sum[2][kR][kD];  // history (transformed space), window
  __shared__ float2 s_max_sum[2][kR];
  extern __shared__ __align__(8) std::uint8_t dynamic[];
  auto* prefix = reinterpret_cast<int*>(dynamic);
  auto* s_factor = reinterpret_cast<float*>(prefix + p.num_requests + 1);
  const int channel = threadIdx.x % kD, part = threadIdx.x / kD, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y;
  if (warp == 0) scan_requests(p, plan, prefix);
  const Share matrix(p.value_matrix + static_cast<std::int64_t>(head) * kD * kD);
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  const int total = prefix[p.num_requests];
  const int group = p.num_qo_heads / p.num_kv_heads;
  const auto* partials = reinterpret_cast<const typename Config::Partial*>(
      reinterpret_cast<const std::uint8_t*>(p.workspace) + plan.prepared_bytes + plan.term_bytes);

  for (int i = 0; i < plan.units_per_block; ++i) {
    const int unit = blockIdx.x * plan.units_per_block + i;  // request, row group
    if (unit >= p.num_requests * plan.row_groups) return;
    const int request = unit / plan.row_groups, row_group = unit % plan.row_groups;
    const int flat = head * plan.row_groups + row_group;
    const int segment = (request * p.num_kv_heads * plan.row_groups + flat) * 2;
    const RequestItems items = request_items(p, p.seq_lens[request]);
    const int begin = prefix[request] + flat * items.total();
    int first_block[2], count[2];
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      const int num_items = kind == 0 ? items.num_pages : items.num_window_items;
      const int first = begin + (kind == 0 ? 0 : items.num_pages);
      first_block[kind] = num_items > 0 ? block_of(total, first, plan.num_blocks) : 0;
      count[kind] = num_items > 0 ? block_of(total, first + num_items - 1, plan.num_blocks) - first_block[kind] + 1 : 0;
    }
    // a warp a (kind, row): the pieces' factors
    for (int k = warp; k < 2 * kR; k += kWarps) {
      const int kind = k / kR, row = k % kR;
      float max = -INFINITY, sum = 0;
      const auto piece = [&](int block) { return partials[segment + kind + first_block[kind] + block].max_sum[row]; };
      for (int block = lane; block < count[kind]; block += 32) max = fmaxf(max, piece(block).x);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
      for (int block = lane; block < count[kind]; block += 32) {
        const float2 value = piece(block);
        const float factor = value.x == -INFINITY ? 0.0f : exp2_fast(value.x - max);
        s_factor[(kind * kR + row) * plan.num_blocks + block] = factor;
        sum += value.y * factor;
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) s_max_sum[kind][row] = make_float2(max, sum);
    }
    __syncthreads();
    const auto add_parts = [&](float(&s_out)[kR][kD]) {
      __syncthreads();
      for (int k = threadIdx.x; k < kR * kD; k += Share::kThreads) {
        float value = 0;
#pragma unroll
        for (int w = 0; w < kSumParts; ++w) value += s_part[w][k / kD][k % kD];
        s_out[k / kD][k % kD] = value;
      }
      __syncthreads();
    };
    for (int kind = 0; kind < 2; ++kind) {
      float acc[kR];
#pragma unroll
      for (int row = 0; row < kR; ++row) acc[row] = 0;
      for (int block = part; block < count[kind]; block += kSumParts) {
        const auto& piece = partials[segment + kind + first_block[kind] + block];
#pragma unroll
        for (int row = 0; row < kR; ++row) {
          const float factor = s_factor[(kind * kR + row) * plan.num_blocks + block];
          if (factor > 0) acc[row] += piece.acc[row][channel] * factor;
        }
      }
#pragma unroll
      for (int row = 0; row < kR; ++row) s_part[part][row][channel] = acc[row];
      add_parts(s_sum[kind]);
    }
    if (items.num_pages > 0) {
      float x[kR];
      matrix.multiply(s_sum[0], x);
#pragma unroll
      for (int row = 0; row < kR; ++row) s_part[part][row][channel] = x[row];
      add_parts(s_sum[0]);
    }
    for (int k = threadIdx.x; k < kR * kD; k += Share::kThreads) {
      const int row = k / kD, c = k % kD;
      const int index = row_group * kR + row;
      const int token = index / group, qo_head = head * group + index % group;
      if (token >= p.query_length) continue;
      const float2 history = s_max_sum[0][row], window = s_max_sum[1][row];
      const float top = fmaxf(history.x, window.x);
      const float f0 = history.x == -INFINITY ? 0.0f : exp2_fast(history.x - top);
      const float f1 = window.x == -INFINITY ? 0.0f : exp2_fast(window.x - top);
      const float denominator = history.y * f0 + window.y * f1;
      const std::int64_t query = static_cast<std::int64_t>(request) * p.query_length + token;
      p.out[query * p.out_token_stride + qo_head * p.out_head_stride + c] =
          __float2bfloat16(denominator > 0 ? (s_sum[0][row][c] * f0 + s_sum[1][row][c] * f1) / denominator : 0.0f);
      if (p.lse != nullptr && c == 0)
        p.lse[query * p.num_qo_heads + qo_head] =
            denominator > 0 ? (top + log2f(denominator)) * 0.6931471805599453f : -INFINITY;
    }
    __syncthreads();
  }
}

}  // namespace oscar::cuda
