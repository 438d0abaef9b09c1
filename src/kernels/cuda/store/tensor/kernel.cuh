#pragma once
// The store with its matrix products on tensor cores: same pages, metric error within 1 % of the exact instance's.
//
// Grid: (shares of the tiles, side x KV head, layer). A block keeps the head's matrices in shared memory and takes
// tiles of 64 tokens in turn, four warps a tile, 16 rows a warp, everything of a row in registers: its accumulators are
// at once the operands of the next product and in the order of the page's words. Bytes as the exact kernel. Bound by
// arithmetic at head_dim 128, 8 KV heads: 2 to 3 products for min/max and least squares and 5.5 to 6.5 for feedback,
// each 16 cycles of an SM a row at the rate of mma.sync (HMMA and operand loads alike), and the encoders beside them.
// The transform is split in two bfloat16 (relative error 2^-17), rows less their mean too; T and M are float16.

#include <oscar/rotation.hpp>

#include "pack.cuh"

namespace oscar::cuda {

// Rows g and g + 8 of a warp.
struct RowPair {
  int index[2];  // in the tile
  int slot[2];   // 64 page + slot; negative: not stored
  int window_slot[2];
  const std::uint16_t* row[2];
  const float* mean[2];
};

template <typename Config>
__device__ __forceinline__ RowPair row_pair(const StoreParams& p, const StoreSide& side, bool is_key, int head,
                                            int first_token, int warp) {
  const std::int64_t token_stride = is_key ? p.key_token_stride : p.value_token_stride;
  const std::int64_t head_stride = is_key ? p.key_head_stride : p.value_head_stride;
  const int g = threadIdx.x % 32 / 4;
  RowPair rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.index[r] = 32 * r + 8 * warp + g;
    const int token = first_token + rows.index[r];
    const bool present = token >= 0 && token < p.num_tokens;
    rows.slot[r] = present ? p.slot_mapping[token] : -1;
    rows.window_slot[r] = present && p.window_slots != nullptr && side.window != nullptr ? p.window_slots[token] : -1;
    rows.row[r] = side.rows + token * token_stride + head * head_stride;
    rows.mean[r] = nullptr;
    if (side.block_means != nullptr && rows.slot[r] >= 0) {
      const int block = min(p.positions[token] / kStorePageTokens, p.num_blocks - 1);
      rows.mean[r] = side.block_means + (static_cast<std::int64_t>(block) * p.num_kv_heads + head) * Config::kHeadDim;
    }
  }
  return rows;
}

// Eight bfloat16 less eight means, as high + low.
__device__ __forceinline__ void subtract_mean(uint4& high, const float* mean, uint4& low) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(mean)), b = __ldg(reinterpret_cast<const float4*>(mean + 4));
  const float means[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  std::uint32_t words[4] = {high.x, high.y, high.z, high.w}, rest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = __uint_as_float(words[i] << 16) - means[2 * i];
    const float y = __uint_as_float(words[i] & 0xffff0000u) - means[2 * i + 1];
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
    words[i] = bits_of(rounded);
    rest[i] = bits_of(__floats2bfloat162_rn(x - __low2float(rounded), y - __high2float(rounded)));
  }
  high = make_uint4(words[0], words[1], words[2], words[3]);
  low = make_uint4(rest[0], rest[1], rest[2], rest[3]);
}

__device__ __forceinline__ std::uint32_t word_of(const uint4& v, int k) {
  return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w;
}

// y += a B for the step's depth and all channels, `a` = words 2 half, 2 half + 1 of both rows' pieces; y += rest B too
// when kRest.
template <typename Config, bool kRest>
__device__ __forceinline__ void multiply_step(const uint4* s_step, const uint4 (&piece)[2], const uint4 (&rest)[2],
                                              int half, Accumulators<Config>& y) {
  const auto operand = [half](const uint4(&from)[2], int i) { return word_of(from[i % 2], 2 * half + i / 2); };
#pragma unroll
  for (int j = 0; j < Config::kBlocks; ++j) {
    const uint4 b = s_step[32 * j + threadIdx.x % 32];
    mma_bf16_k16(y[j][0], operand(piece, 0), operand(piece, 1), operand(piece, 2), operand(piece, 3), b.x, b.y);
    mma_bf16_k16(y[j][1], operand(piece, 0), operand(piece, 1), operand(piece, 2), operand(piece, 3), b.z, b.w);
    if constexpr (kRest) {
      mma_bf16_k16(y[j][0], operand(rest, 0), operand(rest, 1), operand(rest, 2), operand(rest, 3), b.x, b.y);
      mma_bf16_k16(y[j][1], operand(rest, 0), operand(rest, 1), operand(rest, 2), operand(rest, 3), b.z, b.w);
    }
  }
}

// y = (rows - means) A; window rows are copied on the way. All of a row is read before the first product.
template <typename Config>
__device__ __forceinline__ void transform_rows(const StoreParams& p, const StoreSide& side, int head,
                                               const RowPair& rows, const typename Config::Shared& s,
                                               Accumulators<Config>& y) {
  constexpr int kPieces = Config::kHeadDim / 32;
  const int channel = threadIdx.x % 4 * 8;
  uint4 high[kPieces][2];
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      high[i][r] = make_uint4(0, 0, 0, 0);
      if (rows.slot[r] >= 0 || rows.window_slot[r] >= 0)
        high[i][r] = __ldg(reinterpret_cast<const uint4*>(rows.row[r] + 32 * i + channel));
    }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    uint4 low[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows.window_slot[r] >= 0)
        *reinterpret_cast<uint4*>(side.window + rows.window_slot[r] * p.window_token_stride +
                                  head * p.window_head_stride + 32 * i + channel) = high[i][r];
      if (rows.slot[r] < 0) high[i][r] = make_uint4(0, 0, 0, 0);
      if (rows.mean[r] != nullptr) subtract_mean(high[i][r], rows.mean[r] + 32 * i + channel, low[r]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = (2 * i + half) * Config::kBlocks * 32;
      if (Config::kSplit && side.block_means != nullptr)
        multiply_step<Config, true>(s.transform_high + at, high[i], low, half, y);
      else
        multiply_step<Config, false>(s.transform_high + at, high[i], low, half, y);
      if constexpr (Config::kSplit) multiply_step<Config, false>(s.transform_low + at, high[i], low, half, y);
    }
  }
}

