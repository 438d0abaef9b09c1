#pragma once
// Which keys of a page a query reads, and from where: the rule at the top of oscar/attention.hpp, 64 keys at a time.

#include <cstdint>
#include <oscar/attention.hpp>

namespace oscar::attention {

// One page of the sequence. Bit t of a mask = token first_token + t.
struct PageSpan {
  int first_token = 0;
  int count = 0;                            // tokens in [0, num_tokens), 1..64
  const std::int32_t* positions = nullptr;  // [count]
  std::int32_t min_position = 0, max_position = 0;
  std::uint64_t present = 0;  // the `count` lowest bits
  std::uint64_t covered = 0;  // has a 16-bit row
  std::uint64_t always = 0;   // has one that is read whatever the window says
  int first_span = 0;         // the spans that touch the page: [first_span, end_span)
  int end_span = 0;
};

struct KeyMasks {
  std::uint64_t packed = 0;  // read from the INT2 page
  std::uint64_t exact = 0;   // read from 16-bit rows
};

// `span_cursor` starts at 0 and only moves forward: call with ascending pages.
PageSpan describe_page(const AttentionParams& params, int num_tokens, int page, int* span_cursor);

KeyMasks key_masks(const AttentionParams& params, const PageSpan& page, int query);

// The 16-bit rows of one KV head for the tokens of `tokens`; null elsewhere. k, v [64].
void exact_rows(const AttentionParams& params, const PageSpan& page, std::uint64_t tokens, int kv_head,
                const std::uint16_t** k, const std::uint16_t** v);

}  // namespace oscar::attention
