#pragma once
// The producer warps: pages of 2-bit codes, brought by bulk copies some tiles ahead, become float16 tiles in shared
// memory; window tiles are copied as they are. K and V have barriers of their own: a K tile is free after its scores, a
// V tile an iteration later.

#include "work.cuh"

namespace oscar::cuda {

// The thread's index through a shuffle: the compiler would read it again wherever it is used, and wait for it.
__device__ __forceinline__ int thread_in_register() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x % 32));
}

// One arrival a warp for what its lanes have written; whether tensor cores or threads read it.
__device__ __forceinline__ void publish(std::uint32_t barrier, int lane) {
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(barrier);
}

// Sixteen codes of a word as eight pairs, bits 2 j and 2 j + 1 of two bytes where they lie. Order: layout.hpp.
__device__ __forceinline__ void split_word(std::uint32_t word, std::uint32_t (&pair)[8]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    pair[2 * j] = word & (0x00030003u << (2 * j));
    pair[2 * j + 1] = (word >> 8) & (0x00030003u << (2 * j));
  }
}

__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}
__device__ __forceinline__ void store_shared(std::uint32_t address, const std::uint32_t* x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// A thread's 16-byte words of a side of a tile: word `thread` and, 128 further, the next; where they lie and where
// their pieces go. Registers are scarce here: every address is one exclusive-or and a constant away from one of three.
template <typename Config>
struct TileWords {
  static constexpr int kCount = Config::kTilePages * Config::kHeadDim / 128;
  static constexpr bool kNextIsPage = Config::kHeadDim == 128;  // else the same page, 128 channels (or tokens) on
  static constexpr int kRawStep = kNextIsPage ? 2 * Config::kHalfBytes : 128 * 16;
  static constexpr int kKeyStep = kNextIsPage ? kPageTokens * 128 : 2 * Config::kTileKeys * 128;
  static constexpr int kValueStep = kNextIsPage ? Config::kValueRows * 128 : 128 * 128;
  std::uint32_t raw, key, value;  // offsets in a raw stage, a key tile, a value tile

  __device__ __forceinline__ explicit TileWords(int thread) {
    const int page = thread / Config::kHeadDim, at = thread % Config::kHeadDim, t = at % 4, odd = at / 4 % 2;
    raw = page * 2 * Config::kHalfBytes + 16 * at;
    // tokens 4 (at % 64 / 4) + w: rows 8 (at % 64 / 8) + 2 w + odd, pieces 2 t + e
    key = (at / 64 * Config::kTileKeys + page * kPageTokens + at % 64 / 8 * 8 + odd) * 128 + 32 * t + 16 * odd;
    // channels 4 (at / 4) + w, pieces t + 4 e
    value = (page * Config::kValueRows + at / 4 * 4) * 128 + 16 * t + 64 * odd;
  }
};

template <typename Config>
__device__ __forceinline__ void read_words(std::uint32_t from, uint4 (&word)[TileWords<Config>::kCount]) {
#pragma unroll
  for (int i = 0; i < TileWords<Config>::kCount; ++i) word[i] = load_shared(from + i * TileWords<Config>::kRawStep);
}

template <typename Config>
__device__ __forceinline__ void expand_keys(const uint4 (&words)[TileWords<Config>::kCount], std::uint32_t to) {
#pragma unroll
  for (int i = 0; i < TileWords<Config>::kCount; ++i) {
    const std::uint32_t word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      std::uint32_t pair[8];
      split_word(word[w], pair);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        store_shared((to ^ (32 * w + 16 * e)) + 256 * w + i * TileWords<Config>::kKeyStep, pair + 4 * e);
    }
  }
}

// Codes less 1.5: sums over a long history stay small beside what the tensor cores' accumulation truncates.
template <typename Config>
__device__ __forceinline__ void expand_values(const uint4 (&words)[TileWords<Config>::kCount], std::uint32_t to) {
  const __half2 center = __float2half2_rn(-1.5f * kValueUnit);
#pragma unroll
  for (int i = 0; i < TileWords<Config>::kCount; ++i) {
    const std::uint32_t word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      std::uint32_t pair[8];
      split_word(word[w], pair);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const __half2 unit = __float2half2_rn(kValueUnit * static_cast<float>(1 << (24 - k / 2 * 2)));
        const __half2 level = __hfma2(*reinterpret_cast<const __half2*>(&pair[k]), unit, center);  // exact
        pair[k] = *reinterpret_cast<const std::uint32_t*>(&level);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e)
        store_shared((to ^ (16 * w + 64 * e)) + 128 * w + i * TileWords<Config>::kValueStep, pair + 4 * e);
    }
  }
}

