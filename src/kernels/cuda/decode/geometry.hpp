#pragma once
// Sizes that host and device must agree on: shape of a thread block and its shared memory, bytes of a published part.

#include <cstddef>

#include "items.hpp"
#include "params.hpp"

namespace oscar::cuda {

inline constexpr int kMaxRequests = 1024;  // their prefix sums lie in shared memory while the schedule is made

// 12 warps with 2 pages each in flight where registers and shared memory allow: 100 KB in flight saturates the memory,
// more only lengthens its queue. Two column tiles need the registers of 8 warps, pages of 64 channels the parallelism
// of 16.
constexpr int decode_warps(int head_dim, int column_tiles) {
  const bool one = column_tiles == 1;
  return head_dim == 256 ? (one ? 8 : 6) : head_dim == 128 ? (one ? 12 : 8) : (one ? 16 : 12);
}
constexpr int decode_stages(int head_dim) { return head_dim == 64 ? 4 : 2; }
// Rows that a block prepares, streams and finishes together: their queries and parts lie in shared memory.
constexpr int rows_at_once(int head_dim, int column_tiles) {
  return head_dim == 256 ? (column_tiles == 1 ? 3 : 2) : column_tiles == 1 ? 6 : 4;
}

constexpr std::size_t page_bytes(int head_dim) { return 2 * (16 * head_dim + 2 * kPageTokens); }

// Part of a row that a warp or a block computed: head_dim floats a query row, then (maximum, sum).
constexpr std::size_t part_bytes(int head_dim, int column_tiles) {
  return 4 * column_tiles * (head_dim * sizeof(float) + 2 * sizeof(float));
}

// A head's [head_dim, head_dim] matrix in fixed point: two digits an element, a float an output channel.
constexpr std::size_t matrix_bytes(int head_dim) { return 2 * head_dim * head_dim + 4 * head_dim; }
// Whether a head's matrix waits in shared memory for its product; at head_dim 256 there is no room.
constexpr bool keeps_matrix(int head_dim) { return head_dim <= 128; }

constexpr std::size_t decode_shared_bytes(int head_dim, int column_tiles) {
  const std::size_t warps = decode_warps(head_dim, column_tiles), rows = 4 * column_tiles, d = head_dim;
  const std::size_t at_once = rows_at_once(head_dim, column_tiles), part = part_bytes(head_dim, column_tiles);
  const std::size_t stages = warps * decode_stages(head_dim), ring = stages * page_bytes(head_dim);
  const std::size_t tokens = warps * (kPageTokens * 20 + 4 * d), fine = 64 * d;
  const std::size_t row_data = rows * (2 * d + 2 * d + 16 + 4 * d + 16 + 12) + 16;
  const std::size_t matrix = keeps_matrix(head_dim) ? matrix_bytes(head_dim) : 16;
  const std::size_t total = ring + (2 * at_once + 1) * part + tokens + at_once * row_data + matrix + fine +
                            at_once * rows * 8 + stages * 8 + sizeof(Row) + sizeof(BlockShare) + 2 * at_once * 6 + 4;
  return (total + 127) / 128 * 128;
}

}  // namespace oscar::cuda
