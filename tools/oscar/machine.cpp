#include "machine.hpp"

#include <sched.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace oscar::tool {
namespace {

// What follows the colon of the first line that begins with `key`.
std::string field_of(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

}  // namespace

std::string cpu_name() {
  const std::string name = field_of("/proc/cpuinfo", "model name");
  return name.empty() ? "unknown" : name;
}

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return 1;
}

std::int64_t total_memory() {
  return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
}

std::int64_t available_memory() {
  std::istringstream field(field_of("/proc/meminfo", "MemAvailable"));
  std::int64_t kibibytes = 0;
  field >> kibibytes;
  return kibibytes * 1024;
}

}  // namespace oscar::tool
