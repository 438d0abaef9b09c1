#include "environment.hpp"

#include <algorithm>
#include <numeric>

namespace oscar::tool {
namespace {

constexpr std::string_view kPrefix = "OSCAR_";

// What the program and the library read, what scripts/env sets, and what the tests set.
const std::vector<std::string_view>& known_variables() {
  static const std::vector<std::string_view> known = {
      "OSCAR_ISA",    "OSCAR_CACHE", "OSCAR_JOBS",    "OSCAR_LLAMA_PREFIX",
      "OSCAR_MODELS", "OSCAR_TEXTS", "OSCAR_VECTORS", "OSCAR_ENGINE_TEXT",
  };
  return known;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string_view nearest_name(std::string_view name, const std::vector<std::string_view>& known) {
  return *std::ranges::min_element(known, {}, [&](std::string_view k) { return edit_distance(name, k); });
}

Status check_environment(const char* const* environment) {
  for (; *environment != nullptr; ++environment) {
    const std::string_view entry = *environment;
    const std::string_view name = entry.substr(0, entry.find('='));
    if (!name.starts_with(kPrefix) || std::ranges::find(known_variables(), name) != known_variables().end()) continue;
    return make_error(ErrorCode::kInvalidArgument, "environment variable " + std::string(name) +
                                                       " is unknown; did you mean " +
                                                       std::string(nearest_name(name, known_variables())) + "?");
  }
  return {};
}

}  // namespace oscar::tool
