#pragma once
// Whether statistics hang together: what every function that takes them relies on.

#include <optional>
#include <oscar/covariance.hpp>
#include <string>

namespace oscar {

// Why the sums of one head cannot be used; empty when every field has its size, is finite and counts are not negative.
std::optional<std::string> head_fault(const HeadStatistics& head);

// Likewise for the whole: sound geometry, layers that it knows, head counts and widths as it says.
std::optional<std::string> statistics_fault(const ModelStatistics& statistics);

}  // namespace oscar
