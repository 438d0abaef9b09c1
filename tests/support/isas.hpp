#pragma once
// The instruction sets a test can run here; the others are named in its output, so that a green run says what it
// skipped.

#include <algorithm>
#include <iostream>
#include <oscar/isa.hpp>
#include <utility>
#include <vector>

namespace oscar::test {

inline std::vector<Isa> isas_to_test() {
  const std::vector<Isa> supported = supported_isas();
  static bool told = false;
  if (std::exchange(told, true)) return supported;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (std::find(supported.begin(), supported.end(), isa) == supported.end()) {
      std::cout << "[ NOT RUN  ] " << isa_name(isa) << ": this machine lacks it\n";
    }
  }
  return supported;
}

}  // namespace oscar::test
