#pragma once
// Instruction set of the CPU kernels, chosen once at run time. OSCAR_ISA=scalar|avx2|avx512 forces one.

#include <oscar/result.hpp>
#include <string_view>
#include <vector>

namespace oscar {

enum class Isa { kScalar, kAvx2, kAvx512 };  // kAvx512: F, BW, VL, DQ and VNNI

std::string_view isa_name(Isa isa);  // "scalar", "avx2", "avx512"
bool isa_supported(Isa isa);         // by this machine and this build
std::vector<Isa> supported_isas();   // slowest first; always holds kScalar

// The fastest supported one, or the one OSCAR_ISA names; an unknown or unsupported name is an error.
Result<Isa> select_isa();

}  // namespace oscar
