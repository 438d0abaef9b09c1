#pragma once
// Attention of a chunk of queries over the INT2 history and the window rows, in the rotated space.
//
// Grid: (tiles of 128 query rows, KV head); rows are (token, head of the group), so any GQA ratio fills a tile. One
// producer warpgroup expands pages into float16 tiles, two consumer warpgroups of 64 rows do the products (wgmma) and
// the softmax. Keys carry their page's mean, so the position term costs an addition where a page is expanded. A page's
// bytes are read once a block, from L2 when blocks of a head run together. Should be bound by tensor cores (4 head_dim
// operations a row and key); they are 57 % busy, held back by the producer (docs/measurements/cuda_prefill.md).

#include "producer.cuh"

namespace oscar::cuda {

template <typename Config>
struct ConsumerState {
  float out[Config::kHeadDim / 2];
  float max[2] = {-INFINITY, -INFINITY};  // rows g, g + 8, in units of the scores
  float sum[2] = {0, 0};                  // this lane's share
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

template <typename Config>
__device__ __forceinline__ void score_tile(std::uint32_t query, std::uint32_t key,
                                           float (&score)[Config::kTileKeys / 2]) {
#pragma unroll
  for (int k = 0; k < Config::kHeadDim / 16; ++k)
    wgmma_shared(score, tile_descriptor(query + k / 4 * Config::kGroupRows * 128 + k % 4 * 32),
                 tile_descriptor(key + k / 4 * Config::kTileKeys * 128 + k % 4 * 32), k > 0);
}

template <typename Config>
__device__ __forceinline__ void accumulate_tile(const std::uint32_t (&weight)[Config::kTileKeys / 16][4],
                                                std::uint32_t value, float (&out)[Config::kHeadDim / 2]) {
#pragma unroll
  for (int k = 0; k < Config::kTileKeys / 16; ++k)
    wgmma_registers(out, weight[k], tile_descriptor(value + k / 4 * Config::kHeadDim * 128 + k % 4 * 32));
}

// Scores to weights 2^(unit (score - max)), in place; `factor` is what the sums so far shrink by.
template <typename Config>
__device__ __forceinline__ void softmax_tile(const PrefillParams& p, const PrefillWork& work, int tile,
                                             const int (&position)[2], float unit,
                                             float (&score)[Config::kTileKeys / 2], ConsumerState<Config>& state,
                                             float (&factor)[2]) {
  constexpr int kValues = Config::kTileKeys / 4;  // a row
  const int t = threadIdx.x % 4;
  const auto at = [&](int r, int k) -> float& { return score[4 * (k / 2) + 2 * r + k % 2]; };
  if (p.soft_cap > 0) {
    const float inverse = p.scale * Config::kValueScale / p.soft_cap, cap = p.soft_cap * kLog2OfE;
#pragma unroll
    for (int k = 0; k < Config::kTileKeys / 2; ++k) score[k] = cap * tanh_fast(score[k] * inverse);
  }
  int first;
  if (tile < work.history_tiles)
    first = (work.first_page + tile * Config::kTilePages) * kPageTokens;
  else if (tile < work.history_tiles + work.sink_tiles)
    first = (tile - work.history_tiles) * Config::kTileKeys;
  else
    first = max(work.history - p.recent + 1, 0) + (tile - work.history_tiles - work.sink_tiles) * Config::kTileKeys;
  const KeyBounds early = work.bounds(p, tile, work.first_position), late = work.bounds(p, tile, work.last_position);
  if (first < max(early.low, late.low) || first + Config::kTileKeys - 1 > min(early.high, late.high)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KeyBounds bounds = work.bounds(p, tile, position[r]);
#pragma unroll
      for (int k = 0; k < kValues; ++k) {
        const int token = first + k / 2 * 8 + t + k % 2 * 4;  // position 2 t + k % 2 of eight
        if (token < bounds.low || token > bounds.high) at(r, k) = -INFINITY;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = at(r, 0);
#pragma unroll
    for (int k = 1; k < kValues; ++k) max = fmaxf(max, at(r, k));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
    max = fmaxf(max, state.max[r]);
    const float reference = max == -INFINITY ? 0.0f : max;
    factor[r] = exp2_fast((state.max[r] - reference) * unit);
    state.max[r] = max;
    const float shift = -reference * unit;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      at(r, k) = exp2_fast(fmaf(at(r, k), unit, shift));
      sum += at(r, k);
    }
    state.sum[r] = fmaf(state.sum[r], factor[r], sum);
  }
}

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

template <typename Config>
__device__ __forceinline__ void rescale(const float (&factor)[2], ConsumerState<Config>& state) {
  if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;  // rare after the first tiles
#pragma unroll
  for (int k = 0; k < Config::kHeadDim / 2; ++k) state.out[k] *= factor[k / 2 % 2];
}

template <typename Config>
__device__ __forceinline__ void consume(const PrefillParams& p, const PrefillWork& work, int consumer,
                                        typename Config::Shared& s) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = p.num_qo_heads / p.num_kv_heads, row0 = consumer * Config::kGroupRows + 16 * warp + g;
  int position[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    position[r] = work.history + (work.first_row + min(row0 + 8 * r, work.num_rows - 1)) / group;
  const float unit = p.soft_cap > 0 ? 1.0f : p.scale * Config::kValueScale * kLog2OfE;
  const std::uint32_t query = shared_address(s.query[consumer]);
  load_queries<Config>(p, work, consumer * Config::kGroupRows, s.query[consumer]);
  asm volatile("bar.sync %0, 128;" ::"r"(2 + consumer) : "memory");

  ConsumerState<Config> state;
#pragma unroll
  for (int k = 0; k < Config::kHeadDim / 2; ++k) state.out[k] = 0;
  float score[Config::kTileKeys / 2], factor[2];
  std::uint32_t weight[Config::kTileKeys / 16][4];
  const int num_tiles = work.num_tiles();
  int stage = 0, previous = 0;
  std::uint32_t parity = 0;
  const auto advance = [&] {
    previous = stage;
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  if (num_tiles > 0) {
    mbarrier_wait(shared_address(&s.full[0]), parity);
    wgmma_fence();
    score_tile<Config>(query, shared_address(s.key[0]), score);
    wgmma_commit();
    wgmma_wait<0>();
    softmax_tile<Config>(p, work, 0, position, unit, score, state, factor);
    pack_weights<Config>(score, weight);
    advance();
    for (int tile = 1; tile < num_tiles; ++tile) {
      mbarrier_wait(shared_address(&s.full[stage]), parity);
      wgmma_fence();
      score_tile<Config>(query, shared_address(s.key[stage]), score);
      wgmma_commit();
      accumulate_tile<Config>(weight, shared_address(s.value[previous]), state.out);
      wgmma_commit();
      wgmma_wait<1>();
      softmax_tile<Config>(p, work, tile, position, unit, score, state, factor);
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(shared_address(&s.empty[previous]));
      rescale<Config>(factor, state);
      pack_weights<Config>(score, weight);
      advance();
    }
    wgmma_fence();
    accumulate_tile<Config>(weight, shared_address(s.value[previous]), state.out);
    wgmma_commit();
    wgmma_wait<0>();
  }

  auto* rotated = reinterpret_cast<__half*>(p.workspace);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = state.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int index = row0 + 8 * r;
    if (index >= work.num_rows) continue;
    const int flat = work.first_row + index, qo_head = work.head * group + flat % group;
    const std::int64_t row = (work.query_begin + flat / group) * static_cast<std::int64_t>(p.num_qo_heads) + qo_head;
    const float factor_out = sum > 0 ? Config::kValueScale / sum : 0.0f;
    __half* to = rotated + row * Config::kHeadDim + 2 * t;  // in place of the query
#pragma unroll
    for (int k = 0; k < Config::kHeadDim / 8; ++k)
      *reinterpret_cast<__half2*>(to + 8 * k) =
          __halves2half2(saturated_half(state.out[4 * k + 2 * r] * factor_out),
                         saturated_half(state.out[4 * k + 2 * r + 1] * factor_out));
    if (t == 0) p.lse[row] = sum > 0 ? (state.max[r] * unit + log2f(sum)) * 0.6931471805599453f : -INFINITY;
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
      mbarrier_init(shared_address(&s.full[stage]), 128);
      mbarrier_init(shared_address(&s.empty[stage]), 4 * Config::kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kProducerRegisters));
    produce<Config>(p, plan, work, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kConsumerRegisters));
    consume<Config>(p, work, threadIdx.x / 128 - 1, s);
  }
}

}  // namespace oscar::cuda
