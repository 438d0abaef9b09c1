#include <bit>
#include <cstring>
#include <oscar/cache.hpp>

#include "cache/page_layout.hpp"

namespace oscar {
namespace {

static_assert(std::endian::native == std::endian::little, "words of a page are little-endian");

std::uint32_t load_word(const std::uint8_t* from) {
  std::uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}
void store_word(std::uint8_t* to, std::uint32_t word) { std::memcpy(to, &word, sizeof word); }

// Distance in bytes of a token's neighbouring words (keys) and of a channel group's (values): four words.
constexpr int kWordStride = 4 * kWordBytes;

// Key words of one token in one block of 16 kWords channels: word t holds channels 4t + b of each quarter, so four
// loads of four codes make a word.
template <int kWords>
void pack_key_block(std::uint8_t* block, int slot, const std::uint8_t* codes) {
  std::uint8_t* words = block + (slot / 4) * kWords * kWordStride + (slot % 4) * kWordBytes;
  for (int t = 0; t < kWords; ++t) {
    const std::uint8_t* quarter = codes + 4 * t;
    const std::uint32_t word = load_word(quarter) | load_word(quarter + 4 * kWords) << 2 |
                               load_word(quarter + 8 * kWords) << 4 | load_word(quarter + 12 * kWords) << 6;
    store_word(words + t * kWordStride, word);
  }
}

template <int kWords>
void unpack_key_block(const std::uint8_t* block, int slot, std::uint8_t* codes) {
  const std::uint8_t* words = block + (slot / 4) * kWords * kWordStride + (slot % 4) * kWordBytes;
  for (int t = 0; t < kWords; ++t) {
    const std::uint32_t word = load_word(words + t * kWordStride);
    for (int j = 0; j < 4; ++j) store_word(codes + 4 * t + 4 * kWords * j, (word >> (2 * j)) & 0x03030303u);
  }
}

// Where a token's codes lie in each value word of a channel: word `word` of the four, `shift` bits up.
struct ValueSlot {
  int word;
  int shift;
};
ValueSlot value_slot(int slot) {
  const int j = 2 * (slot / 32) + slot / 2 % 2;
  const int byte = slot % 2 + 2 * (slot / 4 % 2);
  return {slot / 8 % 4, 8 * byte + 2 * j};
}

void write_parameters(std::uint8_t* half, int head_dim, ParameterFormat format, int slot,
                      const RowParameters& parameters) {
  std::uint8_t* first = half + code_bytes(head_dim);
  if (format == ParameterFormat::kLog8) {
    first[slot] = static_cast<std::uint8_t>(parameters.scale_code);
    first[kPageTokens + slot] = static_cast<std::uint8_t>(parameters.offset_code);
  } else {
    std::memcpy(first + 4 * slot, &parameters.scale, 4);
    std::memcpy(first + 4 * (kPageTokens + slot), &parameters.zero, 4);
  }
}

RowParameters read_parameters(const std::uint8_t* half, int head_dim, ParameterFormat format, int slot) {
  const std::uint8_t* first = half + code_bytes(head_dim);
  RowParameters parameters;
  if (format == ParameterFormat::kLog8) {
    parameters.scale_code = static_cast<std::int8_t>(first[slot]);
    parameters.offset_code = static_cast<std::int8_t>(first[kPageTokens + slot]);
  } else {
    std::memcpy(&parameters.scale, first + 4 * slot, 4);
    std::memcpy(&parameters.zero, first + 4 * (kPageTokens + slot), 4);
  }
  return parameters;
}

}  // namespace

void pack_key_row(std::uint8_t* half, int head_dim, ParameterFormat format, int slot, const std::uint8_t* codes,
                  const RowParameters& parameters) {
  int channel = 0;
  for (; channel + kBlockChannels <= head_dim; channel += kBlockChannels) {
    pack_key_block<4>(half + code_bytes(channel), slot, codes + channel);
  }
  std::uint8_t* last = half + code_bytes(channel);
  switch ((head_dim - channel) / 16) {
    case 1: pack_key_block<1>(last, slot, codes + channel); break;
    case 2: pack_key_block<2>(last, slot, codes + channel); break;
    case 3: pack_key_block<3>(last, slot, codes + channel); break;
    default: break;
  }
  write_parameters(half, head_dim, format, slot, parameters);
}

void unpack_key_row(const std::uint8_t* half, int head_dim, ParameterFormat format, int slot, std::uint8_t* codes,
                    RowParameters* parameters) {
  int channel = 0;
  for (; channel + kBlockChannels <= head_dim; channel += kBlockChannels) {
    unpack_key_block<4>(half + code_bytes(channel), slot, codes + channel);
  }
  const std::uint8_t* last = half + code_bytes(channel);
  switch ((head_dim - channel) / 16) {
    case 1: unpack_key_block<1>(last, slot, codes + channel); break;
    case 2: unpack_key_block<2>(last, slot, codes + channel); break;
    case 3: unpack_key_block<3>(last, slot, codes + channel); break;
    default: break;
  }
  *parameters = read_parameters(half, head_dim, format, slot);
}

void pack_value_row(std::uint8_t* half, int head_dim, ParameterFormat format, int slot, const std::uint8_t* codes,
                    const RowParameters& parameters) {
  const auto [word, shift] = value_slot(slot);
  const std::uint32_t keep = ~(3u << shift);
  for (int channel = 0; channel < head_dim; channel += 4) {
    std::uint8_t* words = half + code_bytes(channel) + word * kWordStride;
    for (int i = 0; i < 4; ++i) {
      std::uint8_t* to = words + i * kWordBytes;
      store_word(to, (load_word(to) & keep) | std::uint32_t{codes[channel + i]} << shift);
    }
  }
  write_parameters(half, head_dim, format, slot, parameters);
}

void unpack_value_row(const std::uint8_t* half, int head_dim, ParameterFormat format, int slot, std::uint8_t* codes,
                      RowParameters* parameters) {
  const auto [word, shift] = value_slot(slot);
  for (int channel = 0; channel < head_dim; channel += 4) {
    const std::uint8_t* words = half + code_bytes(channel) + word * kWordStride;
    for (int i = 0; i < 4; ++i) {
      codes[channel + i] = static_cast<std::uint8_t>((load_word(words + i * kWordBytes) >> shift) & 3u);
    }
  }
  *parameters = read_parameters(half, head_dim, format, slot);
}

}  // namespace oscar
