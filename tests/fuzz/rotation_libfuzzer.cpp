// libFuzzer harness of the safetensors, rotation and statistics readers. Build with clang and -DOSCAR_FUZZ=ON, then:
//   rotation_libfuzzer -max_len=65536 CORPUS_FOLDER

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <oscar/covariance.hpp>
#include <oscar/rotation.hpp>
#include <string>

#include "io/safetensors.hpp"

// The readers take paths, so the input becomes a file in memory.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int file = ::memfd_create("fuzz", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (file < 0 || ::ftruncate(file, 0) != 0) std::abort();
  if (::pwrite(file, data, size, 0) != static_cast<ssize_t>(size)) std::abort();
  if (const auto safetensors = oscar::io::SafetensorsFile::open(path)) {
    for (const auto& [name, info] : safetensors->tensors()) {
      if (!safetensors->read_bytes(name)) std::abort();  // its range was checked
    }
  }
  if (const auto set = oscar::load_rotation(path)) {
    if (!oscar::check_rotation(**set, (*set)->geometry)) std::abort();
  }
  static_cast<void>(oscar::load_statistics(path));
  return 0;
}
