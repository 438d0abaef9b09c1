#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/tile.hpp"
#include "problem.hpp"
#include "reference/attention.hpp"
#include "support/allocation_count.hpp"
#include "support/isas.hpp"

namespace oscar::test {
namespace {

// A transformed query is rounded to int8. These problems are harder than a model: two or three keys decide most rows,
// and their logits are off by up to .02. Worst row of all cases 8.7e-3, worst average of a case 3.9e-3, of most cases
// 1e-3.
constexpr double kPackedTolerance = 1.5e-2;
constexpr double kPackedAverage = 5e-3;
// Whether a page's weights get one digit or two depends on the weight gathered before it in its split: at most .01 / 64
// of the row's weight a page (attention_kernels.hpp), which is more of a row whose values cancel. Measured up
// to 2.1e-4.
constexpr double kSplitTolerance = 1e-3;
constexpr double kLseTolerance = 3e-2;  // absolute, from the same rounding; up to .021
// 16-bit rows only: sums of a few hundred floats.
constexpr double kExactTolerance = 2e-5;
// Vector tables against scalar: float sums in another order; where a weight p * step lies on the edge of its 16-bit
// rounding, one unit of 2^-16 of the page's largest, which codes of up to 3 on a few tokens turn into 1e-4.
constexpr double kIsaTolerance = 2e-4;

std::vector<Isa> other_isas() {
  std::vector<Isa> isas = isas_to_test();
  isas.erase(isas.begin());
  return isas;
}

void expect_matches_reference(Problem& problem, double tolerance, const std::string& what) {
  problem.run(Isa::kScalar);
  const reference::AttentionResult expected = reference::attend(problem.shape, problem.layer, problem.params);
  const RowErrors error = row_errors(problem.out, expected.out, problem.shape.head_dim);
  EXPECT_LE(error.worst, tolerance) << what << ", " << error.where;
  EXPECT_LE(error.average, std::min(tolerance, kPackedAverage)) << what;
  for (std::size_t row = 0; row < expected.lse.size(); ++row) {
    if (std::isinf(expected.lse[row])) {
      EXPECT_EQ(problem.lse[row], expected.lse[row]) << what << ", row " << row;
    } else {
      EXPECT_NEAR(problem.lse[row], expected.lse[row], kLseTolerance) << what << ", row " << row;
    }
  }
  const std::vector<float> scalar = problem.out, scalar_lse = problem.lse;
  for (const Isa isa : other_isas()) {
    problem.run(isa);
    const RowErrors difference = row_errors(problem.out, scalar, problem.shape.head_dim);
    EXPECT_LE(difference.worst, kIsaTolerance) << isa_name(isa) << ", " << what << ", " << difference.where;
    for (std::size_t row = 0; row < scalar_lse.size(); ++row) {
      if (std::isinf(scalar_lse[row])) {
        EXPECT_EQ(problem.lse[row], scalar_lse[row]) << isa_name(isa) << ", " << what << ", row " << row;
      } else {
        EXPECT_NEAR(problem.lse[row], scalar_lse[row], kIsaTolerance)
            << isa_name(isa) << ", " << what << ", row " << row;
      }
    }
  }
}

TEST(Attend, EveryHeadSizeMatchesTheReferenceOverTheDequantisedCache) {
  for (int dim = 16; dim <= 256; dim += 16) {
    Problem problem({.shape = {1, 450, 4, 2, dim}});
    expect_matches_reference(problem, kPackedTolerance, "head_dim " + std::to_string(dim));
  }
}

TEST(Attend, EveryGroupSizeMatchesTheReference) {
  for (const int group : {1, 2, 3, 4, 6, 7, 8, 16}) {
    Problem problem({.shape = {2, 450, 2 * group, 2, 64}});
    expect_matches_reference(problem, kPackedTolerance, "group " + std::to_string(group));
  }
}

TEST(Attend, BothParameterFormatsAndWindowTypesMatchTheReference) {
  for (const ParameterFormat format : {ParameterFormat::kLog8, ParameterFormat::kFloatPair}) {
    for (const WindowDtype dtype : {WindowDtype::kBf16, WindowDtype::kF16}) {
      Problem problem({.shape = {3, 500, 6, 2, 64}, .format = format, .dtype = dtype});
      expect_matches_reference(problem, kPackedTolerance,
                               std::string(format == ParameterFormat::kLog8 ? "log8" : "pair") +
                                   (dtype == WindowDtype::kF16 ? " f16" : " bf16"));
    }
  }
}

TEST(Attend, RaggedLengthsMatchTheReference) {
  for (const int tokens : {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 321}) {
    for (const bool spans : {true, false}) {
      Problem problem({.shape = {1, tokens, 6, 2, 64}});
      if (!spans) problem.set_spans({});
      expect_matches_reference(problem, kPackedTolerance,
                               std::to_string(tokens) + (spans ? " tokens" : " packed tokens"));
    }
  }
}

TEST(Attend, ManyQueriesMatchTheReference) {
  for (const int queries : {2, 31, 65}) {
    Problem problem({.shape = {queries, 400, 6, 2, 64}});
    problem.params.sink = 4;
    problem.params.recent = 64;
    problem.set_spans({problem.span(0, 400)});
    expect_matches_reference(problem, kPackedTolerance, std::to_string(queries) + " queries");
  }
}

TEST(Attend, SoftCapWindowAndBitmaskMatchTheReference) {
  Problem capped({.shape = {3, 500, 6, 2, 64}});
  capped.params.soft_cap = 5;
  expect_matches_reference(capped, kPackedTolerance, "soft cap");

  Problem window({.shape = {5, 500, 6, 2, 64}});
  window.params.sliding_window = 100;
  expect_matches_reference(window, kPackedTolerance, "sliding window");

  Problem masked({.shape = {5, 500, 6, 2, 64}, .random_visible = true});
  expect_matches_reference(masked, kPackedTolerance, "bitmask");
}

TEST(Attend, PositionsNeedNotFollowTheTokenOrder) {
  for (const int first : {0, 37, 131072 - 600}) {
    Problem moved({.shape = {3, 500, 6, 2, 64}, .first_position = first});
    expect_matches_reference(moved, kPackedTolerance, "first position " + std::to_string(first));
  }
  Problem shuffled({.shape = {3, 500, 6, 2, 64}, .shuffle_positions = true});
  expect_matches_reference(shuffled, kPackedTolerance, "shuffled positions");
}

TEST(Attend, PartialRotaryNoRopeAndNoPageMeanMatchTheReference) {
  Problem partial({.shape = {1, 500, 6, 2, 96}, .rotary_dim = 32});
  expect_matches_reference(partial, kPackedTolerance, "rotary_dim 32 of 96");
  Problem unrotated({.shape = {1, 500, 6, 2, 64}, .rope_order = RopeOrder::kNone});
  expect_matches_reference(unrotated, kPackedTolerance, "no RoPE");
  Problem without({.shape = {1, 500, 6, 2, 64}, .page_mean = false});
  expect_matches_reference(without, kPackedTolerance, "no page mean");
}

TEST(Attend, ExactRowsAloneAreOrdinaryAttention) {
  for (const int dim : {16, 64, 80, 128, 256}) {
    Problem problem({.shape = {40, 300, 6, 2, dim}, .dtype = WindowDtype::kF16});
    problem.params.exact_all = true;
    problem.set_spans({problem.span(0, 170), problem.span(170, 130)});
    expect_matches_reference(problem, kExactTolerance, "exact, head_dim " + std::to_string(dim));
  }
}

TEST(Attend, AlwaysSpansAreReadExactlyAtAnyDistance) {
  Problem problem({.shape = {4, 300, 6, 2, 64}});
  problem.params.sink = 0;
  problem.params.recent = 1;
  problem.set_spans({problem.span(30, 50, true), problem.span(100, 200, true)});
  expect_matches_reference(problem, kPackedTolerance, "always spans");
}

TEST(Attend, AFullyMaskedRowIsZeroWithLseMinusInfinity) {
  Problem problem({.shape = {2, 200, 6, 2, 64}, .random_visible = true});
  std::fill_n(problem.visible.begin(), problem.params.visible_stride, 0);
  for (const Isa isa : isas_to_test()) {
    problem.run(isa);
    for (int c = 0; c < 6 * 64; ++c) ASSERT_EQ(problem.out[static_cast<std::size_t>(c)], 0) << isa_name(isa);
    for (std::size_t h = 0; h < 6; ++h) ASSERT_EQ(problem.lse[h], -std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isfinite(problem.lse[6])) << isa_name(isa);
  }
}

TEST(Attend, BytesThatNoQueryMayReadDoNotLeak) {
  for (const ParameterFormat format : {ParameterFormat::kLog8, ParameterFormat::kFloatPair}) {
    for (const bool random_visible : {false, true}) {
      Problem problem({.shape = {3, 500, 6, 2, 80}, .format = format, .random_visible = random_visible});
      problem.set_spans({problem.span(0, 500)});
      for (const Isa isa : isas_to_test()) {
        Problem clean({.shape = {3, 500, 6, 2, 80}, .format = format, .random_visible = random_visible});
        clean.set_spans({clean.span(0, 500)});
        clean.run(isa);
        clean.poison();
        const std::vector<float> expected = clean.out, expected_lse = clean.lse;
        clean.run(isa);
        EXPECT_EQ(clean.out, expected) << isa_name(isa);
        EXPECT_EQ(clean.lse, expected_lse) << isa_name(isa);
      }
    }
  }
}

TEST(Attend, SplitsAndThreadsChangeTheSumOrderOnly) {
  for (const int queries : {1, 50}) {
    Problem problem({.shape = {queries, 3000, 6, 2, 64}});
    for (const Isa isa : isas_to_test()) {
      problem.run(isa);
      const std::vector<float> expected = problem.out;
      for (const int threads : {2, 3, 8}) {
        problem.run(isa, threads);
        const RowErrors error = row_errors(problem.out, expected, 64);
        EXPECT_LE(error.worst, kSplitTolerance) << threads << " threads, " << isa_name(isa) << ", " << error.where;
      }
    }
  }
}

TEST(Attend, LongContextsSplitIntoPiecesOfManyPages) {
  const AttentionPlan alone = plan_attention({1, 16384, 14, 2, 64}, 1, Isa::kScalar);
  EXPECT_EQ(alone.num_splits, 1);
  const AttentionPlan many = plan_attention({1, 16384, 14, 2, 64}, 16, Isa::kScalar);
  EXPECT_GE(many.num_splits * 2, 16);
  EXPECT_GE(many.pages_per_split * many.num_splits, 256);
  const AttentionPlan prefill = plan_attention({8192, 8192, 14, 2, 64}, 16, Isa::kScalar);
  EXPECT_EQ(prefill.num_splits, 1);
  EXPECT_LT(prefill.workspace_bytes, std::size_t{16} << 20);
}

TEST(Attend, AllocatesNothing) {
  for (const int queries : {1, 40}) {
    Problem problem({.shape = {queries, 3000, 6, 2, 64}});
    const auto pool = make_thread_pool(3);
    const AttentionPlan plan = plan_attention(problem.shape, 3, Isa::kScalar);
    struct alignas(64) Line {
      std::uint8_t bytes[64];
    };
    std::vector<Line> workspace(plan.workspace_bytes / sizeof(Line));
    attend(plan, problem.layer, problem.params, workspace.data(),
           *pool);  // the first call also makes the table of steps
    const long before = num_allocations();
    attend(plan, problem.layer, problem.params, workspace.data(), *pool);
    EXPECT_EQ(num_allocations(), before) << queries << " queries";
  }
}

TEST(Attend, NoQueriesAreNoWork) {
  Problem problem({.shape = {0, 100, 6, 2, 64}});
  problem.run(Isa::kScalar);
  EXPECT_TRUE(problem.out.empty());
}

}  // namespace
}  // namespace oscar::test