// Waits for the four warps of a tile.
template <typename Config>
__device__ __forceinline__ void group_barrier(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(Config::kGroupThreads) : "memory");
}

template <typename Config>
__device__ __forceinline__ void load_matrices(const StoreSide& side, int head, typename Config::Shared& s) {
  constexpr int kD = Config::kHeadDim;
  const std::int64_t matrix = static_cast<std::int64_t>(head) * kD * kD;
  load_transform<Config>(side.transform + matrix, s.transform_high, s.transform_low);
  if constexpr (Config::kFeedback) {
    const float* g_inverse = side.inverse_diagonal + head * kD;
    load_descent<Config>(side.feedback + matrix, nullptr, s.feedback);
    load_descent<Config>(side.metric + matrix, g_inverse, s.metric);
    for (int k = threadIdx.x; k < kD; k += Config::kNumThreads) {
      s.diagonal[k] = __ldg(side.metric + matrix + k * kD + k);
      s.row_sum[k] = __ldg(side.row_sum + head * kD + k);
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kNumThreads,
                             Config::kBlocksPerSm) void store_tensor_kernel(const __grid_constant__ StoreParams p) {
  extern __shared__ __align__(16) std::uint8_t dynamic[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(dynamic);
  const int group = threadIdx.x / Config::kGroupThreads, thread = threadIdx.x % Config::kGroupThreads;
  // all keys, then all values: of two blocks on an SM one is of each
  const bool is_key = static_cast<int>(blockIdx.y) < p.num_kv_heads;
  const int warp = thread / 32, lane = threadIdx.x % 32, head = blockIdx.y - (is_key ? 0 : p.num_kv_heads);
  const StoreLayer& layer = p.layers != nullptr ? p.layers[blockIdx.z] : p.layer;
  const StoreSide side = is_key ? layer.key : layer.value;
  if (side.rows == nullptr) return;
  load_matrices<Config>(side, head, s);
  const StoreConstants constants = side.constants[head];
  __syncthreads();

  // Tiles begin where the first token's page does: those of one sequence are then whole pages.
  const int shift = max(p.slot_mapping[0], 0) % kStorePageTokens;
  const int num_tiles = (p.num_tokens + shift + kStorePageTokens - 1) / kStorePageTokens;
  for (int tile = blockIdx.x * Config::kNumGroups + group; tile < num_tiles; tile += gridDim.x * Config::kNumGroups) {
    const int first_token = tile * kStorePageTokens - shift;
    const auto slot_at = [&](int token) { return token >= 0 && token < p.num_tokens ? p.slot_mapping[token] : -1; };
    // the same for all warps of the tile
    const int base = first_token >= 0 ? slot_at(first_token) : -1;
    const bool whole_page =
        __all_sync(~0u, base >= 0 && base % kStorePageTokens == 0 && slot_at(first_token + lane) == base + lane &&
                            slot_at(first_token + 32 + lane) == base + 32 + lane);
    const RowPair rows = row_pair<Config>(p, side, is_key, head, first_token, warp);
    const bool live =
        __any_sync(~0u, rows.slot[0] >= 0 || rows.slot[1] >= 0 || rows.window_slot[0] >= 0 || rows.window_slot[1] >= 0);
    std::uint8_t* page[2];
    int slot[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      page[r] = rows.slot[r] >= 0 ? page_half(p, side, head, rows.slot[r] / kStorePageTokens) : nullptr;
      slot[r] = rows.slot[r] % kStorePageTokens;
    }
    if (live) {
      Accumulators<Config> y;
#pragma unroll
      for (int n = 0; n < Config::kValues; ++n) value_at(y, 0, n) = value_at(y, 1, n) = 0.0f;
      transform_rows<Config>(p, side, head, rows, s, y);
      PackedCodes<Config> codes;
      float2 parameters[2];
      if constexpr (Config::kQuantizer == Quantizer::kMinMax)
        encode_min_max<Config>(y, constants, codes, parameters);
      else if constexpr (Config::kQuantizer == Quantizer::kLeastSquares)
        encode_least_squares<Config>(y, constants, codes, parameters);
      else
        encode_feedback<Config>(s, constants, y, codes, parameters);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (lane % 4 == 0 && page[r] != nullptr) store_parameters<Config>(page[r], slot[r], parameters[r]);
      if (is_key)
        store_keys<Config>(codes, page, slot);
      else if (whole_page)
        store_value_words<Config>(codes, page[0], warp);
      else
        stage_codes<Config>(codes, s.codes[group], rows.index);
    }
    if (is_key || whole_page) continue;
    if (lane % 4 == 0) {
      s.slots[group][rows.index[0]] = rows.slot[0];
      s.slots[group][rows.index[1]] = rows.slot[1];
    }
    group_barrier<Config>(group);
    pack_value_slots<Config, kStorePageTokens>(p, side, head, s.codes[group], s.slots[group], thread);
    group_barrier<Config>(group);
  }
}

}  // namespace oscar::cuda
