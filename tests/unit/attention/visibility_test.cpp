#include "attention/visibility.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "problem.hpp"
#include "reference/attention.hpp"

namespace oscar::test {
namespace {

using reference::KeySource;

RC_GTEST_PROP(Visibility, MasksFollowTheRuleKeyByKey, ()) {
  ProblemOptions options;
  options.shape = {.num_queries = *rc::gen::inRange(1, 6),
                   .num_tokens = *rc::gen::inRange(1, 260),
                   .num_qo_heads = 1,
                   .num_kv_heads = 1,
                   .head_dim = 16};
  options.first_position = *rc::gen::inRange(0, 100);
  options.shuffle_positions = *rc::gen::arbitrary<bool>();
  options.random_visible = *rc::gen::arbitrary<bool>();
  Problem problem(options);
  problem.params.sink = *rc::gen::inRange(0, 80);
  problem.params.recent = *rc::gen::inRange(0, 200);
  problem.params.sliding_window = *rc::gen::element(0, 1, 50, 64, 1000);
  problem.params.exact_all = *rc::gen::inRange(0, 4) == 0;
  std::vector<ExactSpan> spans;
  for (int token = *rc::gen::inRange(0, 100); token < options.shape.num_tokens;) {
    const int count = std::min(*rc::gen::inRange(0, 120), options.shape.num_tokens - token);
    spans.push_back(problem.span(token, count, *rc::gen::inRange(0, 3) == 0));
    token += count + *rc::gen::inRange(1, 60);
  }
  problem.set_spans(spans);

  int cursor = 0;
  for (int page = 0; page * kPageTokens < options.shape.num_tokens; ++page) {
    const attention::PageSpan span = attention::describe_page(problem.params, options.shape.num_tokens, page, &cursor);
    for (int query = 0; query < options.shape.num_queries; ++query) {
      const attention::KeyMasks masks = attention::key_masks(problem.params, span, query);
      for (int t = 0; t < kPageTokens; ++t) {
        const int token = page * kPageTokens + t;
        const KeySource expected = token < options.shape.num_tokens
                                       ? reference::key_source(problem.params, query, token)
                                       : KeySource::kInvisible;
        RC_ASSERT((masks.packed >> t & 1) == (expected == KeySource::kPacked));
        RC_ASSERT((masks.exact >> t & 1) == (expected == KeySource::kExact));
      }
      const std::uint16_t *k[kPageTokens], *v[kPageTokens];
      attention::exact_rows(problem.params, span, masks.exact, 0, k, v);
      for (int t = 0; t < kPageTokens; ++t) {
        const bool exact = (masks.exact >> t & 1) != 0;
        RC_ASSERT(k[t] == (exact ? problem.rows_k.data() + (page * kPageTokens + t) * 16 : nullptr));
        RC_ASSERT(v[t] == (exact ? problem.rows_v.data() + (page * kPageTokens + t) * 16 : nullptr));
      }
    }
  }
}

}  // namespace
}  // namespace oscar::test
