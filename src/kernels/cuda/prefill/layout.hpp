#pragma once
// Order of channels and keys in the tiles that the tensor cores read, and the sizes of these tiles.
//
// A word of a page holds 16 channels (keys) or 16 tokens (values); taken apart it gives two 16-byte pieces, and pieces
// are never reordered within.

#ifdef __CUDACC__
#define OSCAR_LAYOUT __host__ __device__ constexpr
#else
#define OSCAR_LAYOUT constexpr
#endif

namespace oscar::cuda {

// Position 0..63 of a channel inside its block of 64: piece 2 t + j / 2, element 4 (j % 2) + {b: 0, 2, 1, 3}.
OSCAR_LAYOUT int position_of_channel(int channel) {
  const int j = channel / 16, t = channel / 4 % 4, b = channel % 4;
  return 8 * (2 * t + j / 2) + 4 * (j % 2) + (b % 2 * 2 + b / 2);
}
OSCAR_LAYOUT int channel_at_position(int position) {
  const int piece = position / 8, element = position % 8;
  return 16 * (2 * (piece % 2) + element / 4) + 4 * (piece / 2) + (element % 2 * 2 + element / 2 % 2);
}
// Position of a token among 64: eight stay together as 0, 4, 1, 5, 2, 6, 3, 7.
OSCAR_LAYOUT int position_of_token(int token) { return token / 8 * 8 + token % 4 * 2 + token / 4 % 2; }
OSCAR_LAYOUT int token_at_position(int position) { return position / 8 * 8 + position % 2 * 4 + position % 8 / 2; }

// Keys of one step of the main loop: shared memory holds two steps.
OSCAR_LAYOUT int prefill_tile_keys(int head_dim) { return head_dim == 256 ? 64 : 128; }
// Pages whose mean terms are computed at once.
OSCAR_LAYOUT int prefill_mean_pages(int head_dim) { return head_dim == 256 ? 4 : 16; }

// Parts of a tile, in bytes and in the order in which a window tile's image holds them:
//   keys    [block of 64 channels][key position] rows of 128 bytes
//   values  [64 keys][channel, then kExtraRows] rows of 128 bytes
//   terms   [key position] rows of 32 bytes: what a key's score has beside its codes, as 16 more channels
//   steps   [position / 2 % 4][position / 8, position % 2] float, padded by 4 so that lanes meet other banks
inline constexpr int kExtraRows = 8;  // 1 / step in two parts, offset / step in two parts, 4 rows of zeros
OSCAR_LAYOUT int prefill_key_bytes(int head_dim) { return 2 * prefill_tile_keys(head_dim) * head_dim; }
OSCAR_LAYOUT int prefill_value_bytes(int head_dim) { return 2 * prefill_tile_keys(head_dim) * (head_dim + kExtraRows); }
OSCAR_LAYOUT int prefill_term_bytes(int head_dim) { return 32 * prefill_tile_keys(head_dim); }
OSCAR_LAYOUT int step_row(int tile_keys) { return tile_keys / 4 + 4; }
OSCAR_LAYOUT int step_index(int position, int tile_keys) {
  return position / 2 % 4 * step_row(tile_keys) + position / 8 * 2 + position % 2;
}
OSCAR_LAYOUT int log_weight_index(int position, int tile_keys) {
  return position / 2 % 4 * (tile_keys / 4) + position / 8 * 2 + position % 2;
}
OSCAR_LAYOUT int prefill_step_bytes(int head_dim) { return 4 * 4 * step_row(prefill_tile_keys(head_dim)); }
OSCAR_LAYOUT int prefill_window_tile_bytes(int head_dim) {
  return prefill_key_bytes(head_dim) + prefill_value_bytes(head_dim) + prefill_term_bytes(head_dim) +
         prefill_step_bytes(head_dim);
}
// Means of prefill_mean_pages() pages of a head, two rows a page (rounded, rest): [block of 64 channels][row]
OSCAR_LAYOUT int prefill_means_bytes(int head_dim) { return 2 * 2 * prefill_mean_pages(head_dim) * head_dim; }

}  // namespace oscar::cuda
#undef OSCAR_LAYOUT
