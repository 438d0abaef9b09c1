#include "rivals/half.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace oscar::rivals {

float round_to_half(float value) {
  constexpr float kLargest = 65504.0f;
  constexpr float kSmallestNormal = 0x1p-14f;
  // Subnormal halves are multiples of 2^-24, the last bit of a float in [.5, 1).
  if (std::abs(value) < kSmallestNormal) return std::copysign((std::abs(value) + 0.5f) - 0.5f, value);
  constexpr std::uint32_t kDropped = 13;  // of a float's 23 mantissa bits
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  bits += (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
  bits &= ~((1u << kDropped) - 1);
  return std::clamp(std::bit_cast<float>(bits), -kLargest, kLargest);
}

}  // namespace oscar::rivals
