#include "attention/visibility.hpp"

#include <algorithm>
#include <limits>

namespace oscar::attention {
namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::min();

// Bits [begin, end), 0 <= begin <= end <= 64.
std::uint64_t bit_range(int begin, int end) {
  const auto below = [](int n) { return n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1; };
  return below(end) & ~below(begin);
}

// Tokens whose position p has low < p <= high. Most pages lie wholly on one side.
std::uint64_t positions_within(const PageSpan& page, std::int64_t low, std::int64_t high) {
  if (page.min_position > high || page.max_position <= low) return 0;
  if (page.min_position > low && page.max_position <= high) return page.present;
  std::uint64_t mask = 0;
  for (int t = 0; t < page.count; ++t) {
    const bool within = page.positions[t] > low && page.positions[t] <= high;
    mask |= static_cast<std::uint64_t>(within) << t;
  }
  return mask;
}

}  // namespace

PageSpan describe_page(const AttentionParams& params, int num_tokens, int page, int* span_cursor) {
  PageSpan result;
  result.first_token = page * kPageTokens;
  result.count = std::min(kPageTokens, num_tokens - result.first_token);
  result.positions = params.key_positions + result.first_token;
  result.present = bit_range(0, result.count);
  result.min_position = result.max_position = result.positions[0];
  for (int t = 1; t < result.count; ++t) {
    result.min_position = std::min(result.min_position, result.positions[t]);
    result.max_position = std::max(result.max_position, result.positions[t]);
  }
  const auto end_of = [&](int i) { return params.spans[i].first_token + params.spans[i].num_tokens; };
  while (*span_cursor < params.num_spans && end_of(*span_cursor) <= result.first_token) ++*span_cursor;
  result.first_span = result.end_span = *span_cursor;
  for (int i = *span_cursor; i < params.num_spans; ++i) {
    const ExactSpan& span = params.spans[i];
    const int begin = std::max(span.first_token - result.first_token, 0);
    const int end = std::min(end_of(i) - result.first_token, result.count);
    if (begin >= result.count) break;
    result.end_span = i + 1;
    if (begin >= end) continue;
    result.covered |= bit_range(begin, end);
    if (span.always || params.exact_all) result.always |= bit_range(begin, end);
  }
  return result;
}

KeyMasks key_masks(const AttentionParams& params, const PageSpan& page, int query) {
  const std::int64_t position = params.q_positions[query];
  std::uint64_t visible;
  if (params.visible != nullptr) {
    visible = page.present & params.visible[query * params.visible_stride + page.first_token / kPageTokens];
  } else {
    const std::int64_t low = params.sliding_window > 0 ? position - params.sliding_window : kNoLimit;
    visible = positions_within(page, low, position);
  }
  std::uint64_t exact = page.covered & visible;
  if (exact != 0 && exact != (exact & page.always)) {
    exact &= page.always | positions_within(page, kNoLimit, std::int64_t{params.sink} - 1) |
             positions_within(page, position - params.recent, std::numeric_limits<std::int64_t>::max());
  }
  return {.packed = visible & ~exact, .exact = exact};
}

void exact_rows(const AttentionParams& params, const PageSpan& page, std::uint64_t tokens, int kv_head,
                const std::uint16_t** k, const std::uint16_t** v) {
  std::fill_n(k, kPageTokens, nullptr);
  std::fill_n(v, kPageTokens, nullptr);
  for (int i = page.first_span; i < page.end_span; ++i) {
    const ExactSpan& span = params.spans[i];
    const int offset = page.first_token - span.first_token;  // row of the page's token 0, may be negative
    const int begin = std::max(0, -offset), end = std::min(page.count, span.num_tokens - offset);
    for (int t = begin; t < end; ++t) {
      if ((tokens >> t & 1) == 0) continue;
      const std::int64_t at = std::int64_t{offset + t} * span.token_stride + kv_head * span.head_stride;
      k[t] = span.k + at;
      v[t] = span.v + at;
    }
  }
}

}  // namespace oscar::attention
