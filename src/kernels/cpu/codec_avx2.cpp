// Codec kernels for AVX2 and F16C.

#include <immintrin.h>

#include "kernels/cpu/codec_kernels.hpp"

namespace oscar::cpu {
namespace {

#include "kernels/cpu/codec_simd_avx2.inl"

#include "kernels/cpu/codec_body.inl"

}  // namespace

const CodecKernels kCodecAvx2 = kKernels;

}  // namespace oscar::cpu
