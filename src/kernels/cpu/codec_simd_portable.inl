// Eight float32 lanes in plain C++: the vocabulary of codec_body.inl for any processor.

struct F8 {
  float lane[kLanes];
};
struct Mask8 {
  bool lane[kLanes];
};

template <typename Function>
F8 each(Function function) {
  F8 out;
  for (int k = 0; k < kLanes; ++k) out.lane[k] = function(k);
  return out;
}
F8 load(const float* in) {
  return each([&](int k) { return in[k]; });
}
void store(float* out, F8 a) {
  for (int k = 0; k < kLanes; ++k) out[k] = a.lane[k];
}
F8 splat(float value) {
  return each([&](int) { return value; });
}
F8 add(F8 a, F8 b) {
  return each([&](int k) { return a.lane[k] + b.lane[k]; });
}
F8 sub(F8 a, F8 b) {
  return each([&](int k) { return a.lane[k] - b.lane[k]; });
}
F8 mul(F8 a, F8 b) {
  return each([&](int k) { return a.lane[k] * b.lane[k]; });
}
F8 div(F8 a, F8 b) {
  return each([&](int k) { return a.lane[k] / b.lane[k]; });
}
F8 min(F8 a, F8 b) {
  return each([&](int k) { return a.lane[k] < b.lane[k] ? a.lane[k] : b.lane[k]; });
}
F8 max(F8 a, F8 b) {
  return each([&](int k) { return a.lane[k] > b.lane[k] ? a.lane[k] : b.lane[k]; });
}
Mask8 greater(F8 a, F8 b) {
  Mask8 out;
  for (int k = 0; k < kLanes; ++k) out.lane[k] = a.lane[k] > b.lane[k];
  return out;
}
Mask8 differs(F8 a, F8 b) {
  Mask8 out;
  for (int k = 0; k < kLanes; ++k) out.lane[k] = a.lane[k] != b.lane[k];
  return out;
}
F8 select(Mask8 mask, F8 yes, F8 no) {
  return each([&](int k) { return mask.lane[k] ? yes.lane[k] : no.lane[k]; });
}
unsigned bits(Mask8 mask) {
  unsigned out = 0;
  for (int k = 0; k < kLanes; ++k) out |= static_cast<unsigned>(mask.lane[k]) << k;
  return out;
}

// ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7))
float reduce_add(F8 p) {
  return ((p.lane[0] + p.lane[4]) + (p.lane[2] + p.lane[6])) + ((p.lane[1] + p.lane[5]) + (p.lane[3] + p.lane[7]));
}
float reduce_min(F8 p) {
  float out = p.lane[0];
  for (int k = 1; k < kLanes; ++k) out = p.lane[k] < out ? p.lane[k] : out;
  return out;
}
float reduce_max(F8 p) {
  float out = p.lane[0];
  for (int k = 1; k < kLanes; ++k) out = p.lane[k] > out ? p.lane[k] : out;
  return out;
}

// Nearest level of one value, without a branch: codes are as good as random.
float nearest_level(float u) { return kLevels[(u > -kStep) + (u > 0.0f) + (u > kStep)]; }

// Eight lanes to eight bytes; lanes hold whole numbers 0..3 and a fraction that is cut off.
void store_codes(std::uint8_t* out, F8 a) {
  for (int k = 0; k < kLanes; ++k) out[k] = static_cast<std::uint8_t>(a.lane[k]);
}

std::uint16_t to_f16(float value) {
  const std::uint32_t word = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t sign = (word >> 16) & 0x8000u;
  const std::uint32_t magnitude = word & 0x7fffffffu;
  std::uint32_t out;
  if (magnitude > 0x7f800000u) {
    out = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // quiet NaN with the payload's upper bits
  } else if (magnitude >= 0x477ff000u) {
    out = 0x7c00u;  // 65520 and beyond: infinity
  } else if (magnitude >= 0x38800000u) {
    const std::uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
    out = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  } else {
    // below 2^-14: adding 1/2 makes the sum's last bit worth 2^-24, the step of subnormals
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    out = __builtin_bit_cast(std::uint32_t, shifted) - 0x3f000000u;
  }
  return static_cast<std::uint16_t>(sign | out);
}
void store_f16(std::uint16_t* out, F8 a) {
  for (int k = 0; k < kLanes; ++k) out[k] = to_f16(a.lane[k]);
}
