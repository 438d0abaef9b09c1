#pragma once
// Work items of a request, from its length alone: INT2 pages of 64 tokens and 16-bit window items of 8. The same code
// on host and device.

#include "params.hpp"

#ifdef __CUDACC__
#define OSCAR_HOST_DEVICE __host__ __device__
#else
#define OSCAR_HOST_DEVICE
#endif

namespace oscar::cuda {

// What one request adds to the flat list of work items, from its length alone.
struct RequestItems {
  int first_page, num_pages;  // INT2 pages that any query row reads
  int num_sink_items, recent_start, num_window_items;
  int length;
  OSCAR_HOST_DEVICE int total() const { return num_pages + num_window_items; }
  // First token of a window item; sink items come first.
  OSCAR_HOST_DEVICE int window_token(int item) const {
    return item < num_sink_items ? item * kWindowTokens : recent_start + (item - num_sink_items) * kWindowTokens;
  }
};

OSCAR_HOST_DEVICE inline RequestItems request_items(const DecodeParams& p, int length) {
  RequestItems r{};
  r.length = length;
  if (length <= 0) return r;
  const int first_query = length - p.query_length > 0 ? length - p.query_length : 0;
  int visible = 0;  // first key that any row may see
  if (p.sliding_window > 0) visible = first_query - p.sliding_window + 1 > 0 ? first_query - p.sliding_window + 1 : 0;
  const int sink = p.sink < length ? p.sink : length;
  // INT2 keys: max(sink, visible) <= j <= last query - recent
  const int history_begin = sink > visible ? sink : visible;
  const int history_end = length - p.recent;  // exclusive
  if (history_end > history_begin) {
    r.first_page = history_begin / kPageTokens;
    r.num_pages = (history_end - 1) / kPageTokens + 1 - r.first_page;
  }
  // 16-bit keys: [0, sink) unless all of them have left the sliding window, and from first query - recent + 1 on
  r.num_sink_items = sink > visible ? (sink + kWindowTokens - 1) / kWindowTokens : 0;
  int start = first_query - p.recent + 1;
  start = (start > visible ? start : visible) / kWindowTokens * kWindowTokens;
  const int after_sink = r.num_sink_items * kWindowTokens;
  r.recent_start = start > after_sink ? start : after_sink;
  const int recent_items = length > r.recent_start ? (length - r.recent_start + kWindowTokens - 1) / kWindowTokens : 0;
  r.num_window_items = r.num_sink_items + recent_items;
  return r;
}

// A row is one (KV head, request, group of query rows): its INT2 pages, then its window items, contiguous in the list.
// Rows of a head follow each other, so that a block mostly needs one head's matrices.
struct Row {
  int request, head, group;
  int begin, end;  // flat indices
  RequestItems items;
  OSCAR_HOST_DEVICE int history_end() const { return begin + items.num_pages; }
};

// The share of the list that a block owns, and the first rows of it.
struct BlockShare {
  int first, end;          // flat indices
  int num_rows, pass_end;  // rows streamed together from `first` on, and the end of the last of them inside the share
  int first_block;         // block that holds the beginning of row[0]
  int has_empty;  // a request without items is among those that the block answers for: block, block + blocks, ...
  int warp_begin[kMaxWarps + 1];  // how the items up to pass_end are cut between the warps
  Row row[kMaxRowsAtOnce];
};

}  // namespace oscar::cuda
