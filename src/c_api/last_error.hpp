#pragma once
// The text behind oscar_last_error(), shared by the files of the C ABI.

#include <oscar/result.hpp>
#include <string>

namespace oscar::c_api {

inline thread_local std::string last_error;

inline int fail(const Error& error) {
  last_error = error.message;
  return static_cast<int>(error.code);
}

}  // namespace oscar::c_api
