#pragma once
// Facts about this machine.

#include <cstdint>
#include <string>

namespace oscar::tool {

std::string cpu_name();           // as /proc/cpuinfo has it; "unknown" elsewhere
int available_cores();            // that this process may use; at least 1
std::int64_t total_memory();      // bytes
std::int64_t available_memory();  // bytes that can be had without swapping; 0 when unknown

}  // namespace oscar::tool