// A key's 16 channels beside its codes, which meet query_terms: (offset / step - 1.5) 2^-12 twice, what its rounding
// left, and the same of log2(value step) / step.
__device__ __forceinline__ uint4 key_terms(float base, float weight) {
  const __half base_high = __float2half_rn(base * 0x1p-12f), weight_high = __float2half_rn(weight * 0x1p-12f);
  const __half base_low = __float2half_rn(fmaf(__half2float(base_high), -0x1p12f, base) * 0x1p-4f);
  const __half weight_low = __float2half_rn(fmaf(__half2float(weight_high), -0x1p12f, weight) * 0x1p-4f);
  const __half2 pair[3] = {__halves2half2(base_high, base_high), __halves2half2(base_low, weight_high),
                           __halves2half2(weight_low, __half(0.0f))};
  const auto* bits = reinterpret_cast<const std::uint32_t*>(pair);
  return make_uint4(bits[0], bits[1], bits[2], 0);
}
// Their counterpart of a row: elements 2 t and 2 t + 1.
__device__ __forceinline__ std::uint32_t query_terms(float query_sum, int t) {
  const __half high = saturated_half(query_sum * 0x1p-8f);
  const __half low = saturated_half(fmaf(query_sum, 0x1p-8f, -__half2float(high)));
  const __half2 pair = t == 0   ? __halves2half2(high, low)
                       : t == 1 ? __halves2half2(saturated_half(query_sum * 0x1p-16f), __float2half_rn(0x1p-8f))
                       : t == 2 ? __halves2half2(__float2half_rn(0x1p-16f), __half(0.0f))
                                : __halves2half2(__half(0.0f), __half(0.0f));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// The four 8-bit parameters of a thread's token, read ahead of the codes' expansion.
template <typename Config>
struct TokenParameters {
  float key_step, key_offset, value_step, value_offset;
  __device__ __forceinline__ TokenParameters(const std::uint8_t (&raw)[Config::kTilePages][2 * Config::kHalfBytes],
                                             int thread) {
    const int page = thread / kPageTokens % Config::kTilePages;
    const auto* bytes = reinterpret_cast<const std::int8_t*>(raw[page] + Config::kCodeBytes) + thread % kPageTokens;
    key_step = static_cast<float>(bytes[0]) * 0.0625f;
    key_offset = static_cast<float>(bytes[kPageTokens]);
    value_step = static_cast<float>(bytes[Config::kHalfBytes]) * 0.0625f;
    value_offset = static_cast<float>(bytes[Config::kHalfBytes + kPageTokens]);
  }
};

// Step and terms of the thread's key. A soft cap is of the score alone, so that log2(value step) joins it later.
template <typename Config>
__device__ __forceinline__ void write_terms(const TokenParameters<Config>& token, int thread, OffsetScale offset,
                                            bool capped, float* s_steps, std::uint8_t* s_terms,
                                            std::int8_t* s_log_weights) {
  if (thread >= Config::kTileKeys) return;
  const int position = thread / kPageTokens * kPageTokens + position_of_token(thread % kPageTokens);
  const float inverse = 1.0f / kLevelSpacing * exp2_fast(-token.key_step);
  const float middle = fmaf(token.key_offset, offset.step, offset.center);
  const float log_weight = capped ? 0.0f : token.value_step + kLog2OfLevelSpacing;
  s_steps[step_index(position, Config::kTileKeys)] = kLevelSpacing * kScoreUnit * exp2_fast(token.key_step);
  *reinterpret_cast<uint4*>(s_terms + swizzled_32(position, 0)) =
      key_terms(fmaf(middle, inverse, -1.5f), log_weight * inverse);
  if (capped)
    s_log_weights[log_weight_index(position, Config::kTileKeys)] = static_cast<std::int8_t>(token.value_step * 16.0f);
}

// Rows of the value tile that sum the weights and the offsets: the weights carry the step, so they hold 1 / step and
// offset / step, exact to 22 bits.
template <typename Config>
__device__ __forceinline__ void write_value_rows(const TokenParameters<Config>& token, int thread, OffsetScale offset,
                                                 std::uint8_t* s_value) {
  if (thread >= Config::kTileKeys) return;
  const int position = position_of_token(thread % kPageTokens);
  const float inverse = kInverseStepUnit / kLevelSpacing * exp2_fast(-token.value_step);
  const float middle = fmaf(token.value_offset, offset.step, offset.center);
  const float row[2] = {inverse, middle * inverse * (1.0f / kInverseStepUnit)};
  std::uint8_t* to =
      s_value + (thread / kPageTokens * Config::kValueRows + Config::kHeadDim) * 128 + 2 * (position % 8);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half rounded = i == 0 ? __float2half_rn(row[i]) : saturated_half(row[i]);
    *reinterpret_cast<__half*>(to + swizzled(2 * i, position / 8)) = rounded;
    *reinterpret_cast<__half*>(to + swizzled(2 * i + 1, position / 8)) =
        __float2half_rn(row[i] - __half2float(rounded));
  }
}

