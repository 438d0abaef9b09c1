#include <gtest/gtest.h>

#include <rapidcheck.h>
#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <oscar/cache.hpp>
#include <random>

#include "reference/page.hpp"

namespace oscar {
namespace {

constexpr std::uint8_t kCanary = 0xa5;
constexpr std::size_t kCanaryBytes = 64;

// A page half between canaries, full of `poison` at first, and the calls of its side.
struct Half {
  bool is_key;
  int head_dim;
  ParameterFormat format;
  std::vector<std::uint8_t> bytes;

  Half(bool is_key_, int head_dim_, ParameterFormat format_, std::mt19937& random)
      : is_key(is_key_), head_dim(head_dim_), format(format_), bytes(size() + 2 * kCanaryBytes, kCanary) {
    for (std::size_t i = 0; i < size(); ++i) data()[i] = static_cast<std::uint8_t>(random());
  }
  std::size_t size() const {
    return KvSpec{.num_kv_heads = 1, .head_dim = head_dim, .parameter_format = format}.half_bytes();
  }
  std::uint8_t* data() { return bytes.data() + kCanaryBytes; }
  const std::uint8_t* data() const { return bytes.data() + kCanaryBytes; }

  void pack(int slot, const std::vector<std::uint8_t>& codes, const RowParameters& parameters) {
    (is_key ? pack_key_row : pack_value_row)(data(), head_dim, format, slot, codes.data(), parameters);
  }
  void unpack(int slot, std::vector<std::uint8_t>& codes, RowParameters& parameters) const {
    codes.resize(static_cast<std::size_t>(head_dim));
    (is_key ? unpack_key_row : unpack_value_row)(data(), head_dim, format, slot, codes.data(), &parameters);
  }
  int code_at(int slot, int channel) const {
    return reference::read_code(data(), is_key ? reference::key_code_position(head_dim, slot, channel)
                                               : reference::value_code_position(head_dim, slot, channel));
  }
};

std::vector<std::uint8_t> random_codes(std::mt19937& random, int head_dim) {
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(head_dim));
  for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random() % 4);
  return codes;
}
RowParameters random_parameters(std::mt19937& random, ParameterFormat format) {
  if (format == ParameterFormat::kLog8) {
    return {.scale_code = static_cast<std::int8_t>(random()), .offset_code = static_cast<std::int8_t>(random())};
  }
  return {.scale = std::bit_cast<float>(static_cast<std::uint32_t>(random() & 0x7f7fffffu)),
          .zero = std::bit_cast<float>(static_cast<std::uint32_t>(random() & 0x7f7fffffu))};
}
bool same(const RowParameters& a, const RowParameters& b) {
  return a.scale_code == b.scale_code && a.offset_code == b.offset_code && a.scale == b.scale && a.zero == b.zero;
}

