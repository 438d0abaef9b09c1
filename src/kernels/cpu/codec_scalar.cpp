// Codec kernels for any processor.

#include "kernels/cpu/codec_kernels.hpp"

namespace oscar::cpu {
namespace {

#include "kernels/cpu/codec_simd_portable.inl"

#include "kernels/cpu/codec_body.inl"

}  // namespace

const CodecKernels kCodecScalar = kKernels;

}  // namespace oscar::cpu
