#pragma once
// Attention of a chunk of queries over the INT2 history and the window rows, in the rotated space.
//
// Grid: (tiles of 128 query rows, KV head); rows are (token, head of the group), so any GQA ratio fills a tile.
// Producer warps expand pages into float16 tiles, two consumer warpgroups of 64 rows do the products (wgmma) and the
// softmax. With codes c, steps s and offsets m of a token's key and value, and q' in units of log2:
//   score    x = s_k (q' . c + (m_k / s_k - 1.5) sum(q') + log2(s_v) / s_k) + q' . mean of the page
//   weight   w = 2^(x - reference), which has s_v in it, rounded to float16; sum w (c - 1.5), sum w / s_v and
//            sum w m_v / s_v are one product, so the output is the exact average for the weights as rounded
// Tensor cores read codes only: no key or value is rounded, and expanding one costs an AND (and a multiply-add for V).
// A page's bytes are read once a block, from L2 when blocks of a head run together. Bound and profile:
// docs/kernel-notes/prefill.md.

#include "producer.cuh"

namespace oscar::cuda {

// The reference of a row's weights follows its maximum only when that is 2^kSlack above: the accumulators are rarely
// rescaled.
inline constexpr float kSlack = 4.0f;

// exp2_fast that stays where it is written: the compiler would move the whole softmax behind the wait for the value
// product, and the two would not overlap.
__device__ __forceinline__ float exp2_in_order(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename Config>
struct ConsumerState {
  static constexpr int kOut = Config::kHeadDim / 2;
  float out[kOut + 4];                      // last four: sums of columns kHeadDim + 2 t, + 1 (lane t), rows g, g + 8
  float reference[2] = {0, 0};              // rows g, g + 8, in log2
  float limit[2] = {-INFINITY, -INFINITY};  // of x - reference; none seen: the first key sets the reference
};

// Queries of this warpgroup's rows into shared memory; absent rows are zero.
template <typename Config>
__device__ __forceinline__ void load_queries(const PrefillParams& p, const PrefillWork& work, int group_row,
                                             std::uint8_t* s_query) {
  const int group = p.num_qo_heads / p.num_kv_heads;
  const auto* rotated = reinterpret_cast<const __half*>(p.workspace);
  for (int k = threadIdx.x % 128; k < Config::kGroupRows * Config::kHeadDim / 8; k += 128) {
    const int piece = k % 8, block = k / 8 % Config::kBlocks, row = k / (8 * Config::kBlocks), index = group_row + row;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (index < work.num_rows) {
      const int flat = work.first_row + index;
      const std::int64_t token = work.query_begin + flat / group;
      value = *reinterpret_cast<const uint4*>(
          rotated + (token * p.num_qo_heads + work.head * group + flat % group) * Config::kHeadDim + 64 * block +
          8 * piece);
    }
    *reinterpret_cast<uint4*>(s_query + block * Config::kGroupRows * 128 + swizzled(row, piece)) = value;
  }
  fence_async_proxy();
}

// Sum of a row's queries as rounded, in units of q'; every lane of a quad gets both of its rows'.
template <typename Config>
__device__ __forceinline__ void sum_queries(const std::uint8_t* s_query, int row, int t, float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = 0;
#pragma unroll
    for (int k = 0; k < 2 * Config::kBlocks; ++k) {
      const int piece = 4 * (k % 2) + t;
      const uint4 words =
          *reinterpret_cast<const uint4*>(s_query + k / 2 * Config::kGroupRows * 128 + swizzled(row + 8 * r, piece));
      const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word[i]));
        sum[r] = fmaf(pair.x + pair.y, 1.0f / query_factor(2 * (piece % 2) + i / 2), sum[r]);
      }
    }
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
}

// d[64 x kColumns] = queries times a tile of kColumns rows.
template <typename Config, int kColumns>
__device__ __forceinline__ void multiply_queries(std::uint32_t query, std::uint32_t tile, float (&d)[kColumns / 2]) {
  asm volatile("" : "+r"(query));  // else a descriptor a step is kept in registers, and spilled
  const std::uint64_t a = tile_descriptor(query), b = tile_descriptor(tile);
#pragma unroll
  for (int k = 0; k < Config::kHeadDim / 16; ++k)
    wgmma_shared(d, advanced(a, k / 4 * Config::kGroupRows * 128 + k % 4 * 32),
                 advanced(b, k / 4 * kColumns * 128 + k % 4 * 32), k > 0);
}

