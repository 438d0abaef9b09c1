#pragma once
// Where each code of a page half lies, straight from the two formulas of oscar/cache.hpp: one (token, channel) at a
// time, with no idea of words, lanes or rows.

#include <cstdint>

namespace oscar::reference {

struct CodePosition {
  int byte = 0;   // in the page half
  int shift = 0;  // of the code's low bit: 0, 2, 4 or 6
};
CodePosition key_code_position(int head_dim, int slot, int channel);
CodePosition value_code_position(int head_dim, int slot, int channel);

inline int read_code(const std::uint8_t* half, CodePosition position) {
  return (half[position.byte] >> position.shift) & 3;
}

}  // namespace oscar::reference