void for_each_half(const std::function<void(Half&, std::mt19937&)>& check) {
  std::mt19937 random(21);
  for (int head_dim = 16; head_dim <= 256; head_dim += 16) {
    for (const bool is_key : {true, false}) {
      for (const ParameterFormat format : {ParameterFormat::kLog8, ParameterFormat::kFloatPair}) {
        SCOPED_TRACE(std::string(is_key ? "key" : "value") + ", head_dim " + std::to_string(head_dim));
        Half half(is_key, head_dim, format, random);
        check(half, random);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(PageLayout, TheTwoFormulasAreABijectionOntoTheCodeBytes) {
  for (int head_dim = 16; head_dim <= 256; head_dim += 16) {
    for (const auto position_of : {reference::key_code_position, reference::value_code_position}) {
      std::vector<int> uses(static_cast<std::size_t>(head_dim * kPageTokens));
      for (int slot = 0; slot < kPageTokens; ++slot) {
        for (int channel = 0; channel < head_dim; ++channel) {
          const auto [byte, shift] = position_of(head_dim, slot, channel);
          ASSERT_LT(byte, head_dim * 16);
          ++uses[static_cast<std::size_t>(4 * byte + shift / 2)];
        }
      }
      EXPECT_EQ(uses, std::vector<int>(uses.size(), 1)) << head_dim;
    }
  }
}

TEST(Packing, PutsEveryCodeWhereTheFormulaSays) {
  for_each_half([](Half& half, std::mt19937& random) {
    std::vector<int> slots(kPageTokens);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    std::vector<std::vector<std::uint8_t>> codes(kPageTokens);
    std::vector<RowParameters> parameters(kPageTokens);
    for (const int slot : slots) {
      codes[slot] = random_codes(random, half.head_dim);
      parameters[slot] = random_parameters(random, half.format);
      half.pack(slot, codes[slot], parameters[slot]);
    }
    for (int slot = 0; slot < kPageTokens; ++slot) {
      for (int channel = 0; channel < half.head_dim; ++channel) {
        ASSERT_EQ(half.code_at(slot, channel), codes[slot][channel]) << "slot " << slot << ", channel " << channel;
      }
      std::vector<std::uint8_t> unpacked;
      RowParameters read;
      half.unpack(slot, unpacked, read);
      ASSERT_EQ(unpacked, codes[slot]) << slot;
      ASSERT_TRUE(same(read, parameters[slot])) << slot;
    }
  });
}

TEST(Packing, ARowTouchesOnlyItsSlot) {
  for_each_half([](Half& half, std::mt19937& random) {
    for (const int slot : {0, 1, 7, 31, 32, 63}) {
      const Half before = half;
      half.pack(slot, random_codes(random, half.head_dim), random_parameters(random, half.format));
      for (int other = 0; other < kPageTokens; ++other) {
        if (other == slot) continue;
        std::vector<std::uint8_t> codes, codes_before;
        RowParameters parameters, parameters_before;
        half.unpack(other, codes, parameters);
        before.unpack(other, codes_before, parameters_before);
        ASSERT_EQ(codes, codes_before) << "slot " << slot << " changed " << other;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(parameters.scale),
                  std::bit_cast<std::uint32_t>(parameters_before.scale));
        ASSERT_EQ(std::bit_cast<std::uint32_t>(parameters.zero), std::bit_cast<std::uint32_t>(parameters_before.zero));
        ASSERT_EQ(parameters.scale_code, parameters_before.scale_code);
        ASSERT_EQ(parameters.offset_code, parameters_before.offset_code);
      }
      for (std::size_t i = 0; i < kCanaryBytes; ++i) {
        ASSERT_EQ(half.bytes[i], kCanary);
        ASSERT_EQ(half.bytes[half.bytes.size() - 1 - i], kCanary);
      }
    }
  });
}

TEST(Packing, TheLastWriteOfASlotWinsInAnyOrderOfWrites) {
  EXPECT_TRUE(rc::check("the last write of a slot wins", [](unsigned seed) {
    std::mt19937 random(seed);
    const int head_dim = 16 * *rc::gen::inRange(1, 17);
    Half half(*rc::gen::arbitrary<bool>(), head_dim,
              *rc::gen::element(ParameterFormat::kLog8, ParameterFormat::kFloatPair), random);
    std::vector<std::vector<std::uint8_t>> last(kPageTokens);
    std::vector<RowParameters> last_parameters(kPageTokens);
    for (const int slot : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, kPageTokens))) {
      last[slot] = random_codes(random, head_dim);
      last_parameters[slot] = random_parameters(random, half.format);
      half.pack(slot, last[slot], last_parameters[slot]);
    }
    for (int slot = 0; slot < kPageTokens; ++slot) {
      if (last[slot].empty()) continue;
      std::vector<std::uint8_t> codes;
      RowParameters parameters;
      half.unpack(slot, codes, parameters);
      RC_ASSERT(codes == last[slot]);
      RC_ASSERT(same(parameters, last_parameters[slot]));
    }
  }));
}

}  // namespace
}  // namespace oscar