// Blocks of a tile's pages.
template <typename Config>
__device__ __forceinline__ void look_up(const PrefillParams& p, const PrefillWork& work, int tile,
                                        std::int32_t (&block)[Config::kTilePages]) {
  const std::int32_t* table = p.block_table + work.request * p.block_table_stride;
  const int page0 = work.first_page + tile * Config::kTilePages;
#pragma unroll
  for (int page = 0; page < Config::kTilePages; ++page)  // the last tile may repeat the last page: masked
    block[page] = table[min(page0 + page, work.last_page)];
}
// Starts the copies of a tile. One thread; what they need is computed anew each time, so that no register is held for
// it.
template <typename Config>
__device__ __forceinline__ void start_copies(const PrefillParams& p, const PrefillPlan& plan, const PrefillWork& work,
                                             typename Config::Shared& s, int tile,
                                             const std::int32_t (&block)[Config::kTilePages]) {
  if (tile >= work.history_tiles) return;
  const int stage = tile % Config::kRawStages, page0 = work.first_page + tile * Config::kTilePages;
  const std::uint32_t full = shared_address(&s.raw_full[stage]);
  mbarrier_wait(shared_address(&s.raw_empty[stage]), tile / Config::kRawStages % 2 ^ 1);
  mbarrier_expect(full, Config::kTilePages * 2 * Config::kHalfBytes);
  const std::uint8_t* pages = p.pages + work.head * p.head_stride_bytes;
#pragma unroll
  for (int page = 0; page < Config::kTilePages; ++page)
    bulk_copy(shared_address(s.raw[stage][page]), pages + block[page] * p.page_stride_bytes, 2 * Config::kHalfBytes,
              full);
  if (p.block_means != nullptr && (tile == 0 || page0 % Config::kMeanPages == 0)) {
    const int group = page0 / Config::kMeanPages, order = group - work.first_page / Config::kMeanPages;
    mbarrier_wait(shared_address(&s.means_empty), order % 2 ^ 1);
    mbarrier_expect(shared_address(&s.means_full), Config::kMeansBytes);
    const std::uint8_t* means = reinterpret_cast<const std::uint8_t*>(p.workspace) + plan.means_offset;
    bulk_copy(shared_address(s.means),
              means + (static_cast<std::int64_t>(group) * p.num_kv_heads + work.head) * Config::kMeansBytes,
              Config::kMeansBytes, shared_address(&s.means_full));
  }
}

// Image of a window tile, copied as it is; one thread.
template <typename Config>
__device__ __forceinline__ void copy_window_keys(const std::uint8_t* image, typename Config::Shared& s, int tile) {
  const int stage = tile % Config::kStages, step_stage = tile % Config::kStepStages;
  const std::uint32_t full = shared_address(&s.key_full[stage]);
  constexpr int kTermBytes = sizeof(s.terms[0]), kStepBytes = sizeof(s.steps[0]);
  mbarrier_expect(full, Config::kKeyBytes + kTermBytes + kStepBytes);
  bulk_copy(shared_address(s.key[stage]), image, Config::kKeyBytes, full);
  image += Config::kKeyBytes + Config::kValueBytes;
  bulk_copy(shared_address(s.terms[stage]), image, kTermBytes, full);
  bulk_copy(shared_address(s.steps[step_stage]), image + kTermBytes, kStepBytes, full);
}
template <typename Config>
__device__ __forceinline__ void copy_window_values(const std::uint8_t* image, typename Config::Shared& s, int tile) {
  const int stage = tile % Config::kStages;
  const std::uint32_t full = shared_address(&s.value_full[stage]);
  mbarrier_expect(full, Config::kValueBytes);
  bulk_copy(shared_address(s.value[stage]), image + Config::kKeyBytes, Config::kValueBytes, full);
}

