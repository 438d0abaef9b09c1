#pragma once
// Order of channels and keys in the tiles that the tensor cores read. A word of a page holds 16 channels (keys) or 16
// tokens (values); taken apart it gives two 16-byte pieces, and pieces are never reordered within.

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

}  // namespace oscar::cuda
#undef OSCAR_LAYOUT
