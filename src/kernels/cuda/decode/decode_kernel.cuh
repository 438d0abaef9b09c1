#pragma once
// The persistent kernel: walks a block's range piece by piece, keeps each warp's ring full, writes one partial a piece.

#include "kernel.cuh"

namespace oscar::cuda {

// Hands a warp its items in order: index, index + warps, ... and starts their copies. Block-table entries are read one
// item ahead.
template <typename Config>
class Loader {
 public:
  __device__ Loader(const DecodeParams& p, const DecodePlan& plan, const int* prefix, typename Config::Shared& shared,
                    int index, int end)
      : p_(p),
        plan_(plan),
        prefix_(prefix),
        index_(index),
        end_(end),
        barriers_(shared_address(shared.full[threadIdx.x / 32])),
        ring_(shared_address(shared.ring[threadIdx.x / 32])) {
    if (index_ < end_) enter();
  }
  __device__ bool next_is_window() const { return index_ < end_ && window_; }
  // Starts the copy of the next item into stage `stage`.
  __device__ __forceinline__ void issue(int stage) {
    if (index_ >= end_) return;
    const std::uint32_t barrier = barriers_ + 8 * stage, destination = ring_ + Config::kStageBytes * stage;
    if (!window_) {
      if (threadIdx.x % 32 == 0) {
        mbarrier_expect(barrier, Config::kPageBytes);
        bulk_copy(destination, head_base_ + block_ * p_.page_stride_bytes, Config::kPageBytes, barrier);
      }
    } else {
      issue_window(barrier, destination);
    }
    index_ += Config::kNumWarps;
    if (index_ >= end_) return;
    if (index_ >= segment_end_) {
      enter();
    } else if (!window_) {
      table_ += Config::kNumWarps;
      block_ = *table_;
    } else {
      local_ += Config::kNumWarps;
      block_ = window_entry();
    }
  }

 private:
  __device__ __forceinline__ void enter() {
    const Segment s = segment_at(p_, plan_, prefix_, index_);
    window_ = s.window;
    segment_end_ = s.end;
    local_ = index_ - s.begin;
    head_ = s.head;
    items_ = s.items;
    head_base_ = p_.pages + s.head * p_.head_stride_bytes;
    table_ = p_.block_table + s.request * p_.block_table_stride + s.items.first_page + local_;
    window_table_ = p_.window_table + s.request * p_.window_table_stride;
    block_ = window_ ? window_entry() : *table_;
  }
  __device__ __forceinline__ void issue_window(std::uint32_t barrier, std::uint32_t destination) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) mbarrier_expect(barrier, 2 * kWindowTokens * 2 * Config::kHeadDim);
    __syncwarp();
    if (lane >= 2 * kWindowTokens) return;
    // rows past the end or before the window repeat a valid one: their weight is zero, their bytes must be finite
    int token = window_token() + lane % kWindowTokens;
    token = min(token, items_.length - 1);
    const int floor =
        local_ < items_.num_sink_items ? 0 : min(items_.length - p_.query_length - p_.recent + 1, items_.length - 1);
    token = max(token, floor);
    const __nv_bfloat16* base = lane < kWindowTokens ? p_.window_k : p_.window_v;
    bulk_copy(destination + lane * Config::kWindowRowBytes,
              base + block_ * p_.window_block_stride + (token % p_.window_block) * p_.window_token_stride +
                  head_ * p_.window_head_stride,
              2 * Config::kHeadDim, barrier);
  }
  __device__ int window_token() const {
    return local_ < items_.num_sink_items ? local_ * kWindowTokens
                                          : items_.recent_start + (local_ - items_.num_sink_items) * kWindowTokens;
  }
  __device__ std::int64_t window_entry() const { return window_table_[window_token() / p_.window_block]; }

  const DecodeParams& p_;
  const DecodePlan& plan_;
  const int* prefix_;
  int index_, end_;
  std::uint32_t barriers_, ring_;
  bool window_ = false;
  int segment_end_ = 0, local_ = 0, head_ = 0;
  RequestItems items_;
  const std::uint8_t* head_base_ = nullptr;
  const std::int32_t* table_ = nullptr;
  const std::int32_t* window_table_ = nullptr;
  std::int64_t block_ = 0;
};

// Query rows of a group, counted over query tokens first: row -> token of the request and query head.
struct QueryRow {
  int token, head;
  bool valid;
};
template <typename Config>
__device__ __forceinline__ QueryRow query_row(const DecodeParams& p, const Segment& s, int row) {
  const int group = p.num_qo_heads / p.num_kv_heads;
  const int index = s.row_group * Config::kRows + row;
  return {index / group, s.head * group + index % group, index < p.query_length * group};
}

