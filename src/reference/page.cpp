#include "reference/page.hpp"

#include <algorithm>

namespace oscar::reference {

CodePosition key_code_position(int head_dim, int slot, int channel) {
  const int block = channel / 64;
  const int num_words = std::min(64, head_dim - 64 * block) / 16;  // of one token in this block
  const int in_block = channel - 64 * block;
  // channel = 64 block + 4 n j + 4 t + b
  const int j = in_block / (4 * num_words);
  const int t = (in_block % (4 * num_words)) / 4;
  const int b = in_block % 4;
  const int word = 256 * block + ((slot / 4) * num_words + t) * 4 + slot % 4;
  const int bit = 8 * b + 2 * j;
  return {4 * word + bit / 8, bit % 8};
}

CodePosition value_code_position(int /*head_dim*/, int slot, int channel) {
  // slot = 32 (j / 2) + 8 t + 2 (j % 2) + (b % 2) + 4 (b / 2)
  const int j = 2 * (slot / 32) + (slot / 2) % 2;
  const int t = (slot / 8) % 4;
  const int b = slot % 2 + 2 * ((slot / 4) % 2);
  const int word = ((channel / 4) * 4 + t) * 4 + channel % 4;
  const int bit = 8 * b + 2 * j;
  return {4 * word + bit / 8, bit % 8};
}

}  // namespace oscar::reference
