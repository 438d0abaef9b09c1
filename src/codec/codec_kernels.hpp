#pragma once
// The kernels of one instruction set, for the stages that work on rows.

#include <oscar/isa.hpp>

#include "kernels/cpu/codec_kernels.hpp"

namespace oscar {

// `isa` must be supported by this machine (isa_supported).
const cpu::CodecKernels& codec_kernels(Isa isa);

}  // namespace oscar