template <typename Config>
__device__ __forceinline__ void accumulate_tile(const std::uint32_t (&weight)[Config::kTileKeys / 16][4],
                                                std::uint32_t value, ConsumerState<Config>& state) {
  const std::uint64_t b = tile_descriptor(value);
#pragma unroll
  for (int k = 0; k < Config::kTileKeys / 16; ++k) {
    const std::uint64_t from = advanced(b, k / 4 * Config::kValueRows * 128 + k % 4 * 32);
    if constexpr (Config::kHeadDim == 256) {  // a product has at most 256 columns
      wgmma_registers(reinterpret_cast<float(&)[128]>(state.out), weight[k], from);
      wgmma_registers(reinterpret_cast<float(&)[4]>(state.out[128]), weight[k], advanced(from, 256 * 128));
    } else {
      wgmma_registers(state.out, weight[k], from);
    }
  }
  wgmma_commit();
}

// Terms q' . mean of a group of pages, for this warp's rows.
template <typename Config>
__device__ __forceinline__ void compute_mean_terms(std::uint32_t query, int group, int warp, int lane,
                                                   typename Config::Shared& s,
                                                   float (*terms)[Config::kMeanTermStride]) {
  const int g = lane / 4, t = lane % 4;
  float d[Config::kMeanPages];
  mbarrier_wait(shared_address(&s.means_full), group % 2);
  wgmma_fence();
  multiply_queries<Config, 2 * Config::kMeanPages>(query, shared_address(s.means), d);
  wgmma_commit();
  wgmma_wait<0>();
  if (lane == 0) mbarrier_arrive(shared_address(&s.means_empty));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Config::kMeanPages / 4; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) terms[4 * i + t][16 * warp + g + 8 * r] = d[4 * i + 2 * r] + d[4 * i + 2 * r + 1];
  __syncwarp();
}

// What a thread needs beside the products of a tile, read while these are computed: the steps of its keys, a few ahead
// of their use, and the terms of the pages' means.
template <typename Config>
struct TileTerms {
  static constexpr int kReads = Config::kTileKeys / 16, kAhead = 4;  // of four keys each
  float step[kAhead][4];
  float mean[Config::kTilePages][2];  // of the tile's pages, rows g and g + 8
  std::uint32_t from;

  __device__ __forceinline__ TileTerms(const float* s_steps, const float (*s_mean)[Config::kMeanTermStride], int row,
                                       int t)
      : from(shared_address(s_steps + t * step_row(Config::kTileKeys))) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) read_steps(k);
#pragma unroll
    for (int i = 0; i < 2 * Config::kTilePages; ++i)
      mean[i / 2][i % 2] = s_mean != nullptr ? s_mean[i / 2][row + 8 * (i % 2)] : 0.0f;
  }
  __device__ __forceinline__ void read_steps(int k) {
    float(&to)[4] = step[k % kAhead];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(from + 16 * k)
                 : "memory");
  }
};

// Products to x + log2(value step) - reference, in place.
template <typename Config>
__device__ __forceinline__ void score_tile(const PrefillParams& p, TileTerms<Config>& terms, bool history,
                                           const std::int8_t* s_log_weights, const ConsumerState<Config>& state, int t,
                                           float (&score)[Config::kTileKeys / 2]) {
  const bool capped = p.soft_cap > 0;
  float start[Config::kTilePages][2];
#pragma unroll
  for (int i = 0; i < 2 * Config::kTilePages; ++i)
    start[i / 2][i % 2] = terms.mean[i / 2][i % 2] - (capped ? 0.0f : state.reference[i % 2]);
#pragma unroll
  for (int k = 0; k < TileTerms<Config>::kReads; ++k) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = score[8 * k + i];
      x = fmaf(terms.step[k % terms.kAhead][i / 4 * 2 + i % 2], x, start[k / 4][i / 2 % 2]);
    }
    if (k + terms.kAhead < terms.kReads) terms.read_steps(k + terms.kAhead);
  }
  if (capped) {
    const float inverse = 1.0f / (kLog2OfE * p.soft_cap), cap = p.soft_cap * kLog2OfE;
    const auto* codes = reinterpret_cast<const std::uint32_t*>(s_log_weights + t * (Config::kTileKeys / 4));
    const float unit = history ? 0.0625f : 0.0f, offset = history ? kLog2OfLevelSpacing : 0.0f;
#pragma unroll
    for (int k = 0; k < Config::kTileKeys / 2; ++k) {
      const int key = k / 4 * 2 + k % 2;
      const float log_weight = fmaf(signed_byte(codes[key / 4], key % 4), unit, offset);
      score[k] = fmaf(cap, tanh_fast(score[k] * inverse), log_weight - state.reference[k / 2 % 2]);
    }
  }
}

