#include <oscar/cache.hpp>

#include <algorithm>
#include <string>

#include "cache/page_layout.hpp"

namespace oscar {
namespace {

constexpr int kMaxWindow = 1 << 24;  // tokens; keeps sink + recent far from overflow

Status check_range(const char* name, int value, int low, int high) {
  if (value >= low && value <= high) return {};
  return make_error(ErrorCode::kInvalidArgument, "KvSpec: " + std::string(name) + " is " + std::to_string(value) +
                                                     "; use " + std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace

std::size_t KvSpec::half_bytes() const { return code_bytes(head_dim) + parameter_bytes(parameter_format); }

double KvSpec::page_bits_per_element() const {
  return 8.0 * static_cast<double>(half_bytes()) / (static_cast<double>(kPageTokens) * head_dim);
}

double KvSpec::bits_per_element(std::int64_t context) const {
  if (context <= 0) return 0;
  const double exact = static_cast<double>(std::min<std::int64_t>(context, std::int64_t{sink} + recent));
  const double tokens = static_cast<double>(context);
  return (exact * 16 + tokens * page_bits_per_element()) / tokens;
}

Status check_spec(const KvSpec& spec) {
  OSCAR_TRY(check_range("num_kv_heads", spec.num_kv_heads, 1, 1 << 16));
  OSCAR_TRY(check_range("head_dim", spec.head_dim, 16, cpu::kMaxHeadDim));
  if (spec.head_dim % 16 != 0) {
    return make_error(ErrorCode::kInvalidArgument, "KvSpec: head_dim is " + std::to_string(spec.head_dim) +
                                                       "; only multiples of 16 up to 256 have a page layout");
  }
  OSCAR_TRY(check_range("sink", spec.sink, 0, kMaxWindow));
  OSCAR_TRY(check_range("recent", spec.recent, 0, kMaxWindow));
  return {};
}

}  // namespace oscar