template <typename Config>
__device__ __forceinline__ void produce(const PrefillParams& p, const PrefillPlan& plan, const PrefillWork& work,
                                        typename Config::Shared& s) {
  constexpr int kAhead = Config::kRawStages - 1;
  const int thread = thread_in_register(), lane = thread % 32, warp = thread / 32;
  const TileWords<Config> own(thread);
  const OffsetScale key_offset = p.key_offset[work.head], value_offset = p.value_offset[work.head];
  std::int32_t block[Config::kTilePages];
  if (thread == 0 && work.history_tiles > 0)
    for (int i = 0; i < kAhead; ++i) {
      look_up<Config>(p, work, i, block);
      start_copies<Config>(p, plan, work, s, i, block);
    }
  // Then the warps take turns, or one of them would always be last.
  if (lane == 0 && work.history_tiles > 0) look_up<Config>(p, work, kAhead + (warp - kAhead & 3), block);
  int tile = 0;
  for (; tile < work.history_tiles; ++tile) {
    const int stage = tile % Config::kStages, step_stage = tile % Config::kStepStages;
    const int raw_stage = tile % Config::kRawStages;
    const std::uint32_t empty_parity = tile / Config::kStages % 2 ^ 1;  // the first pass finds every stage empty
    const auto& raw = s.raw[raw_stage];
    uint4 words[TileWords<Config>::kCount];
    mbarrier_wait(shared_address(&s.raw_full[raw_stage]), tile / Config::kRawStages % 2);
    read_words<Config>(shared_address(raw) + own.raw, words);
    const TokenParameters<Config> token(raw, thread);
    mbarrier_wait(shared_address(&s.key_empty[stage]), empty_parity);
    expand_keys<Config>(words, shared_address(s.key[stage]) + own.key);
    read_words<Config>(shared_address(raw) + Config::kHalfBytes + own.raw, words);
    write_terms<Config>(token, thread, key_offset, p.soft_cap > 0, s.steps[step_stage], s.terms[stage],
                        s.log_weights[step_stage]);
    publish(shared_address(&s.key_full[stage]), lane);
    if (lane == 0) {
      mbarrier_arrive(shared_address(&s.raw_empty[raw_stage]));
      if ((tile + kAhead) % 4 == warp) {  // into the stage of the tile before
        start_copies<Config>(p, plan, work, s, tile + kAhead, block);
        look_up<Config>(p, work, tile + kAhead + 4, block);
      }
    }
    mbarrier_wait(shared_address(&s.value_empty[stage]), empty_parity);
    expand_values<Config>(words, shared_address(s.value[stage]) + own.value);
    write_value_rows<Config>(token, thread, value_offset, s.value[stage]);
    publish(shared_address(&s.value_full[stage]), lane);
  }
  const std::uint8_t* window = reinterpret_cast<const std::uint8_t*>(p.workspace) + plan.window_offset +
                               (static_cast<std::int64_t>(work.request) * p.num_kv_heads + work.head) *
                                   (plan.sink_tiles + plan.recent_tiles) * plan.window_tile_bytes;
  for (; tile < work.num_tiles(); ++tile) {
    const int stage = tile % Config::kStages;
    const std::uint32_t empty_parity = tile / Config::kStages % 2 ^ 1;
    const std::uint8_t* image = window + work.window_index(plan, tile) * plan.window_tile_bytes;
    mbarrier_wait(shared_address(&s.key_empty[stage]), empty_parity);
    if (thread == 0)
      copy_window_keys<Config>(image, s, tile);
    else if (lane == 0)
      mbarrier_arrive(shared_address(&s.key_full[stage]));
    mbarrier_wait(shared_address(&s.value_empty[stage]), empty_parity);
    if (thread == 0)
      copy_window_values<Config>(image, s, tile);
    else if (lane == 0)
      mbarrier_arrive(shared_address(&s.value_full[stage]));
  }
}

}  // namespace oscar::cuda