// Keys that a row doesn't read get a score of minus infinity.
template <typename Config>
__device__ __forceinline__ void mask_tile(const PrefillParams& p, const PrefillWork& work, int tile,
                                          const int (&position)[2], int t, float (&score)[Config::kTileKeys / 2]) {
  int first;
  if (tile < work.history_tiles)
    first = (work.first_page + tile * Config::kTilePages) * kPageTokens;
  else if (tile < work.history_tiles + work.sink_tiles)
    first = (tile - work.history_tiles) * Config::kTileKeys;
  else
    first = max(work.history - p.recent + 1, 0) + (tile - work.history_tiles - work.sink_tiles) * Config::kTileKeys;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const KeyBounds bounds = work.bounds(p, tile, position[r]);
#pragma unroll
    for (int k = 0; k < Config::kTileKeys / 4; ++k) {
      const int token = first + k / 2 * 8 + t + k % 2 * 4;  // position 2 t + k % 2 of eight
      if (token < bounds.low || token > bounds.high) score[4 * (k / 2) + 2 * r + k % 2] = -INFINITY;
    }
  }
}

// Moves a row's reference when its maximum has left it behind. True: `factor` is what the sums so far shrink by.
template <typename Config>
__device__ __forceinline__ bool follow_maximum(float (&score)[Config::kTileKeys / 2], ConsumerState<Config>& state,
                                               float (&factor)[2]) {
  float max[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float chain[2] = {score[2 * r], score[2 * r + 1]};
#pragma unroll
    for (int k = 1; k < Config::kTileKeys / 8; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) chain[i] = fmaxf(chain[i], score[4 * k + 2 * r + i]);
    max[r] = fmaxf(chain[0], chain[1]);
  }
  if (!__any_sync(~0u, max[0] > state.limit[0] || max[1] > state.limit[1])) return false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 1));
    max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 2));
    const bool moves = max[r] > state.limit[r];
    const float shift = moves ? max[r] : 0.0f;
    factor[r] = state.limit[r] == -INFINITY ? 0.0f : exp2_fast(-shift);  // nothing to keep yet
    state.reference[r] += shift;
    if (moves) state.limit[r] = kSlack;
#pragma unroll
    for (int k = 0; k < Config::kTileKeys / 8; ++k) {
      score[4 * k + 2 * r] -= shift;
      score[4 * k + 2 * r + 1] -= shift;
    }
  }
  return true;
}

