#pragma once
// What one thread block attends: its rows, its INT2 pages and its window tiles.

#include "rotate.cuh"

namespace oscar::cuda {

struct KeyBounds {
  int low, high;  // inclusive
};

struct PrefillWork {
  int request, head, first_row, num_rows;  // rows of the request that the block has, from first_row
  int query_begin, history;                // first query token of the batch; keys of the request
  int first_position, last_position;       // of the block's rows
  int first_page, last_page, history_tiles;
  int sink_tiles, recent_tiles;
  int whole_begin, whole_end;  // history tiles of which every row reads every key

  __device__ int num_tiles() const { return history_tiles + sink_tiles + recent_tiles; }
  // Index of the tile among the request's window tiles.
  __device__ int window_index(const PrefillPlan& plan, int tile) const {
    const int index = tile - history_tiles;
    return index < sink_tiles ? index : plan.sink_tiles + index - sink_tiles;
  }
  // Keys that the query at `position` reads from tiles of this kind.
  __device__ KeyBounds bounds(const PrefillParams& p, int tile, int position) const {
    const int visible = p.sliding_window > 0 ? max(position - p.sliding_window + 1, 0) : 0;
    if (tile < history_tiles) return {max(p.sink, visible), min(history - 1, position - p.recent)};
    if (tile < history_tiles + sink_tiles) return {visible, min(p.sink, history) - 1};
    return {max(max(p.sink, visible), position - p.recent + 1), history - 1};
  }
};

template <typename Config>
__device__ __forceinline__ bool find_work(const PrefillParams& p, const PrefillPlan& plan, PrefillWork& work) {
  const int group = p.num_qo_heads / p.num_kv_heads;
  int tile = blockIdx.x, rows = 0;
  work.request = 0;
  for (; work.request < p.num_requests; ++work.request) {
    work.query_begin = p.query_start[work.request];
    rows = (p.query_start[work.request + 1] - work.query_begin) * group;
    const int tiles = (rows + kPrefillRows - 1) / kPrefillRows;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (work.request == p.num_requests) return false;
  work.head = blockIdx.y;
  work.first_row = tile * kPrefillRows;
  work.num_rows = min(kPrefillRows, rows - work.first_row);
  work.history = p.history_lens[work.request];
  work.first_position = work.history + work.first_row / group;
  work.last_position = work.history + (work.first_row + work.num_rows - 1) / group;
  const int visible = p.sliding_window > 0 ? max(work.first_position - p.sliding_window + 1, 0) : 0;
  const int low = max(p.sink, visible), high = min(work.history - 1, work.last_position - p.recent);
  work.first_page = low / kPageTokens / Config::kTilePages * Config::kTilePages;  // tiles never straddle mean groups
  work.last_page = max(high, 0) / kPageTokens;
  work.history_tiles = high >= low ? (work.last_page - work.first_page) / Config::kTilePages + 1 : 0;
  const int sink = min(p.sink, work.history);
  work.sink_tiles = sink > visible ? (sink + Config::kTileKeys - 1) / Config::kTileKeys : 0;
  const int recent = work.history - max(work.history - p.recent + 1, 0);
  work.recent_tiles =
      work.first_position - p.recent + 1 < work.history ? (recent + Config::kTileKeys - 1) / Config::kTileKeys : 0;
  const KeyBounds first = work.bounds(p, 0, work.first_position), last = work.bounds(p, 0, work.last_position);
  const int from = max(first.low, last.low) - work.first_page * kPageTokens;
  const int to = min(first.high, last.high) + 1 - work.first_page * kPageTokens;
  work.whole_begin = (max(from, 0) + Config::kTileKeys - 1) / Config::kTileKeys;
  work.whole_end = min(max(to, 0) / Config::kTileKeys, work.history_tiles);
  return true;
}

}  // namespace oscar::cuda
