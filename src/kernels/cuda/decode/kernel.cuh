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
#include "window.cuh"

namespace oscar::cuda {

// A warp's state over the passes of a block.
template <typename Config>
struct Stream {
  Loader<Config> loader;
  PageTerms<Config> terms;
  int stage = 0;
  std::uint32_t parity = 0;

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

// Sixteen of the first page in items [index, end) of the rows from shared.row[slot] on; 0 where there is none.
template <typename Config>
__device__ __forceinline__ int first_sixteen(const typename Config::Shared& shared, int slot, int index, int end) {
  for (; index < end; ++slot) {
    const Row& row = shared.row[slot];
    if (index < row.history_end()) return (row.items.first_page + index - row.begin) / 16;
    index = max(index, row.end);
  }
  return 0;
}

// Items [index, end) of the rows in shared.row, by one warp.
template <typename Config>
__device__ __forceinline__ void stream_rows(const DecodeParams& p, const DecodePlan& plan,
                                            typename Config::Shared& shared, int index, int end,
                                            Stream<Config>& stream) {
  int slot = 0;
  while (index < end) {
    while (shared.row[slot].end <= index) ++slot;
    const Row& row = shared.row[slot];
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
        stream.terms.compute(shared, data, reinterpret_cast<float2*>(shared.token[warp]));
        const int next = page / 16 + 1;
        stream.terms.load(p.page_angles, 16 * next < pages_end ? next : next_row);
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

// Starts the copy of a matrix into shared memory where there is room; returns where multiply() will find it.
template <typename Config>
__device__ __forceinline__ const typename Config::Matrix* keep_matrix(const typename Config::Matrix* from,
                                                                      typename Config::Shared& shared) {
  if constexpr (!Config::kKeepsMatrix) return from;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(from);
  for (int at = 16 * fresh_thread(); at < static_cast<int>(sizeof(*from)); at += 16 * Config::kNumThreads)
    copy_by_thread<16>(shared.matrix + at, bytes + at);
  return reinterpret_cast<const typename Config::Matrix*>(shared.matrix);
}

template <typename Config>
__global__ __launch_bounds__(Config::kNumThreads, 1) void decode_kernel(const __grid_constant__ DecodeParams p,
                                                                        const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(128) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::Shared*>(shared_bytes);
  auto& scratch = *reinterpret_cast<typename Config::Scratch*>(shared.parts);
  auto* prefix = reinterpret_cast<int*>(shared_bytes + sizeof(typename Config::Shared));
  const Requests requests{prefix, prefix + p.num_requests + 1};
  auto* parts = static_cast<typename Config::Part*>(p.workspace);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp == 0) scan_requests(p, plan, requests);
  if (lane == 0) {
    for (int stage = 0; stage < Config::kNumStages; ++stage)
      copy_barrier_init(shared_address(&shared.full[warp][stage]));
    copy_barrier_fence();
  }
  if (threadIdx.x == 0) shared.kept_row.end = 0;
  __syncthreads();
  const int total = prefix[p.num_requests] * p.num_kv_heads;
  const int blocks = min(static_cast<int>(gridDim.x), total), block = min(static_cast<int>(blockIdx.x), blocks);
  const Cut cut(total, blocks);
  const int first = cut.begin(block), end = cut.begin(min(block + 1, blocks));

  Stream<Config> stream(p, shared);
  Epilogue<Config> epilogue(p, plan, shared);
  const FineAngles<Config> fine(p.page_angles);
  bool waited = false;
  const auto wait = [&] {
    if (!waited) wait_for_previous_kernel();
    waited = true;
  };
  for (int begin = first; begin < end; begin = shared.pass_end) {
    if (begin > first) __syncthreads();
    if (warp == 0) find_rows<Config>(p, plan, requests, begin, end, shared);
    __syncthreads();
    const int pass_end = shared.pass_end;
    const Cut warps(pass_end - begin, Config::kNumWarps);
    const int warp_begin = begin + warps.begin(warp), warp_end = begin + warps.begin(warp + 1);
    int has_history = 0;
    for (int slot = 0; slot < shared.num_rows; ++slot) has_history |= shared.row[slot].items.num_pages;
    const int first_head = shared.row[0].head;

    // Whatever would queue behind the ring's copies, for microseconds, is loaded before them; queries too, unless a
    // kernel ahead may still be writing them.
    const bool queries_first = !p.dependent || waited;
    stream.loader.start(warp_begin, warp_end);
    load_constants<Config>(p, shared, scratch);
    if (queries_first) load_queries<Config>(p, plan, shared);
    copies_by_thread_mark();
    const auto* key_matrix = keep_matrix<Config>(matrix_of<Config>(p.key_matrix, first_head), shared);
    stream.terms.load(p.page_angles, first_sixteen<Config>(shared, 0, warp_begin, warp_end));
    copies_by_thread_wait_marked();
    stream.loader.take_batch();
#pragma unroll 1
    for (int filled = 0; filled < Config::kNumStages; ++filled) {
      if (!stream.loader.next_is_early()) wait();
      stream.loader.issue((stream.stage + filled) % Config::kNumStages);
    }
    if (begin == first) {
      wait();
      let_next_kernel_start();
      fine.store(shared);
    }
    if (!queries_first) load_queries<Config>(p, plan, shared);
    copies_by_thread_wait();
    __syncwarp();
    const typename Config::Matrix* value_matrix = nullptr;
    if (has_history != 0) {
      prepare_queries<Config>(p, shared, scratch);
      __syncthreads();
      multiply<Config>(p.key_matrix, key_matrix, shared, scratch.product[0][0],
                       sizeof(scratch.product[0]) / sizeof(float));
      __syncthreads();
      value_matrix = keep_matrix<Config>(matrix_of<Config>(p.value_matrix, first_head), shared);
      prepare_scores<Config>(p, shared, scratch);
    }
    __syncthreads();
    stream_rows(p, plan, shared, warp_begin, warp_end, stream);
    epilogue.find_parts(begin, pass_end, warps);
    if (has_history != 0) {
      copies_by_thread_wait();
      __syncthreads();
      epilogue.join_history();
      __syncthreads();
      multiply<Config>(p.value_matrix, value_matrix, shared, shared.data[0].product[0],
                       sizeof(typename Config::RowData) / sizeof(float));
    }
    __syncthreads();
    epilogue.finish_rows(has_history != 0, first, end, parts[block]);
    copy_order_after_writes();
  }
  if (first >= end) {
    wait();
    let_next_kernel_start();
  }
  for (int b = blockIdx.x; b < p.num_requests; b += gridDim.x)
    if (prefix[b] == prefix[b + 1]) write_empty<Config>(p, b);

  if (first < end) {  // the block's first row may have begun in a block before
    __syncthreads();
    if (shared.kept_row.end > 0) {
      const int from = cut.range_of(shared.kept_row.begin);
      epilogue.finish_kept(parts + from, block - from);
    }
  }
}

}  // namespace oscar::cuda
