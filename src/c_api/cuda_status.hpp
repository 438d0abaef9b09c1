#pragma once
// What every CUDA entry of the C ABI does first and last: the structs' sizes, and the runtime's errors as text.

#include <cuda_runtime_api.h>

#include <string>

#include "c_api/last_error.hpp"

namespace oscar::c_api {

// A struct of another size is of another version of the header: its fields would be read from the wrong places.
template <typename Struct>
Status check_struct_size(const Struct& given, const char* name) {
  if (given.struct_size == sizeof given) return {};
  return make_error(ErrorCode::kInvalidArgument, std::string(name) + ".struct_size is " +
                                                     std::to_string(given.struct_size) +
                                                     ", this library's struct has " + std::to_string(sizeof given) +
                                                     "; set struct_size and build against this version's header");
}

// 0 on success.
inline int status_of(cudaError_t error, const std::string& kernel) {
  if (error == cudaSuccess) return 0;
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    return fail({ErrorCode::kUnsupported,
                 kernel + ": this library has no code for the device's architecture (prefill: Hopper " +
                     "only); build it with -DOSCAR_CUDA_ARCHITECTURES"});
  }
  return fail({ErrorCode::kInternal, kernel + ": CUDA: " + cudaGetErrorString(error)});
}

// Error kUnsupported when there is no device.
inline Result<int> device_attribute(cudaDeviceAttr attribute, const std::string& kernel) {
  int device = 0, value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  if (error == cudaSuccess) return value;
  return make_error(ErrorCode::kUnsupported, kernel + ": no usable CUDA device: " + cudaGetErrorString(error));
}

// Multiprocessors of the current device.
inline Result<int> current_device_sms(const std::string& kernel) {
  return device_attribute(cudaDevAttrMultiProcessorCount, kernel);
}

// kUnsupported when a block of the current device cannot have `bytes` of shared memory. Explains a launch that failed:
// the runtime refuses such a launch itself, so one that works need not ask.
inline Status check_shared_memory(std::size_t bytes, const std::string& kernel) {
  OSCAR_ASSIGN(const int most, device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, kernel));
  if (bytes <= static_cast<std::size_t>(most)) return {};
  return make_error(ErrorCode::kUnsupported, kernel + ": a block needs " + std::to_string(bytes) +
                                                 " bytes of shared memory, this device has " + std::to_string(most) +
                                                 "; use a device of compute capability 8.0, 9.0 or 10.0");
}

}  // namespace oscar::c_api
