#pragma once
// Sizes and offsets inside one page half. The codes come first, then the parameters of the 64 tokens.

#include <cstddef>
#include <oscar/cache.hpp>

#include "kernels/cpu/codec_kernels.hpp"

namespace oscar {

inline constexpr int kBlockChannels = 64;  // channels of a key block; the last may be narrower
inline constexpr int kWordBytes = 4;       // 16 codes

constexpr std::size_t code_bytes(int head_dim) { return static_cast<std::size_t>(head_dim) * (kPageTokens / 4); }
constexpr std::size_t parameter_bytes(ParameterFormat format) {
  return kPageTokens * (format == ParameterFormat::kLog8 ? std::size_t{2} : 2 * sizeof(float));
}

}  // namespace oscar
