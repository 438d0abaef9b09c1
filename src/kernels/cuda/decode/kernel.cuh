#pragma once
// INT2 decode attention. One persistent wave of blocks; the flat list of (request, KV head, group of query rows, page
// or window item) is cut evenly, a block owns a contiguous range and its warps take items in turn. Within a row a warp
// is alone: its own ring of items, filled by bulk copies on its own barriers; a block meets at the ends of its rows,
// blocks meet only where a row is cut.
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

template <typename Config>
__global__ __launch_bounds__(Config::kNumThreads, 1) void decode_kernel(const __grid_constant__ DecodeParams p,
                                                                        const __grid_constant__ DecodePlan plan) {
  extern __shared__ __align__(128) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::Shared*>(shared_bytes);
  auto* prefix = reinterpret_cast<int*>(shared_bytes + sizeof(typename Config::Shared));
  const Requests requests{prefix, prefix + p.num_requests + 1};
  auto* parts = static_cast<typename Config::Part*>(p.workspace);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kMatrix = Config::kHeadDim * Config::kHeadDim;

  if (warp == 0) scan_requests(p, plan, requests);
  if (lane == 0) {
    for (int stage = 0; stage < Config::kNumStages; ++stage)
      copy_barrier_init(shared_address(&shared.full[warp][stage]));
    copy_barrier_fence();
  }
  if (threadIdx.x == 0) shared.kept_row.end = 0;
  __syncthreads();
  const int total = prefix[p.num_requests];
  const int blocks = min(static_cast<int>(gridDim.x), total), block = min(static_cast<int>(blockIdx.x), blocks);
  const Cut cut(total, blocks);
  const int first = cut.begin(block), end = cut.begin(min(block + 1, blocks));

  // The row in hand, one copy a warp, in shared memory: the loop over pages needs the registers.
  Row &row = shared.row[warp], &next_row = shared.next_row[warp];
  const auto find = [&](Row& s_row, int at) {
    const Row found = find_row(p, plan, requests, at);
    __syncwarp();
    if (lane == 0) s_row = found;
    __syncwarp();
  };
  // Loads that the copies' queue would delay by microseconds go ahead of them: page angles and constants, which never
  // change; the queries too, unless a kernel ahead may still be writing them.
  int begin = first, index = first + warp;
  PageTerms<Config> terms;
  RowInputs<Config> inputs;
  const auto key_matrix = [&](const Row& at) { return p.key_matrix + static_cast<std::int64_t>(at.head) * kMatrix; };
  const auto page_at = [&](int at) { return row.items.first_page + at - row.begin; };
  const auto last_page = [&] { return row.items.first_page + row.items.num_pages - 1; };
  if (begin < end) {
    find(row, begin);
    terms.load(p.page_angles, page_at(begin), last_page());
    inputs.load_constants(p, row.head);
    if (!p.dependent) inputs.load_queries(p, row);
  }
  FineAngles<Config> fine(p.page_angles);
  Loader<Config> loader(p, plan, requests, shared, index, end);
  bool waited = false;
#pragma unroll 1
  for (int filled = 0; filled < Config::kNumStages; ++filled) {
    if (!waited && !loader.next_is_early()) {
      wait_for_previous_kernel();
      waited = true;
    }
    loader.issue(filled);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (p.dependent && begin < end) inputs.load_queries(p, row);

  fine.store(shared);
  for (int b = blockIdx.x; b < p.num_requests; b += gridDim.x)
    if (prefix[b] == prefix[b + 1]) write_empty<Config>(p, b);

  int stage = 0;
  std::uint32_t parity = 0;
  const auto consumed = [&] {
    __syncwarp();
    loader.issue(stage);
    if (++stage == Config::kNumStages) {
      stage = 0;
      parity ^= 1;
    }
    index += Config::kNumWarps;
  };

  while (begin < end) {
    const int history_end = min(row.history_end(), end), row_end = min(row.end, end);
    const bool has_history = begin < history_end, has_window = history_end < row_end;

    inputs.store(shared);
    __syncthreads();
    int terms_end = min(history_end, begin + Config::kTermPages);
    if (has_history) {
      prepare_coefficients<Config>(p, shared);
      __syncthreads();
      terms.compute(shared, page_at(begin), page_at(terms_end));
      Product<Config> product;
      product.load(key_matrix(row));
      product.multiply(shared);
      __syncthreads();
      prepare_digits<Config>(p, shared);
      __syncthreads();
    }
    if (row_end < end) {
      find(next_row, row_end);
      inputs.load_constants(p, next_row.head);
      inputs.load_queries(p, next_row);
    }
    Epilogue<Config> epilogue(p, shared);
    if (has_history) {
      QueryFragments<Config> fragments;
      load_fragments<Config>(p, row, shared, fragments);
      const int thread = fresh_thread(), lane = thread % 32, warp = thread / 32;
      const OffsetScale value_offset = {shared.offsets[2], shared.offsets[3]};
      HistoryState<Config> state;
      state.clear();
      for (int terms_begin = begin;;) {
        int token = page_at(index) * kPageTokens;
        const float* term = &shared.terms[page_at(index) - page_at(terms_begin) / 16 * 16][lane % 4];
        while (index < terms_end) {
          float page_term[Config::kColumnTiles];
#pragma unroll
          for (int n = 0; n < Config::kColumnTiles; ++n) page_term[n] = term[4 * n] + fragments.term_base[n];
          copy_wait(shared_address(&shared.full[warp][stage]), parity);
          history_page<Config>(shared.ring[warp][stage], p.soft_cap, fragments, value_offset, token, page_term,
                               shared.token[warp], shared.middle[warp], lane, state);
          consumed();
          token += Config::kNumWarps * kPageTokens;
          term += Config::kNumWarps * Config::kRows;
        }
        if (terms_end == history_end) break;
        terms_begin = terms_end;
        terms_end = min(history_end, terms_end + Config::kTermPages);
        terms.load(p.page_angles, page_at(terms_begin), last_page());
        __syncthreads();
        terms.compute(shared, page_at(terms_begin), page_at(terms_end));
        __syncthreads();
      }
      epilogue.stage(state);
    }
    WindowState<Config> window;
    if (has_window) {
      const int thread = fresh_thread(), lane = thread % 32, warp = thread / 32;
      WindowQuery<Config> window_query;
      window_query.load(shared, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const QueryRow query = query_row<Config>(p, row, 2 * (lane % 4) + i);
        window_query.position[i] = row.items.length - p.query_length + (query.valid ? query.token : 0);
      }
      window.clear();
      while (index < row_end) {
        copy_wait(shared_address(&shared.full[warp][stage]), parity);
        window_item<Config>(shared.ring[warp][stage], p, window_query, lane,
                            row.items.window_token(index - row.history_end()), row.items.length, window);
        consumed();
      }
    }
    if (has_history) epilogue.add_history(p.value_matrix + static_cast<std::int64_t>(row.head) * kMatrix);
    if (has_window) epilogue.add_window(window);

    if (begin == row.begin && row_end == row.end)
      epilogue.write(row);
    else if (row_end < row.end)
      epilogue.publish(parts[block]);
    else
      epilogue.keep(row);
    begin = row_end;
    __syncwarp();
    if (lane == 0) row = next_row;
    __syncwarp();
    if (begin < end) {
      terms.load(p.page_angles, page_at(begin), last_page());
    }
  }

  if (first < end) {  // the block's first row may have begun in a block before
    const Row& kept = shared.kept_row;
    __syncthreads();
    if (kept.end > 0) {
      const int from = cut.block_of(kept.begin);
      Epilogue<Config>(p, shared).finish(kept, parts + from, block - from);
    }
  }
}

}  // namespace oscar::cuda
