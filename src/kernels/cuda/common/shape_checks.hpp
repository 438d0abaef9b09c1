#pragma once
// What the plans of all kernels refuse alike.

#include <oscar/result.hpp>
#include <string>

namespace oscar::cuda {

inline Status check_head_dim(const char* kernel, int head_dim) {
  if (head_dim == 64 || head_dim == 128 || head_dim == 256) return {};
  return make_error(ErrorCode::kUnsupported, std::string(kernel) + ": head_dim is " + std::to_string(head_dim) +
                                                 "; the CUDA kernels serve 64, 128 and 256; use the CPU library");
}

}  // namespace oscar::cuda
