#pragma once
// Errors as values. Whatever input can cause comes back as a Result; nothing is thrown across the
// library's boundary. A message names the thing, its value, what was expected and the remedy.

#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace oscar {

// Stable numbers, shared with the C ABI and Python.
enum class ErrorCode : int {
  kInvalidArgument = 1,  // a caller's value is out of range
  kBadInput = 2,         // a file or text is missing, malformed or does not fit
  kUnsupported = 3,      // well-formed, but this build or machine cannot do it
  kIo = 4,               // reading or writing failed
  kMismatch = 5,         // two inputs do not belong together (rotation and model, statistics and model)
  kInterrupted = 6,      // stopped by the caller
  kInternal = 7,         // a library underneath failed
};

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

template <typename T>
using Result = tl::expected<T, Error>;
using Status = Result<void>;

inline tl::unexpected<Error> make_error(ErrorCode code, std::string message) {
  return tl::unexpected<Error>(Error{code, std::move(message)});
}

}  // namespace oscar

#define OSCAR_CONCAT_INNER(a, b) a##b
#define OSCAR_CONCAT(a, b) OSCAR_CONCAT_INNER(a, b)

// OSCAR_TRY(call()) passes a failed Status up; OSCAR_ASSIGN(auto x, call()) also takes the value.
#define OSCAR_TRY(expression)                                                  \
  do {                                                                         \
    auto oscar_status = (expression);                                          \
    if (!oscar_status) return tl::unexpected(std::move(oscar_status).error()); \
  } while (false)

#define OSCAR_ASSIGN_INNER(declaration, temporary, expression)         \
  auto temporary = (expression);                                       \
  if (!temporary) return tl::unexpected(std::move(temporary).error()); \
  declaration = *std::move(temporary)
#define OSCAR_ASSIGN(declaration, expression) \
  OSCAR_ASSIGN_INNER(declaration, OSCAR_CONCAT(oscar_result_, __LINE__), expression)
