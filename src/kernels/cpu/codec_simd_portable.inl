// Eight float32 lanes as two vectors of four, which the compiler maps to whatever the processor has: the vocabulary of
// codec_body.inl for any processor.

using F4 = float __attribute__((vector_size(16)));
using Mask4 = int __attribute__((vector_size(16)));
struct F8 {
  F4 low, high;
};
struct Mask8 {
  Mask4 low, high;
};

inline F8 load(const float* in) {
  F8 out;
  __builtin_memcpy(&out, in, sizeof out);
  return out;
}
inline void store(float* out, F8 a) { __builtin_memcpy(out, &a, sizeof a); }
inline F8 splat(float value) { return {F4{value, value, value, value}, F4{value, value, value, value}}; }
inline F8 add(F8 a, F8 b) { return {a.low + b.low, a.high + b.high}; }
inline F8 sub(F8 a, F8 b) { return {a.low - b.low, a.high - b.high}; }
inline F8 mul(F8 a, F8 b) { return {a.low * b.low, a.high * b.high}; }
inline F8 div(F8 a, F8 b) { return {a.low / b.low, a.high / b.high}; }
inline Mask8 greater(F8 a, F8 b) { return {a.low > b.low, a.high > b.high}; }
inline Mask8 differs(F8 a, F8 b) { return {a.low != b.low, a.high != b.high}; }
inline F8 select(Mask8 mask, F8 yes, F8 no) { return {mask.low ? yes.low : no.low, mask.high ? yes.high : no.high}; }
inline F8 min(F8 a, F8 b) { return select(greater(b, a), a, b); }  // b where either is NaN, as minps
inline F8 max(F8 a, F8 b) { return select(greater(a, b), a, b); }
inline unsigned bits(Mask8 mask) {
  unsigned out = 0;
  for (int k = 0; k < 4; ++k) out |= (mask.low[k] & 1u) << k | (mask.high[k] & 1u) << (k + 4);
  return out;
}

// ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7))
inline float reduce_add(F8 p) {
  const F4 four = p.low + p.high;
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float reduce_min(F8 p) {
  float lane[kLanes];
  store(lane, p);
  float out = lane[0];
  for (int k = 1; k < kLanes; ++k) out = lane[k] < out ? lane[k] : out;
  return out;
}
inline float reduce_max(F8 p) {
  float lane[kLanes];
  store(lane, p);
  float out = lane[0];
  for (int k = 1; k < kLanes; ++k) out = lane[k] > out ? lane[k] : out;
  return out;
}

// Nearest level of one value, without a branch: codes are as good as random.
inline float nearest_level(float u) { return kLevels[(u > -kStep) + (u > 0.0f) + (u > kStep)]; }

// Eight lanes to eight bytes; lanes hold whole numbers 0..3 and a fraction that is cut off.
inline void store_codes(std::uint8_t* out, F8 a) {
  float lane[kLanes];
  store(lane, a);
  for (int k = 0; k < kLanes; ++k) out[k] = static_cast<std::uint8_t>(lane[k]);
}

inline std::uint16_t to_f16(float value) {
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
inline void store_f16(std::uint16_t* out, F8 a) {
  float lane[kLanes];
  store(lane, a);
  for (int k = 0; k < kLanes; ++k) out[k] = to_f16(lane[k]);
}
