#pragma once
// Encodes K and V rows of a batch of tokens into their INT2 pages and copies window rows.
//
// Grid: (tiles of 64 tokens, KV head x side, layer). A block of 8 warps makes one tile of one head and side; a warp
// encodes 8 rows by itself, then the block packs them together, because four tokens share a byte of the value half.
// Bytes: 4 head_dim read and head_dim / 2 written a token and KV head, K and V together. It is bound by arithmetic:
// every product of the format is rounded before it is added, so a row times a matrix is 2 head_dim^2 instructions of
// one lane, of which an SM issues 128 a cycle: 256 cycles a row at 128. Least squares and min/max need one such
// product, feedback 3.5 and the sweeps' changes. Few tokens (decode at small batches): 16 a tile, 2 rows a warp, so
// that a row's latency is not that of eight.

#include "encode.cuh"
#include "pack.cuh"

namespace oscar::cuda {

// Rows to float32, less the mean key of each token's block; absent rows become zero. Copies window rows on the way.
template <typename Config, int kRows>
__device__ __forceinline__ void load_rows(const StoreParams& p, const StoreSide& side, bool is_key, int head,
                                          int first_token, float* s_rows, std::int32_t* s_slots) {
  constexpr int kD = Config::kHeadDim, kVectors = kD / 8;  // of 8 elements, a row
  const int lane = threadIdx.x % 32;
  const std::int64_t token_stride = is_key ? p.key_token_stride : p.value_token_stride;
  const std::int64_t head_stride = is_key ? p.key_head_stride : p.value_head_stride;
#pragma unroll
  for (int k = lane; k < Config::kWarpRows * kVectors; k += 32) {
    const int row = k / kVectors, channel = k % kVectors * 8, token = first_token + row;
    const bool present = row < kRows && token < p.num_tokens;
    const std::int32_t slot = present ? p.slot_mapping[token] : -1;
    const std::int32_t window_slot = present && p.window_slots != nullptr ? p.window_slots[token] : -1;
    if (row < kRows && channel == 0) s_slots[row] = slot;
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (slot >= 0 || window_slot >= 0)
      raw = __ldg(reinterpret_cast<const uint4*>(side.rows + token * token_stride + head * head_stride + channel));
    if (window_slot >= 0 && side.window != nullptr)
      *reinterpret_cast<uint4*>(side.window + window_slot * p.window_token_stride + head * p.window_head_stride +
                                channel) = raw;
    const std::uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
    float x[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = slot >= 0 ? __uint_as_float(pairs[i] << 16) : 0.0f;
      x[2 * i + 1] = slot >= 0 ? __uint_as_float(pairs[i] & 0xffff0000u) : 0.0f;
    }
    if (side.block_means != nullptr && slot >= 0) {
      const int block = min(p.positions[token] / kStorePageTokens, p.num_blocks - 1);
      const float* mean = side.block_means + (static_cast<std::int64_t>(block) * p.num_kv_heads + head) * kD + channel;
      const float4 a = __ldg(reinterpret_cast<const float4*>(mean)),
                   b = __ldg(reinterpret_cast<const float4*>(mean + 4));
      const float means[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = sub(x[i], means[i]);
    }
    auto* to = reinterpret_cast<float4*>(s_rows + row * Config::kRowStride + channel);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
  __syncwarp();
}

// Rows -> codes (as whole numbers, in place or in the second buffer, which is returned) and parameters.
template <typename Config, int kRows>
__device__ __forceinline__ float* encode_rows(const StoreSide& side, int head, float* s_rows, float2 (&parameters)[2]) {
  constexpr int kN = Config::kChannels;
  if constexpr (Config::kQuantizer == Quantizer::kFeedback) {
    float* s_work = s_rows + Config::kWarpRows * Config::kRowStride;
    encode_feedback<Config, kRows>(side, head, s_rows, s_work, parameters);
    return s_work;
  } else {
    const StoreConstants constants = side.constants[head];
    const LaneView<Config> view(s_rows);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float y[kN];
#pragma unroll
      for (int n = 0; n < kN; ++n) y[n] = view(r, n);
      if constexpr (Config::kQuantizer == Quantizer::kMinMax)
        parameters[r] = encode_min_max<Config>(y, constants);
      else
        parameters[r] = encode_least_squares<Config>(y, constants);
#pragma unroll
      for (int n = 0; n < kN; ++n) view(r, n) = y[n];
    }
    return s_rows;
  }
}

template <typename Config, int kRows>
__global__ __launch_bounds__(Config::kNumThreads,
                             Config::kBlocksPerSm) void store_kernel(const __grid_constant__ StoreParams p) {
  constexpr int kD = Config::kHeadDim, kTokens = Config::kNumWarps * kRows;
  extern __shared__ __align__(16) std::uint8_t dynamic[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(dynamic);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y / 2;
  const bool is_key = blockIdx.y % 2 == 0;
  const StoreLayer& layer = p.layers != nullptr ? p.layers[blockIdx.z] : p.layer;
  const StoreSide& side = is_key ? layer.key : layer.value;
  if (side.rows == nullptr) return;

  const int first_row = warp * kRows, first_token = blockIdx.x * kTokens + first_row;
  float* s_rows = s.rows[warp][0];
  load_rows<Config, kRows>(p, side, is_key, head, first_token, s_rows, s.slots + first_row);
  bool live = false;
#pragma unroll
  for (int row = 0; row < kRows; ++row) live |= s.slots[first_row + row] >= 0;
  if (live) {
    multiply_rows<Config, kRows>(side.transform + static_cast<std::int64_t>(head) * kD * kD, s_rows);
    float2 parameters[2];
    const float* s_codes = encode_rows<Config, kRows>(side, head, s_rows, parameters);
    const LaneView<Config> codes(const_cast<float*>(s_codes));
    const int own = lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane % 4 * 2 + r;
      if (row >= kRows) continue;
      if (own == 0) s.parameters[first_row + row] = parameters[r];
      std::uint8_t* to = s.codes + (first_row + row) * Config::kCodeStride + own;
#pragma unroll
      for (int n = 0; n < Config::kChannels; ++n) to[8 * n] = static_cast<std::uint8_t>(codes(r, n));
    }
  }
  __syncthreads();
  pack_parameters<Config, kTokens>(p, side, head, s);
  if (is_key) {
    pack_keys<Config, kTokens>(p, side, head, s);
    return;
  }
  bool whole_page = false;
  if constexpr (kTokens == kStorePageTokens) {
    const int row = threadIdx.x % kTokens;
    whole_page = __syncthreads_and(s.slots[0] >= 0 && s.slots[0] % kStorePageTokens == 0 &&
                                   s.slots[row] == s.slots[0] + row) != 0;
  }
  if (whole_page)
    pack_value_page<Config>(p, side, head, s);
  else
    pack_value_slots<Config, kTokens>(p, side, head, s.codes, s.slots, threadIdx.x);
}

}  // namespace oscar::cuda
