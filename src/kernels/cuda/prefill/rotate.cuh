#pragma once
// Small kernels around the main one: queries into the rotated space, page means and window rows into tiles, outputs
// back. Together under 2 % of a long prefill.

#include "config.hpp"

namespace oscar::cuda {

inline constexpr float kLog2OfE = 1.4426950408889634f;

inline __device__ __half saturated_half(float value) {
  return __float2half_rn(fminf(fmaxf(value, -65504.0f), 65504.0f));
}

// kQueries: q' = q A_k^{-T}, bfloat16 to float16, channels in tile order and scaled as config.hpp says. Otherwise x = y
// A_v^{-1}, float16 to bfloat16. Grid: (blocks that share the row tiles of 64, KV head, block of 64 output channels);
// rows are (token, head of the group). The matrix is split in two 16-bit parts, relative error 2^-17 (2^-21), as
// fragments in shared memory.
template <int kHeadDim, bool kQueries>
__global__ __launch_bounds__(128) void rotate_kernel(const __grid_constant__ PrefillParams p) {
  constexpr int kSteps = kHeadDim / 16;
  extern __shared__ __align__(1024) std::uint8_t dynamic[];
  auto* s_high = reinterpret_cast<uint2*>(dynamic);  // [step][tile of 8 columns][lane]
  auto* s_low = s_high + kSteps * 8 * 32;
  const int head = blockIdx.y, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float* g_matrix = (kQueries ? p.key_matrix : p.value_matrix) +
                          static_cast<std::int64_t>(head) * kHeadDim * kHeadDim + 64 * blockIdx.z;
  const auto split = [](float a, float b, std::uint32_t& high, std::uint32_t& low) {
    if constexpr (kQueries) {
      const __nv_bfloat162 rounded = __floats2bfloat162_rn(a, b);
      const __nv_bfloat162 rest = __floats2bfloat162_rn(a - __low2float(rounded), b - __high2float(rounded));
      high = *reinterpret_cast<const std::uint32_t*>(&rounded);
      low = *reinterpret_cast<const std::uint32_t*>(&rest);
    } else {
      const __half2 rounded = __halves2half2(saturated_half(a), saturated_half(b));
      const __half2 rest = __floats2half2_rn(a - __low2float(rounded), b - __high2float(rounded));
      high = *reinterpret_cast<const std::uint32_t*>(&rounded);
      low = *reinterpret_cast<const std::uint32_t*>(&rest);
    }
  };
  for (int k = threadIdx.x; k < kSteps * 8 * 32; k += 128) {
    const int own = k % 32, tile = k / 32 % 8, step = k / 256;
    const int position = 8 * tile + own / 4, column = kQueries ? channel_at_position(position) : position;
    const float* first = g_matrix + (16 * step + 2 * (own % 4)) * kHeadDim + column;
    uint2 high, low;
    split(__ldg(first), __ldg(first + kHeadDim), high.x, low.x);
    split(__ldg(first + 8 * kHeadDim), __ldg(first + 9 * kHeadDim), high.y, low.y);
    s_high[k] = high;
    s_low[k] = low;
  }
  __syncthreads();

  const int group = p.num_qo_heads / p.num_kv_heads,
            num_rows = min(p.num_tokens, p.query_start[p.num_requests]) * group;
  auto* rotated = reinterpret_cast<__half*>(p.workspace);  // [num_tokens, num_qo_heads, head_dim]
  for (int row0 = (blockIdx.x * 4 + threadIdx.x / 32) * 16; row0 < num_rows; row0 += gridDim.x * 64) {
    std::int64_t from[2];
    bool present[2];
    int token[2], qo_head[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + 8 * r + g;
      present[r] = row < num_rows;
      token[r] = (present[r] ? row : 0) / group;
      qo_head[r] = head * group + (present[r] ? row : 0) % group;
      from[r] = kQueries ? token[r] * p.q_token_stride + qo_head[r] * p.q_head_stride
                         : (static_cast<std::int64_t>(token[r]) * p.num_qo_heads + qo_head[r]) * kHeadDim;
    }
    float acc[8][4] = {};
#pragma unroll 4
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int64_t at = from[i % 2] + 16 * step + 8 * (i / 2) + 2 * t;
        a[i] = kQueries ? *reinterpret_cast<const std::uint32_t*>(p.q + at)
                        : *reinterpret_cast<const std::uint32_t*>(rotated + at);
      }
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        const uint2 high = s_high[(8 * step + tile) * 32 + lane], low = s_low[(8 * step + tile) * 32 + lane];
        if constexpr (kQueries) {
          mma_bf16_k16(acc[tile], a[0], a[1], a[2], a[3], high.x, high.y);
          mma_bf16_k16(acc[tile], a[0], a[1], a[2], a[3], low.x, low.y);
        } else {
          mma_f16_k16(acc[tile], a[0], a[1], a[2], a[3], high.x, high.y);
          mma_f16_k16(acc[tile], a[0], a[1], a[2], a[3], low.x, low.y);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!present[r]) continue;
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        const int column = 64 * blockIdx.z + 8 * tile + 2 * t;
        if constexpr (kQueries) {
          const float factor = p.scale * kLog2OfE * query_factor(2 * (tile % 2) + t / 2);
          *reinterpret_cast<__half2*>(
              rotated + (static_cast<std::int64_t>(token[r]) * p.num_qo_heads + qo_head[r]) * kHeadDim + column) =
              __halves2half2(saturated_half(acc[tile][2 * r] * factor), saturated_half(acc[tile][2 * r + 1] * factor));
        } else
          *reinterpret_cast<__nv_bfloat162*>(p.out + token[r] * p.out_token_stride + qo_head[r] * p.out_head_stride +
                                             column) = __floats2bfloat162_rn(acc[tile][2 * r], acc[tile][2 * r + 1]);
      }
    }
  }
}

