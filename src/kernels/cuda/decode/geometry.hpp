#pragma once
// Sizes that host and device must agree on: shape of a thread block and its shared memory, bytes of a published part.

#include <cstddef>

#include "params.hpp"

namespace oscar::cuda {

inline constexpr std::size_t kRowBytes = 44;  // of a Row (items.hpp)
inline constexpr int kMaxRequests = 1024;     // the prefix sums of a launch lie in shared memory

// 12 warps with 2 pages each in flight where registers and shared memory allow: 100 KB in flight saturates the memory,
// more only lengthens its queue. Two column tiles need the registers of 8 warps, pages of 64 channels the parallelism
// of 16.
constexpr int decode_warps(int head_dim, int column_tiles) {
  const bool one = column_tiles == 1;
  return head_dim == 256 ? (one ? 8 : 6) : head_dim == 128 ? (one ? 12 : 8) : (one ? 16 : 12);
}
// Pages whose page-mean terms are computed together, before the loop over them.
constexpr int term_pages(int column_tiles) { return 512 / column_tiles; }
constexpr int decode_stages(int head_dim) { return head_dim == 64 ? 4 : 2; }

constexpr std::size_t page_bytes(int head_dim) { return 2 * (16 * head_dim + 2 * kPageTokens); }

// Part of a row that a block hands to another one: head_dim floats a query row, then (maximum, sum).
constexpr std::size_t part_bytes(int head_dim, int column_tiles) {
  return 4 * column_tiles * (head_dim * sizeof(float) + 2 * sizeof(float));
}

// Without the requests' lengths and prefix sums.
constexpr std::size_t decode_shared_bytes(int head_dim, int column_tiles) {
  const std::size_t warps = decode_warps(head_dim, column_tiles), rows = 4 * column_tiles, d = head_dim;
  const std::size_t ring = warps * decode_stages(head_dim) * page_bytes(head_dim), acc = warps * rows * d * 4;
  const std::size_t tokens = warps * kPageTokens * 20, columns = rows * d * 4, digits = rows * d * 2;
  const std::size_t query = rows * (2 * d + 16), coefficients = rows * 2 * d * 2, mean = d * 4;
  const std::size_t terms = 64 * d + (term_pages(column_tiles) + 16) * rows * 4;
  const std::size_t max_sums = (warps + 1) * rows * 8, row_floats = rows * (16 + 8);
  const std::size_t barriers = warps * decode_stages(head_dim) * 8;
  const std::size_t total = ring + acc + tokens + 2 * columns + digits + query + coefficients + terms + mean +
                            max_sums + row_floats + barriers + 16 + (2 * warps + 1) * kRowBytes;
  return (total + 127) / 128 * 128;
}

}  // namespace oscar::cuda