template <typename Config>
__global__ __launch_bounds__(Config::kNumThreads, 1) void decode_kernel(const __grid_constant__ DecodeParams p,
                                                                        const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(128) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::Shared*>(shared_bytes);
  auto* prefix = reinterpret_cast<int*>(shared_bytes + sizeof(typename Config::Shared));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  if (warp == 0) scan_requests(p, plan, prefix);
  if (lane == 0) {
    for (int stage = 0; stage < Config::kNumStages; ++stage)
      mbarrier_init(shared_address(&shared.full[warp][stage]), 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int total = prefix[p.num_requests];
  int begin = block_begin(total, blockIdx.x, gridDim.x);
  const int end = block_begin(total, blockIdx.x + 1, gridDim.x);

  // History never holds the tokens of this step, so its copies start before the kernels ahead have finished.
  Loader<Config> loader(p, plan, prefix, shared, begin + warp, end);
  int filled = 0;
  while (filled < Config::kNumStages && !loader.next_is_window()) loader.issue(filled++);
  wait_for_previous_kernel();
  let_next_kernel_start();
  while (filled < Config::kNumStages) loader.issue(filled++);

  const auto* prepared = reinterpret_cast<const typename Config::Prepared*>(p.workspace);
  const auto* page_terms =
      reinterpret_cast<const float*>(reinterpret_cast<const std::uint8_t*>(p.workspace) + plan.prepared_bytes);
  auto* partials = reinterpret_cast<typename Config::Partial*>(reinterpret_cast<std::uint8_t*>(p.workspace) +
                                                               plan.prepared_bytes + plan.term_bytes);
  int index = begin + warp;
  int stage = 0;
  std::uint32_t parity = 0;
  auto consumed = [&] {
    __syncwarp();
    loader.issue(stage);
    if (++stage == Config::kNumStages) {
      stage = 0;
      parity ^= 1;
    }
    index += Config::kNumWarps;
  };

  while (begin < end) {
    const Segment segment = segment_at(p, plan, prefix, begin);
    const int piece_end = segment.end < end ? segment.end : end;
    const int first_query = segment.items.length - p.query_length;
    float* staged = shared.acc[warp][0];
    if (!segment.window) {
      const auto& query_group = prepared[segment.id / 2];
      QueryFragments<Config> query;
      int low[Config::kColumnTiles], high[Config::kColumnTiles];  // INT2 tokens that row t of each tile reads
      int whole_low = 0, whole_high = 1 << 30;
#pragma unroll
      for (int n = 0; n < Config::kColumnTiles; ++n) {
#pragma unroll
        for (int step = 0; step < Config::kKeySteps; ++step) {
          query.digits[n][step][0] = query_group.digits[n][step][0][lane];
          query.digits[n][step][1] = query_group.digits[n][step][1][lane];
        }
        query.row[n] = query_group.row[4 * n + t];
        const QueryRow row = query_row<Config>(p, segment, 4 * n + t);
        const int position = first_query + (row.valid ? row.token : 0);
        low[n] = p.sink;
        if (p.sliding_window > 0 && position - p.sliding_window + 1 > low[n]) low[n] = position - p.sliding_window + 1;
        high[n] = position - p.recent;
        whole_low = low[n] > whole_low ? low[n] : whole_low;
        whole_high = high[n] < whole_high ? high[n] : whole_high;
      }
      whole_low = __reduce_max_sync(~0u, whole_low);
      whole_high = __reduce_min_sync(~0u, whole_high);
      const OffsetScale key_offset = p.key_offset[segment.head], value_offset = p.value_offset[segment.head];
      HistoryState<Config> state;
#pragma unroll
      for (int n = 0; n < Config::kColumnTiles; ++n) {
        state.max[n] = -INFINITY;
        state.sum[n] = state.offset[n] = 0;
#pragma unroll
        for (int v = 0; v < Config::kValueTiles; ++v)
#pragma unroll
          for (int i = 0; i < 4; ++i) state.acc[n][v][i] = 0;
      }
      const float* terms =
          page_terms +
          (static_cast<std::int64_t>(segment.id / 2) * plan.max_pages + segment.items.first_page) * Config::kRows + t;
      float page_term[Config::kColumnTiles], next_term[Config::kColumnTiles];
#pragma unroll
      for (int n = 0; n < Config::kColumnTiles; ++n)
        next_term[n] = index < piece_end ? terms[(index - segment.begin) * Config::kRows + 4 * n] : 0.0f;
      while (index < piece_end) {
#pragma unroll
        for (int n = 0; n < Config::kColumnTiles; ++n) {
          page_term[n] = next_term[n];
          if (index + Config::kNumWarps < piece_end)
            next_term[n] = terms[(index + Config::kNumWarps - segment.begin) * Config::kRows + 4 * n];
        }
        const int first_token = (segment.items.first_page + index - segment.begin) * kPageTokens;
        mbarrier_wait(shared_address(&shared.full[warp][stage]), parity);
        history_page<Config>(shared.ring[warp][stage], p, query, key_offset, value_offset, first_token, low, high,
                             first_token >= whole_low && first_token + kPageTokens - 1 <= whole_high, page_term,
                             shared.token[warp], shared.middle[warp], state);
        consumed();
      }
#pragma unroll
      for (int n = 0; n < Config::kColumnTiles; ++n) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          state.sum[n] += __shfl_xor_sync(~0u, state.sum[n], step);
          state.offset[n] += __shfl_xor_sync(~0u, state.offset[n], step);
        }
        const int row = 4 * n + t;
#pragma unroll
        for (int v = 0; v < Config::kValueTiles; ++v) {
          const float o = state.offset[n];
          *reinterpret_cast<float4*>(staged + row * Config::kHeadDim + 32 * v + 4 * g) = make_float4(
              state.acc[n][v][0] + o, state.acc[n][v][1] + o, state.acc[n][v][2] + o, state.acc[n][v][3] + o);
        }
        if (g == 0) shared.max_sum[warp][row] = make_float2(state.max[n], state.sum[n]);
      }
    } else {
      std::uint32_t query[Config::kHeadDim / 16][2];
      const QueryRow row = query_row<Config>(p, segment, g);
      const bool valid = row.valid && g < Config::kRows;
      const __nv_bfloat16* q =
          p.q + (static_cast<std::int64_t>(segment.request) * p.query_length + row.token) * p.q_token_stride +
          row.head * p.q_head_stride;
#pragma unroll
      for (int c = 0; c < Config::kHeadDim / 16; ++c) {
        query[c][0] = valid ? *reinterpret_cast<const std::uint32_t*>(q + 16 * c + 2 * t) : 0;
        query[c][1] = valid ? *reinterpret_cast<const std::uint32_t*>(q + 16 * c + 8 + 2 * t) : 0;
      }
      WindowState<Config> state;
      state.max = -INFINITY;
      state.sum = 0;
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / 8; ++i) state.acc[i][0] = state.acc[i][1] = 0;
      while (index < piece_end) {
        const int local = index - segment.begin;
        const int first_token =
            local < segment.items.num_sink_items
                ? local * kWindowTokens
                : segment.items.recent_start + (local - segment.items.num_sink_items) * kWindowTokens;
        mbarrier_wait(shared_address(&shared.full[warp][stage]), parity);
        window_item<Config>(shared.ring[warp][stage], p, query, first_token, segment.items.length,
                            first_query + (valid ? row.token : 0), state);
        consumed();
      }
      state.sum += __shfl_xor_sync(~0u, state.sum, 1);
      state.sum += __shfl_xor_sync(~0u, state.sum, 2);
      if (g < Config::kRows) {
#pragma unroll
        for (int i = 0; i < Config::kHeadDim / 8; ++i)
          *reinterpret_cast<float2*>(staged + g * Config::kHeadDim + 8 * i + 2 * t) =
              make_float2(state.acc[i][0], state.acc[i][1]);
        if (t == 0) shared.max_sum[warp][g] = make_float2(state.max, state.sum);
      }
    }
    __syncthreads();
    // the warps' parts of this piece become one partial
    auto& partial = partials[segment.id + blockIdx.x];
    for (int i = threadIdx.x; i < Config::kRows * Config::kHeadDim / 4; i += Config::kNumThreads) {
      const int row = i / (Config::kHeadDim / 4), column = 4 * (i % (Config::kHeadDim / 4));
      float max = -INFINITY;
#pragma unroll
      for (int w = 0; w < Config::kNumWarps; ++w) max = fmaxf(max, shared.max_sum[w][row].x);
      float4 acc = make_float4(0, 0, 0, 0);
      float sum = 0;
#pragma unroll
      for (int w = 0; w < Config::kNumWarps; ++w) {
        const float2 part = shared.max_sum[w][row];
        if (part.x == -INFINITY) continue;
        const float factor = exp2_fast(part.x - max);
        const float4 value = *reinterpret_cast<const float4*>(&shared.acc[w][row][column]);
        acc.x += value.x * factor;
        acc.y += value.y * factor;
        acc.z += value.z * factor;
        acc.w += value.w * factor;
        sum += part.y * factor;
      }
      *reinterpret_cast<float4*>(&partial.acc[row][column]) = acc;
      if (column == 0) partial.max_sum[row] = make_float2(max, sum);
    }
    __syncthreads();
    begin = piece_end;
  }
}

}  // namespace oscar::cuda