// Weights as float16 operands of the value product.
template <typename Config>
__device__ __forceinline__ void pack_weights(const float (&score)[Config::kTileKeys / 2],
                                             std::uint32_t (&weight)[Config::kTileKeys / 16][4]) {
#pragma unroll
  for (int k = 0; k < Config::kTileKeys / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair = __floats2half2_rn(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
      weight[k][i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
}

// The consumers issue their products in turn, so that one computes its softmax beside the other's products.
__device__ __forceinline__ void take_turn(int consumer) {
  asm volatile("bar.sync %0, 256;" ::"r"(4 + consumer) : "memory");
}
__device__ __forceinline__ void give_turn(int consumer) {
  asm volatile("bar.arrive %0, 256;" ::"r"(4 + consumer) : "memory");
}

template <typename Config>
__device__ __forceinline__ void consume(const PrefillParams& p, const PrefillWork& work, typename Config::Shared& s) {
  const int block_thread = thread_in_register(), consumer = block_thread / 128 - 1, thread = block_thread % 128;
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int group = p.num_qo_heads / p.num_kv_heads, row0 = consumer * Config::kGroupRows + 16 * warp + g;
  int position[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    position[r] = work.history + (work.first_row + min(row0 + 8 * r, work.num_rows - 1)) / group;
  const std::uint32_t query = shared_address(s.query[consumer]);
  load_queries<Config>(p, work, consumer * Config::kGroupRows, s.query[consumer]);
  asm volatile("bar.sync %0, 128;" ::"r"(2 + consumer) : "memory");
  float query_sum[2];
  sum_queries<Config>(s.query[consumer], 16 * warp + g, t, query_sum);
  const std::uint32_t terms_of_rows[4] = {query_terms(query_sum[0], t), query_terms(query_sum[1], t), 0, 0};

  ConsumerState<Config> state;
#pragma unroll
  for (int k = 0; k < Config::kHeadDim / 2 + 4; ++k) state.out[k] = 0;
  float score[Config::kTileKeys / 2];
  std::uint32_t weight[Config::kTileKeys / 16][4];
  const int num_tiles = work.num_tiles();
  int mean_groups = 0;
  const auto wait_for = [&](std::uint64_t(&full)[Config::kStages], int tile) {
    mbarrier_wait(shared_address(&full[tile % Config::kStages]), tile / Config::kStages % 2);
  };
  const auto release = [&](std::uint64_t(&empty)[Config::kStages], int tile) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&empty[tile % Config::kStages]));
  };
  const auto update_mean_terms = [&](int tile) {
    const int page = work.first_page + tile * Config::kTilePages;
    if (p.block_means != nullptr && tile < work.history_tiles && (tile == 0 || page % Config::kMeanPages == 0))
      compute_mean_terms<Config>(query, mean_groups++, warp, lane, s, s.mean_terms[consumer]);
  };
  // Scores to 2^(x - reference) in place
  float factor[2];
  const auto terms_of = [&](int tile) {
    const int page = (work.first_page + tile * Config::kTilePages) % Config::kMeanPages;
    const bool has_means = p.block_means != nullptr && tile < work.history_tiles;
    return TileTerms<Config>(s.steps[tile % Config::kStepStages], has_means ? s.mean_terms[consumer] + page : nullptr,
                             16 * warp + g, t);
  };
  const auto score_keys = [&](int tile) {
    const int stage = tile % Config::kStages;
    multiply_queries<Config, Config::kTileKeys>(query, shared_address(s.key[stage]), score);
    wgmma_registers(score, terms_of_rows, tile_descriptor_32(shared_address(s.terms[stage])));
    wgmma_commit();
  };
  const auto softmax = [&](int tile, TileTerms<Config>& terms) {
    score_tile<Config>(p, terms, tile < work.history_tiles, s.log_weights[tile % Config::kStepStages], state, t, score);
    if (tile < work.whole_begin || tile >= work.whole_end) mask_tile<Config>(p, work, tile, position, t, score);
    const bool moved = follow_maximum<Config>(score, state, factor);
#pragma unroll
    for (int k = 0; k < Config::kTileKeys / 2; ++k) score[k] = exp2_in_order(score[k]);
    return moved;
  };
  if (num_tiles > 0) {
    if (consumer == 1 && num_tiles > 1) give_turn(0);
    update_mean_terms(0);
    wait_for(s.key_full, 0);
    wgmma_fence();
    score_keys(0);
    TileTerms<Config> first_terms = terms_of(0);
    wgmma_wait<0>();
    release(s.key_empty, 0);
    softmax(0, first_terms);
    pack_weights<Config>(score, weight);
    for (int tile = 1; tile < num_tiles; ++tile) {
      update_mean_terms(tile);
      wait_for(s.key_full, tile);
      take_turn(consumer);
      wgmma_fence();
      score_keys(tile);
      TileTerms<Config> terms = terms_of(tile);
      wait_for(s.value_full, tile - 1);
      wgmma_fence();
      accumulate_tile<Config>(weight, shared_address(s.value[(tile - 1) % Config::kStages]), state);
      if (consumer == 0 || tile + 1 < num_tiles) give_turn(1 - consumer);
      wgmma_wait<1>();
      release(s.key_empty, tile);
      const bool moved = softmax(tile, terms);
      wgmma_wait<0>();
      release(s.value_empty, tile - 1);
      if (moved) {
#pragma unroll
        for (int k = 0; k < Config::kHeadDim / 2 + 4; ++k) state.out[k] *= factor[k / 2 % 2];
      }
      pack_weights<Config>(score, weight);
    }
    wait_for(s.value_full, num_tiles - 1);
    wgmma_fence();
    accumulate_tile<Config>(weight, shared_address(s.value[(num_tiles - 1) % Config::kStages]), state);
    wgmma_wait<0>();
  }

  auto* rotated = reinterpret_cast<__half*>(p.workspace);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // columns 0, 1 (lane 0 of the quad): sum of the weights; 2, 3 (lane 1): of the offsets
    const float own = state.out[Config::kHeadDim / 2 + 2 * r] + state.out[Config::kHeadDim / 2 + 2 * r + 1];
    const float sum = __shfl_sync(~0u, own, lane & ~3) * (1.0f / kInverseStepUnit);
    const float offset = __shfl_sync(~0u, own, lane & ~3 | 1);
    const int index = row0 + 8 * r;
    if (index >= work.num_rows) continue;
    const int flat = work.first_row + index, qo_head = work.head * group + flat % group;
    const std::int64_t row = (work.query_begin + flat / group) * static_cast<std::int64_t>(p.num_qo_heads) + qo_head;
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    __half* to = rotated + row * Config::kHeadDim + 2 * t;  // in place of the query
#pragma unroll
    for (int k = 0; k < Config::kHeadDim / 8; ++k) {
      const float *pair = &state.out[4 * k + 2 * r], unit = 1.0f / kValueUnit;
      *reinterpret_cast<__half2*>(to + 8 * k) = __halves2half2(saturated_half(fmaf(pair[0], unit, offset) * inverse),
                                                               saturated_half(fmaf(pair[1], unit, offset) * inverse));
    }
    if (t == 0) p.lse[row] = sum > 0 ? (state.reference[r] + log2f(sum)) * 0.6931471805599453f : -INFINITY;
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kNumThreads, 1) void prefill_kernel(const __grid_constant__ PrefillParams p,
                                                                         const __grid_constant__ PrefillPlan plan) {
  extern __shared__ __align__(1024) std::uint8_t dynamic[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(dynamic);
  PrefillWork work;
  if (!find_work<Config>(p, plan, work)) return;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(shared_address(&s.key_full[stage]), 4);
      mbarrier_init(shared_address(&s.value_full[stage]), 4);
      mbarrier_init(shared_address(&s.key_empty[stage]), 4 * Config::kConsumers);
      mbarrier_init(shared_address(&s.value_empty[stage]), 4 * Config::kConsumers);
    }
    for (int stage = 0; stage < Config::kRawStages; ++stage) {
      mbarrier_init(shared_address(&s.raw_full[stage]), 1);
      mbarrier_init(shared_address(&s.raw_empty[stage]), 4);
    }
    mbarrier_init(shared_address(&s.means_full), 1);
    mbarrier_init(shared_address(&s.means_empty), 4 * Config::kConsumers);
    fence_mbarrier_init();
  }
  // rows of the value tiles that stay zero
  for (int k = threadIdx.x; k < Config::kStages * Config::kTilePages * 4 * 32; k += Config::kNumThreads)
    *reinterpret_cast<std::uint32_t*>(s.value[k / 128 / Config::kTilePages] +
                                      (k / 128 % Config::kTilePages * Config::kValueRows + Config::kHeadDim + 4) * 128 +
                                      4 * (k % 128)) = 0;
  for (int k = threadIdx.x; k < Config::kStages * prefill_term_bytes(Config::kHeadDim) / 16; k += Config::kNumThreads)
    reinterpret_cast<uint4*>(s.terms)[k] = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kProducerRegisters));
    produce<Config>(p, plan, work, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kConsumerRegisters));
    consume<Config>(p, work, s);
  }
}

}  // namespace oscar::cuda