// Mean key of each page in the rotated space as the images of the tiles that meet the queries, in two float16 parts (22
// bits: the term is common to the page's 64 scores). Grid: (kMeanPagesOfBlock pages a block, KV head).
template <int kHeadDim>
inline constexpr int kMeanPagesOfBlock =
    PrefillConfig<kHeadDim>::kMeanPages < 8 ? PrefillConfig<kHeadDim>::kMeanPages : 8;
template <int kHeadDim>
__global__ __launch_bounds__(kHeadDim) void page_means_kernel(const __grid_constant__ PrefillParams p,
                                                              const __grid_constant__ PrefillPlan plan) {
  using Config = PrefillConfig<kHeadDim>;
  constexpr int kPages = kMeanPagesOfBlock<kHeadDim>;
  __shared__ float s_mean[kPages][kHeadDim];
  const int head = blockIdx.y, position = threadIdx.x;
  const int channel = position / 64 * 64 + channel_at_position(position % 64);
  float sum[kPages] = {};
#pragma unroll
  for (int i = 0; i < kPages; ++i) {
    const int block = min(static_cast<int>(blockIdx.x) * kPages + i, p.num_blocks - 1);
    s_mean[i][position] =
        p.block_means[(static_cast<std::int64_t>(block) * p.num_kv_heads + head) * kHeadDim + position];
  }
  __syncthreads();
  const float* column = p.key_transform + static_cast<std::int64_t>(head) * kHeadDim * kHeadDim + channel;
  for (int k = 0; k < kHeadDim; ++k) {
    const float a = __ldg(column + k * kHeadDim);
#pragma unroll
    for (int i = 0; i < kPages; ++i) sum[i] = fmaf(s_mean[i][k], a, sum[i]);
  }
  const int group = blockIdx.x * kPages / Config::kMeanPages;
  std::uint8_t* image = reinterpret_cast<std::uint8_t*>(p.workspace) + plan.means_offset +
                        (static_cast<std::int64_t>(group) * p.num_kv_heads + head) * Config::kMeansBytes +
                        position / 64 * 2 * Config::kMeanPages * 128 + 2 * (position % 8);
  const float factor = 1.0f / query_factor(channel / 16 % 4);
#pragma unroll
  for (int i = 0; i < kPages; ++i) {
    const int row = 2 * (blockIdx.x * kPages % Config::kMeanPages + i), piece = position % 64 / 8;
    const __half rounded = saturated_half(sum[i] * factor);
    *reinterpret_cast<__half*>(image + swizzled(row, piece)) = rounded;
    *reinterpret_cast<__half*>(image + swizzled(row + 1, piece)) =
        saturated_half(sum[i] * factor - __half2float(rounded));
  }
}

