#pragma once
// A random layer, its pages, 16-bit rows and queries, for the tests of stage "attention". Any bytes are valid codes, so
// pages are filled with random ones; parameters are drawn so that logits and values have the size they have in a model.

#include <cstdint>
#include <oscar/attention.hpp>
#include <random>
#include <string>
#include <vector>

namespace oscar::test {

struct ProblemOptions {
  AttentionShape shape{.num_queries = 1, .num_tokens = 300, .num_qo_heads = 6, .num_kv_heads = 2, .head_dim = 64};
  ParameterFormat format = ParameterFormat::kLog8;
  WindowDtype dtype = WindowDtype::kBf16;
  RopeOrder rope_order = RopeOrder::kHalves;
  int rotary_dim = -1;  // -1: head_dim
  bool page_mean = true;
  std::int32_t first_position = 0;  // of token 0
  bool shuffle_positions = false;
  bool random_visible = false;  // bitmask in place of causal
  double key_offset = 6;        // spread of the keys' common offset, in steps: Qwen's is several
  unsigned seed = 1;
};

// Queries are the last num_queries tokens. Spans cover the sink, the recent window and nothing else.
struct Problem {
  explicit Problem(const ProblemOptions& options);
  Problem(const Problem&) = delete;

  AttentionShape shape;
  LayerRotation rotation;
  PagedLayer layer;
  AttentionParams params;
  std::vector<std::uint8_t> pages;
  std::vector<std::int32_t> block_table, key_positions, q_positions;
  std::vector<std::uint16_t> rows_k, rows_v;  // [num_tokens, num_kv_heads, head_dim]
  std::vector<ExactSpan> spans;
  std::vector<std::uint64_t> visible;
  std::vector<float> q, out, lse;

  void set_spans(std::vector<ExactSpan> new_spans);
  ExactSpan span(int first_token, int num_tokens, bool always = false) const;
  // Overwrites every free page, slot and 16-bit row with NaN parameters and 0xFF codes: those no query may read.
  void poison();

  // Runs attend() and leaves the result in out and lse, which are filled with NaN first.
  void run(Isa isa, int num_threads = 1);

 private:
  std::mt19937 random_;
  void make_rotation(const ProblemOptions& options);
  void make_pages(const ProblemOptions& options);
};

// |actual - expected| of a row over the row's largest |expected|.
struct RowErrors {
  double worst = 0;    // largest error of the worst row; infinite where a NaN is
  double average = 0;  // largest error of a row, averaged over rows
  std::string where;   // row, channel and both values of the worst
};
template <typename Expected>
RowErrors row_errors(const std::vector<float>& actual, const std::vector<Expected>& expected, int head_dim);

}  // namespace oscar::test
