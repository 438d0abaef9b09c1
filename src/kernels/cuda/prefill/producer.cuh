#pragma once
// The producer warpgroup: pages of 2-bit codes become float16 tiles in shared memory, one tile of the main loop ahead
// in registers; window tiles are copied as they are.

#include "work.cuh"

namespace oscar::cuda {

// Sixteen codes of a word as eight pairs: step code + base, code at bits 8 and 9 of a float16 (subnormal code 2^-16,
// so `step` carries 2^16). Order of the pairs: layout.hpp.
template <typename Base>
__device__ __forceinline__ void expand_word(std::uint32_t word, Base step_base, uint4 (&piece)[2]) {
  std::uint32_t pair[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    pair[2 * j] = step_base(2 * j, (word << (8 - 2 * j)) & 0x03000300u);
    pair[2 * j + 1] = step_base(2 * j + 1, (word >> (2 * j)) & 0x03000300u);
  }
  piece[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  piece[1] = make_uint4(pair[4], pair[5], pair[6], pair[7]);
}
__device__ __forceinline__ std::uint32_t multiply_add(std::uint32_t code, __half2 step, __half2 base) {
  const __half2 value = __hfma2(*reinterpret_cast<const __half2*>(&code), step, base);
  return *reinterpret_cast<const std::uint32_t*>(&value);
}
__device__ __forceinline__ __half2 as_half2(std::uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }

template <typename Config>
struct PageWords {
  static constexpr int kVectors = (Config::kHeadDim + 127) / 128;  // 16-byte words of one side a thread
  uint4 key[kVectors], value[kVectors], mean[kVectors][2];
  int scale, offset;  // of token `thread % 64` of side `thread / 64`
};

template <typename Config>
__device__ __forceinline__ void read_page(const PrefillParams& p, const __half* g_means, int head, int page, int block,
                                          PageWords<Config>& words) {
  const int thread = threadIdx.x;
  const std::uint8_t* base = p.pages + block * p.page_stride_bytes + head * p.head_stride_bytes;
#pragma unroll
  for (int i = 0; i < PageWords<Config>::kVectors; ++i) {
    const int at = thread + 128 * i;
    if (at >= Config::kHeadDim) break;
    words.key[i] = __ldg(reinterpret_cast<const uint4*>(base) + at);
    words.value[i] = __ldg(reinterpret_cast<const uint4*>(base + Config::kHalfBytes) + at);
    const auto* mean = reinterpret_cast<const uint4*>(
        g_means + (static_cast<std::int64_t>(page) * p.num_kv_heads + head) * Config::kHeadDim + at / 64 * 64 +
        at % 4 * 16);
    words.mean[i][0] = __ldg(mean);
    words.mean[i][1] = __ldg(mean + 1);
  }
  const auto* bytes =
      reinterpret_cast<const std::int8_t*>(base + thread / 64 * Config::kHalfBytes + Config::kCodeBytes);
  words.scale = bytes[thread % 64];
  words.offset = bytes[thread % 64 + kPageTokens];
}

template <typename Config>
__device__ __forceinline__ void write_page(const PageWords<Config>& words,
                                           const __half (&s_parameters)[2][2][kPageTokens], std::uint8_t* s_key,
                                           std::uint8_t* s_value) {
#pragma unroll
  for (int i = 0; i < PageWords<Config>::kVectors; ++i) {
    const int at = threadIdx.x + 128 * i, t = at % 4;
    if (at >= Config::kHeadDim) break;
    {
      const int block = at / 64, tokens = at % 64 / 4;  // tokens 4 tokens + {0..3}
      const std::uint32_t word[4] = {words.key[i].x, words.key[i].y, words.key[i].z, words.key[i].w};
      const std::uint32_t mean[8] = {words.mean[i][0].x, words.mean[i][0].y, words.mean[i][0].z, words.mean[i][0].w,
                                     words.mean[i][1].x, words.mean[i][1].y, words.mean[i][1].z, words.mean[i][1].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int row = position_of_token(4 * tokens + w);
        const __half2 step = __half2half2(s_parameters[0][0][row]), base = __half2half2(s_parameters[0][1][row]);
        uint4 piece[2];
        expand_word(
            word[w],
            [&](int k, std::uint32_t code) { return multiply_add(code, step, __hadd2(base, as_half2(mean[k]))); },
            piece);
        std::uint8_t* to = s_key + block * Config::kTileKeys * 128;
        *reinterpret_cast<uint4*>(to + swizzled(row, 2 * t)) = piece[0];
        *reinterpret_cast<uint4*>(to + swizzled(row, 2 * t + 1)) = piece[1];
      }
    }
    {
      const std::uint32_t word[4] = {words.value[i].x, words.value[i].y, words.value[i].z, words.value[i].w};
      std::uint32_t step[8], base[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 s = *reinterpret_cast<const uint4*>(&s_parameters[1][0][8 * t + 32 * half]);
        const uint4 b = *reinterpret_cast<const uint4*>(&s_parameters[1][1][8 * t + 32 * half]);
        step[4 * half] = s.x, step[4 * half + 1] = s.y, step[4 * half + 2] = s.z, step[4 * half + 3] = s.w;
        base[4 * half] = b.x, base[4 * half + 1] = b.y, base[4 * half + 2] = b.z, base[4 * half + 3] = b.w;
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int channel = at / 4 * 4 + w;
        uint4 piece[2];
        expand_word(
            word[w],
            [&](int k, std::uint32_t code) { return multiply_add(code, as_half2(step[k]), as_half2(base[k])); }, piece);
        *reinterpret_cast<uint4*>(s_value + swizzled(channel, t)) = piece[0];
        *reinterpret_cast<uint4*>(s_value + swizzled(channel, t + 4)) = piece[1];
      }
    }
  }
}

template <typename Config>
__device__ __forceinline__ void produce(const PrefillParams& p, const PrefillPlan& plan, const PrefillWork& work,
                                        typename Config::Shared& s) {
  constexpr int kPages = Config::kTilePages;
  const int thread = threadIdx.x, side = thread / 64;
  const auto* workspace = reinterpret_cast<const std::uint8_t*>(p.workspace);
  const auto* g_means = reinterpret_cast<const __half*>(workspace + plan.means_offset);
  const std::int32_t* table = p.block_table + work.request * p.block_table_stride;
  const OffsetScale offset = side == 0 ? p.key_offset[work.head] : p.value_offset[work.head];
  const auto page_at = [&](int tile, int i) { return min(work.first_page + tile * kPages + i, work.last_page); };
  PageWords<Config> words[kPages];
  int block[kPages];
  if (work.history_tiles > 0) {
#pragma unroll
    for (int i = 0; i < kPages; ++i)
      read_page<Config>(p, g_means, work.head, page_at(0, i), table[page_at(0, i)], words[i]);
#pragma unroll
    for (int i = 0; i < kPages; ++i) block[i] = table[page_at(1, i)];
  }
  int stage = 0;
  std::uint32_t parity = 1;  // the first pass finds every stage empty
  for (int tile = 0; tile < work.num_tiles(); ++tile) {
    const std::uint32_t full = shared_address(&s.full[stage]);
    mbarrier_wait(shared_address(&s.empty[stage]), parity);
    if (tile < work.history_tiles) {
      auto& parameters = s.parameters[tile % 2];
#pragma unroll
      for (int i = 0; i < kPages; ++i) {
        const float step = kLevelSpacing * exp2_fast(static_cast<float>(words[i].scale) * 0.0625f);
        const float base = offset.center + static_cast<float>(words[i].offset) * offset.step - 1.5f * step;
        const int at = position_of_token(thread % 64);
        parameters[i][side][0][at] = __float2half_rn(step * (65536.0f / Config::kValueScale));
        parameters[i][side][1][at] = __float2half_rn(base / Config::kValueScale);
      }
      asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
      for (int i = 0; i < kPages; ++i) {
        write_page<Config>(words[i], parameters[i], s.key[stage] + i * kPageTokens * 128,
                           s.value[stage] + i * Config::kHeadDim * 128);
        read_page<Config>(p, g_means, work.head, page_at(tile + 1, i), block[i], words[i]);
        block[i] = table[page_at(tile + 2, i)];
      }
      fence_async_proxy();
      mbarrier_arrive(full);
    } else {
      if (thread == 0) {
        const std::uint8_t* from = workspace + plan.window_offset +
                                   ((static_cast<std::int64_t>(work.request) * p.num_kv_heads + work.head) *
                                        (plan.sink_tiles + plan.recent_tiles) +
                                    work.window_index(plan, tile)) *
                                       plan.window_tile_bytes;
        mbarrier_expect(full, 2 * Config::kTileBytes);
        bulk_copy(shared_address(s.key[stage]), from, Config::kTileBytes, full);
        bulk_copy(shared_address(s.value[stage]), from + Config::kTileBytes, Config::kTileBytes, full);
      } else {
        mbarrier_arrive(full);
      }
    }
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

}  // namespace oscar::cuda
