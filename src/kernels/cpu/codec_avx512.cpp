// Codec kernels for AVX-512 VL: the same eight lanes, 32 registers.

#include <immintrin.h>

#include "kernels/cpu/codec_kernels.hpp"

namespace oscar::cpu {
namespace {

#include "kernels/cpu/codec_simd_avx2.inl"

#include "kernels/cpu/codec_body.inl"

}  // namespace

const CodecKernels kCodecAvx512 = kKernels;

}  // namespace oscar::cpu
