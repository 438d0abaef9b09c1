#pragma once
// Float32 operations of the format: each rounded on its own, never fused (docs/format.md, "Encoder arithmetic").

#include <cstdint>

namespace oscar::cuda {

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float at_least(float value, float limit) { return value > limit ? value : limit; }

inline constexpr float kLevelStep = 0.9957f;
inline constexpr float kMinScale = 1e-8f;
inline constexpr float kSingular = 1e-4f;

__device__ __forceinline__ float nearest_level(float u) {
  const float lower = u > -kLevelStep ? -0.5f * kLevelStep : -1.5f * kLevelStep;
  const float upper = u > kLevelStep ? 1.5f * kLevelStep : 0.5f * kLevelStep;
  return u > 0.0f ? upper : lower;
}
__device__ __forceinline__ int nearest_code(float u) {
  return (u > -kLevelStep ? 1 : 0) + (u > 0.0f ? 1 : 0) + (u > kLevelStep ? 1 : 0);
}

// Sum, largest or smallest over the eight lanes of a row. The sum's tree is the format's:
// ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7)).
template <typename T, typename Operation>
__device__ __forceinline__ T over_row(T value, Operation operation) {
#pragma unroll
  for (int step = 16; step >= 4; step /= 2) value = operation(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
// S(a): terms 8n + k of lane k in ascending order, then the tree.
template <int kChannels, typename Term>
__device__ __forceinline__ float interleaved_sum(Term term) {
  float partial = 0.0f;
#pragma unroll
  for (int n = 0; n < kChannels; ++n) partial = add(partial, term(n));
  return over_row(partial, [](float a, float b) { return add(a, b); });
}

struct Fit {
  float mean, scale;
};

struct Log8 {
  int scale_code, offset_code;
};

// 2^(i / 16)
static __constant__ float kOctave[16] = {1.0f,
                                         1.04427378242741384032f,
                                         1.09050773266525765920f,
                                         1.13878863475669165370f,
                                         1.18920711500272106671f,
                                         1.24185781207348404859f,
                                         1.29683955465100966593f,
                                         1.35425554693689272829f,
                                         1.41421356237309504880f,
                                         1.47682614593949931138f,
                                         1.54221082540794082361f,
                                         1.61049033194925430817f,
                                         1.68179283050742908606f,
                                         1.75625216037329948311f,
                                         1.83400808640934246348f,
                                         1.91520656139714729387f};

// The fit's two stored bytes; the fit becomes what they decode to. Limits are those of one octave; the others
// are exact multiples.
__device__ __forceinline__ Log8 store_fit(float center, float spread, Fit& fit) {
  constexpr float kLimits[16] = {
      1.02189714865411667823f, 1.06714040067682361816f, 1.11438674259589253630f, 1.16372485877757751381f,
      1.21524735998046887811f, 1.26905095719173322255f, 1.32523664315974129462f, 1.38390988196383195487f,
      1.44518080697704662003f, 1.50916442759342273976f, 1.57598084510788648645f, 1.64575547815396484451f,
      1.71861929812247791562f, 1.79470907500310718642f, 1.87416763411029990132f, 1.95714412417540026901f};
  float offset = divide(mul(20.0f, sub(fit.mean, center)), spread);
  offset = at_least(offset, -128.0f);
  offset = rintf(offset < 127.0f ? offset : 127.0f);
  const std::uint32_t bits = __float_as_uint(fit.scale);  // positive: at least 1e-8
  const float mantissa = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u);
  int index = 16 * (static_cast<int>(bits >> 23) - 127 + 8);
#pragma unroll
  for (int i = 0; i < 16; ++i) index += mantissa > kLimits[i] ? 1 : 0;
  index = min(max(index, 0), 255);
  fit.mean = add(center, mul(offset, divide(spread, 20.0f)));
  fit.scale = mul(kOctave[index % 16], __uint_as_float(static_cast<std::uint32_t>(127 - 8 + index / 16) << 23));
  return {index - 128, static_cast<int>(offset)};
}

}  // namespace oscar::cuda
