#pragma once
// Where things lie in the workspace of one attend() call. All offsets are bytes and multiples of 64.

#include <cstddef>
#include <oscar/attention.hpp>

#include "kernels/cpu/attention_kernels.hpp"

namespace oscar::attention {

// What one (query token, query head) has gathered from a range of keys. Two accumulators [head_dim] follow it in
// memory: packed (transformed space) and exact (original space).
struct RowState {
  cpu::Running packed, exact;
  cpu::ValueSums value_sums;  // of the packed keys
  float unused[10] = {};

  float* packed_sum() { return reinterpret_cast<float*>(this + 1); }
  float* exact_sum(int head_dim) { return packed_sum() + head_dim; }
};
static_assert(sizeof(RowState) == 64);

constexpr std::size_t round_up_64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
constexpr std::size_t state_bytes(int head_dim) {
  return sizeof(RowState) + round_up_64(2 * sizeof(float) * static_cast<std::size_t>(head_dim));
}

// Scratch of one worker; one work item at a time lives in it.
struct ScratchLayout {
  ScratchLayout(const AttentionShape& shape, int queries_per_tile) {
    const auto dim = static_cast<std::size_t>(shape.head_dim);
    const auto queries = static_cast<std::size_t>(queries_per_tile);
    const std::size_t rows = queries * static_cast<std::size_t>(shape.num_qo_heads / shape.num_kv_heads);
    const auto take = [this](std::size_t size) {
      const std::size_t offset = bytes;
      bytes += round_up_64(size);
      return offset;
    };
    queries_offset = take(rows * dim * sizeof(float));
    operands_offset = take(rows * static_cast<std::size_t>(cpu::operand_bytes(shape.head_dim)));
    key_rows_offset = take(rows * sizeof(cpu::KeyRow));
    offsets_offset = take(rows * kPageTokens * sizeof(float));
    masks_offset = take(queries * 2 * sizeof(std::uint64_t));
    key_tile_offset = take(kPageTokens * dim * sizeof(float));
    value_tile_offset = take(kPageTokens * dim * sizeof(float));
    states_offset = take(rows * state_bytes(shape.head_dim));
  }
  std::size_t bytes = 0;
  std::size_t queries_offset, operands_offset, key_rows_offset, offsets_offset, masks_offset, key_tile_offset,
      value_tile_offset, states_offset;
};

}  // namespace oscar::attention
