#pragma once
// INT2 decode attention. One persistent wave of blocks; the flat list of (KV head, request, group of query rows, page
// or window item) is cut evenly between blocks, and a block's range again between its warps. A warp is alone: a
// contiguous range of items, its own ring of them filled by bulk copies on its own barriers. A block meets once before
// the stream, to turn the queries of all its rows, and once after it, to join the warps' parts of every row and to turn
// them back; blocks meet only where a row is cut.
//
// Memory moved, each byte once: 32 head_dim + 256 bytes a page of 64 tokens and KV head (2.125 bits an element at 128),
// and 4 head_dim bytes a window token. Bound: device-memory bandwidth. docs/kernel-notes/decode.md has the budget.

#include "epilogue.cuh"
#include "history.cuh"
#include "loader.cuh"
#include "page_term.cuh"
#include "prologue.cuh"
#include "schedule.cuh"
#include "window.cuh"

namespace oscar::cuda {

// A warp's state over the passes of a block.
template <typename Config>
struct Stream {
  Loader<Config> loader;
  PageTerms<Config> terms;
  int stage = 0;
  std::uint32_t parity = 0;
  bool angles_on_their_way = false;

  __device__ __forceinline__ Stream(const DecodeParams& p, typename Config::Shared& shared) : loader(p, shared) {}
  // The item in hand has been read: its place in the ring takes the next one.
  __device__ __forceinline__ void consumed() {
    __syncwarp();
    loader.issue(stage);
    if (loader.needs_batch()) loader.take_batch();
    if (++stage == Config::kNumStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Sixteen of the first page in items [index, end) of the rows from slot on; 0 where there is none.
template <typename Config>
__device__ __forceinline__ int first_sixteen(const typename Config::Shared& shared, int slot, int index, int end) {
  for (; index < end; ++slot) {
    const Row& row = shared.share.row[slot];
    if (index < row.history_end()) return (row.items.first_page + index - row.begin) / 16;
    index = max(index, row.end);
  }
  return 0;
}

// Items [index, end) of the rows in shared.share, by one warp.
template <typename Config>
__device__ __forceinline__ void stream_rows(const DecodeParams& p, const DecodePlan& plan,
                                            typename Config::Shared& shared, int index, int end,
                                            Stream<Config>& stream) {
  const float2* coarse_angles = p.page_angles + 16 * Config::kPairs;
  int slot = 0;
  while (index < end) {
    while (shared.share.row[slot].end <= index) ++slot;
    const Row& row = shared.share.row[slot];
    const auto& data = shared.data[slot];
    const int thread = fresh_thread(), lane = thread % 32, warp = thread / 32;
    const auto place = [&](int part) -> typename Config::Part& {
      return index == end ? *reinterpret_cast<typename Config::Part*>(shared.ring[warp])
                          : shared.parts[2 * slot + part];
    };
    if (const int history_end = min(row.history_end(), end); index < history_end) {
      QueryFragments<Config> fragments;
      load_fragments<Config>(p, plan, row, data, fragments);
      const OffsetScale value_offset = {data.offsets[2], data.offsets[3]};
      HistoryState<Config> state;
      state.clear();
      int page = row.items.first_page + index - row.begin;
      const int pages_end = page + history_end - index;
      const int next_row = first_sixteen<Config>(shared, slot + 1, row.end, end);
      index = history_end;
#pragma unroll 1
      while (page < pages_end) {
        if (stream.angles_on_their_way) {
          copies_by_thread_wait();
          __syncwarp();
        }
        stream.terms.compute(shared, data, shared.angles[warp]);
        const int next = page / 16 + 1;
        stream.terms.load(coarse_angles, 16 * next < pages_end ? next : next_row, shared.angles[warp]);
        stream.angles_on_their_way = true;
        const int stop = min(16 * next, pages_end);
#pragma unroll 1
        for (; page < stop; ++page) {
          float page_term[Config::kColumnTiles];
#pragma unroll
          for (int n = 0; n < Config::kColumnTiles; ++n)
            page_term[n] = stream.terms.of_page(page, n) + fragments.term_base[n];
          copy_wait(shared_address(&shared.full[warp][stream.stage]), stream.parity);
          history_page<Config>(shared.ring[warp][stream.stage], p.soft_cap, fragments, value_offset, page * kPageTokens,
                               page_term, shared.token[warp], shared.middle[warp], lane, state);
          stream.consumed();
        }
      }
      stage(state, place(0));
    }
    if (const int window_end = min(row.end, end); index < window_end) {
      WindowQuery<Config> query;
      query.load(data, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const QueryRow query_token = query_row<Config>(p, plan, row, 2 * (lane % 4) + i);
        query.position[i] = row.items.length - p.query_length + (query_token.valid ? query_token.token : 0);
      }
      WindowState<Config> state;
      state.clear();
#pragma unroll 1
      for (; index < window_end; ++index) {
        copy_wait(shared_address(&shared.full[warp][stream.stage]), stream.parity);
        window_item<Config>(shared.ring[warp][stream.stage], p, query, lane,
                            row.items.window_token(index - row.history_end()), row.items.length, state);
        stream.consumed();
      }
      stage(state, place(1));
    }
  }
}

// Starts a copy into shared memory by the whole block.
template <typename Config>
__device__ __forceinline__ void copy_block(void* destination, const void* source, int bytes) {
  for (int at = 16 * fresh_thread(); at < bytes; at += 16 * Config::kNumThreads)
    copy_by_thread<16>(static_cast<std::uint8_t*>(destination) + at, static_cast<const std::uint8_t*>(source) + at);
}
// A head's matrix is copied into shared memory where there is room. kept_matrix: where multiply() will find it.
template <typename Config>
__device__ __forceinline__ const typename Config::Matrix* kept_matrix(const typename Config::Matrix* from,
                                                                      const typename Config::Shared& shared) {
  return Config::kKeepsMatrix ? reinterpret_cast<const typename Config::Matrix*>(shared.matrix) : from;
}
template <typename Config>
__device__ __forceinline__ const typename Config::Matrix* keep_matrix(const typename Config::Matrix* from,
                                                                      typename Config::Shared& shared) {
  if constexpr (Config::kKeepsMatrix) copy_block<Config>(shared.matrix, from, sizeof(*from));
  return kept_matrix<Config>(from, shared);
}

template <typename Config>
__global__ __launch_bounds__(Config::kNumThreads, 1) void decode_kernel(const __grid_constant__ DecodeParams p,
                                                                        const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(128) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::Shared*>(shared_bytes);
  auto& scratch = *reinterpret_cast<typename Config::Scratch*>(shared.parts);
  const Schedule schedule(p, plan);
  auto* parts = static_cast<typename Config::Part*>(p.workspace);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;

  static_assert(sizeof(BlockShare) / 4 <= Config::kNumThreads);
  if (threadIdx.x < sizeof(BlockShare) / 4)
    reinterpret_cast<int*>(&shared.share)[threadIdx.x] =
        reinterpret_cast<const int*>(&schedule.share[block])[threadIdx.x];
  if (lane == 0) {
    for (int stage = 0; stage < Config::kNumStages; ++stage)
      copy_barrier_init(shared_address(&shared.full[warp][stage]));
    copy_barrier_fence();
  }
  if (threadIdx.x == 0) shared.kept_row.end = 0;
  __syncthreads();
  Stream<Config> stream(p, shared);
  Epilogue<Config> epilogue(p, plan, shared);
  const BlockShare& share = shared.share;
  // What is needed again after the stream is read from shared memory again: nothing of it stays in registers or, worse,
  // on the stack, whose lines come back from L2 under load.
  for (int begin = share.first; begin < share.end; begin = share.pass_end) {
    const bool is_first = begin == share.first;
    if (!is_first) {
      __syncthreads();
      if (warp == 0) find_rows(p, plan, schedule.requests, begin, share.end, Config::kMaxRows, shared.share);
      __syncthreads();
    }
    const int warp_begin = share.warp_begin[warp], warp_end = share.warp_begin[warp + 1];
    if (warp == Config::kNumWarps - 1) epilogue.find_parts(begin);
    int has_history = 0;
    for (int slot = 0; slot < share.num_rows; ++slot) has_history |= share.row[slot].items.num_pages;
    if (threadIdx.x == 0) shared.has_history = has_history;

    // What the rows need goes ahead of the ring's copies, behind which it would queue for microseconds: constants, and
    // the queries unless a kernel ahead may still be writing them.
    stream.loader.start(warp_begin, warp_end);
    if (is_first) copy_block<Config>(shared.fine, p.page_angles, sizeof(shared.fine));
    load_constants<Config>(p, shared, scratch);
    if (!p.dependent || !is_first) load_queries<Config>(p, plan, shared);
    const auto* key_matrix = keep_matrix<Config>(matrix_of<Config>(p.key_matrix, share.row[0].head), shared);
    stream.terms.load(p.page_angles + 16 * Config::kPairs, first_sixteen<Config>(shared, 0, warp_begin, warp_end),
                      shared.angles[warp]);
    stream.angles_on_their_way = false;
    copies_by_thread_wait();
    stream.loader.take_batch();
    bool waited = !is_first;
#pragma unroll 1
    for (int filled = 0; filled < Config::kNumStages; ++filled) {
      if (!waited && !stream.loader.next_is_early()) {
        wait_for_previous_kernel();
        waited = true;
      }
      stream.loader.issue((stream.stage + filled) % Config::kNumStages);
    }
    if (is_first) {
      wait_for_previous_kernel();
      let_next_kernel_start();
      if (p.dependent) {
        load_queries<Config>(p, plan, shared);
        copies_by_thread_wait();
      }
    }
    __syncwarp();
    if (has_history != 0) {
      prepare_queries<Config>(p, shared, scratch);
      __syncthreads();
      multiply<Config>(p.key_matrix, key_matrix, shared, scratch.product[0][0],
                       sizeof(scratch.product[0]) / sizeof(float));
      __syncthreads();
      keep_matrix<Config>(matrix_of<Config>(p.value_matrix, share.row[0].head), shared);
      prepare_scores<Config>(p, shared, scratch);
    }
    __syncthreads();
    stream_rows(p, plan, shared, warp_begin, warp_end, stream);
    copies_by_thread_wait();
    __syncthreads();
    if (shared.has_history) {
      epilogue.join_rows();
      __syncthreads();
      multiply<Config>(p.value_matrix,
                       kept_matrix<Config>(matrix_of<Config>(p.value_matrix, share.row[0].head), shared), shared,
                       shared.data[0].product[0], sizeof(typename Config::RowData) / sizeof(float));
      __syncthreads();
    }
    epilogue.finish_rows(shared.has_history, parts[block]);
    copy_order_after_writes();
  }
  if (share.first >= share.end) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  if (share.has_empty)
    for (int b = block; b < p.num_requests; b += gridDim.x)
      if (schedule.requests.length[b] <= 0) write_empty<Config>(p, b);

  if (share.first < share.end) {  // the block's first row may have begun in a block before
    __syncthreads();
    if (shared.kept_row.end > 0) epilogue.finish_kept(parts + share.first_block, block - share.first_block);
  }
}

}  // namespace oscar::cuda