// First token of window tile `tile` of a request, and the end of the tokens that its rows hold.
struct WindowTile {
  int first, end;
};
inline __device__ WindowTile window_tile(const PrefillParams& p, const PrefillPlan& plan, int history, int tile) {
  if (tile < plan.sink_tiles) return {tile * plan.tile_keys, min(p.sink, history)};
  return {max(history - p.recent + 1, 0) + (tile - plan.sink_tiles) * plan.tile_keys, history};
}

// Window rows in the rotated space as the images of K and V tiles. Grid: (window tile, KV head, request).
template <int kHeadDim>
__global__ __launch_bounds__(256) void window_kernel(const __grid_constant__ PrefillParams p,
                                                     const __grid_constant__ PrefillPlan plan) {
  using Config = PrefillConfig<kHeadDim>;
  constexpr int kParts = 256 / kHeadDim, kTokens = 8;
  __shared__ float s_rows[kParts][2][kTokens][kHeadDim];
  const int head = blockIdx.y, request = blockIdx.z, channel = threadIdx.x % kHeadDim, part = threadIdx.x / kHeadDim;
  const WindowTile tile = window_tile(p, plan, p.history_lens[request], blockIdx.x);
  std::uint8_t* key =
      reinterpret_cast<std::uint8_t*>(p.workspace) + plan.window_offset +
      ((static_cast<std::int64_t>(request) * p.num_kv_heads + head) * gridDim.x + blockIdx.x) * plan.window_tile_bytes;
  std::uint8_t* value = key + Config::kKeyBytes;
  std::uint8_t* terms = value + Config::kValueBytes;
  auto* steps = reinterpret_cast<float*>(terms + prefill_term_bytes(kHeadDim));
  const std::int64_t matrix = static_cast<std::int64_t>(head) * kHeadDim * kHeadDim + channel;
  for (int token0 = 0; token0 < Config::kTileKeys; token0 += kParts * kTokens) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = tile.first + token0 + part * kTokens + i;
      float k = 0, v = 0;
      if (token < tile.end) {
        const std::int64_t block = p.window_table[request * p.window_table_stride + token / p.window_block];
        const std::int64_t at = block * p.window_block_stride + token % p.window_block * p.window_token_stride +
                                head * p.window_head_stride + channel;
        k = __bfloat162float(p.window_k[at]);
        v = __bfloat162float(p.window_v[at]);
      }
      s_rows[part][0][i][channel] = k;
      s_rows[part][1][i][channel] = v;
    }
    __syncthreads();
    float sum[2][kTokens] = {};
    for (int c = 0; c < kHeadDim; ++c) {
      const float a = __ldg(p.key_transform + matrix + c * kHeadDim);
      const float b = __ldg(p.value_transform + matrix + c * kHeadDim);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        sum[0][i] = fmaf(s_rows[part][0][i][c], a, sum[0][i]);
        sum[1][i] = fmaf(s_rows[part][1][i][c], b, sum[1][i]);
      }
    }
    const int at = position_of_channel(channel % 64);
    const float factor = 1.0f / query_factor(channel / 16 % 4);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = token0 + part * kTokens + i, position = position_of_token(token % 64);
      *reinterpret_cast<__half*>(key + channel / 64 * Config::kTileKeys * 128 +
                                 swizzled(token / 64 * 64 + position, at / 8) + 2 * (at % 8)) =
          saturated_half(sum[0][i] * factor);
      *reinterpret_cast<__half*>(value + token / 64 * Config::kValueRows * 128 + swizzled(channel, position / 8) +
                                 2 * (position % 8)) = saturated_half(sum[1][i] * kValueUnit);
    }
  }
  // step 1, offset 0
  for (int token = threadIdx.x; token < Config::kTileKeys; token += 256) {
    steps[step_index(token, Config::kTileKeys)] = 1.0f;
    *reinterpret_cast<uint4*>(terms + 32 * token) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(terms + 32 * token + 16) = make_uint4(0, 0, 0, 0);
    const int position = token % 64;
#pragma unroll
    for (int row = 0; row < kExtraRows; ++row)
      *reinterpret_cast<__half*>(value + token / 64 * Config::kValueRows * 128 +
                                 swizzled(kHeadDim + row, position / 8) + 2 * (position % 8)) =
          __float2half_rn(row == 0 ? kInverseStepUnit : 0.0f);
  }
}

}  // namespace oscar::cuda
