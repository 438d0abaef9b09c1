#pragma once
// OSCAR_* environment variables: a misspelt one is an error, not a silent default.

#include <oscar/result.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace oscar::tool {

// Error kInvalidArgument for the first entry "OSCAR_X=..." of `environment` (null-terminated, as `environ`) that the
// program does not know, with the nearest known name.
Status check_environment(const char* const* environment);

// The entry of `known` with the least edit distance to `name`.
std::string_view nearest_name(std::string_view name, const std::vector<std::string_view>& known);

}  // namespace oscar::tool
