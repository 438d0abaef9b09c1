#include "simulated_rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace oscar::ggml {
namespace {

constexpr int kChunkTokens = 64;  // of one task, widened to whole groups

constexpr int round_down(int value, int unit) { return value / unit * unit; }
constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Status SimulatedRows::update(LayerCache& layer, const Simulation& simulation, int first, int last,
                             const std::int32_t* positions, Executor& executor) {
  for (int cell = 0; cell < last; ++cell) {
    if (positions[cell] == cell) continue;
    return make_error(ErrorCode::kUnsupported, "a simulated cache serves one sequence from position 0 on, but cell " +
                                                   std::to_string(cell) + " holds position " +
                                                   std::to_string(positions[cell]));
  }
  std::vector<ExactSpan> spans;
  layer.stream(0).windows.spans(last, spans);
  if (spans.size() != 1 || spans[0].first_token != 0 || spans[0].num_tokens != last) {
    return make_error(ErrorCode::kInvalidArgument, "layer " + std::to_string(layer.index()) +
                                                       ": a simulated cache needs every row of its " +
                                                       std::to_string(last) + " tokens; configure keep_exact_rows");
  }
  const auto width = static_cast<std::size_t>(layer.layout().row_width());
  const std::size_t capacity = static_cast<std::size_t>(layer.layout().num_cells) * width;
  k_.resize(capacity);
  v_.resize(capacity);
  const int chunk = round_up(kChunkTokens, simulation.group_tokens);
  const int begin = round_down(first, simulation.group_tokens);
  const int end = std::min(last, round_up(last, simulation.group_tokens));
  executor.parallel_for((end - begin + chunk - 1) / chunk, [&](int task) {
    const int from = begin + task * chunk, count = std::min(chunk, end - from);
    const std::size_t size = static_cast<std::size_t>(count) * width, offset = static_cast<std::size_t>(from) * width;
    std::vector<float> k(size), v(size);
    const auto numbers = static_cast<std::int64_t>(size);
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(spans[0].k + offset), k.data(), numbers);
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(spans[0].v + offset), v.data(), numbers);
    simulation.read_back(layer.index(), from, count, k.data(), v.data());
    ggml_fp32_to_fp16_row(k.data(), reinterpret_cast<ggml_fp16_t*>(k_.data() + offset), numbers);
    ggml_fp32_to_fp16_row(v.data(), reinterpret_cast<ggml_fp16_t*>(v_.data() + offset), numbers);
  });
  return {};
}

ExactSpan SimulatedRows::span(const LayerCache& layer, int num_tokens) const {
  return {.first_token = 0,
          .num_tokens = num_tokens,
          .k = k_.data(),
          .v = v_.data(),
          .token_stride = layer.layout().row_width(),
          .head_stride = layer.layout().head_dim,
          .always = true};
}

void SplitVisibility::split(const AttentionParams& params, int num_queries, int num_tokens) {
  const std::int64_t stride = params.visible_stride;
  exact.assign(params.visible, params.visible + num_queries * stride);
  simulated.assign(exact.size(), 0);
  for (int i = 0; i < num_queries; ++i) {
    const std::int64_t oldest = std::int64_t{params.q_positions[i]} - params.recent;  // the last one outside the window
    for (int first = 0; first < num_tokens; first += 64) {
      const int count = std::min(64, num_tokens - first);
      std::uint64_t outside = 0;
      for (int t = 0; t < count; ++t) {
        const std::int32_t position = params.key_positions[first + t];
        outside |= static_cast<std::uint64_t>(position >= params.sink && position <= oldest) << t;
      }
      std::uint64_t& seen = exact[static_cast<std::size_t>(i * stride + first / 64)];
      simulated[static_cast<std::size_t>(i * stride + first / 64)] = seen & outside;
      seen &= ~outside;
    }
  }
}

void SimulatedAttention::attend(const AttentionPlan& plan, const PagedLayer& layer, const AttentionParams& params,
                                const SplitVisibility& split, const ExactSpan& simulated, void* workspace,
                                Executor& executor) {
  const AttentionShape& shape = plan.shape;
  const auto rows = static_cast<std::size_t>(shape.num_queries) * static_cast<std::size_t>(shape.num_qo_heads);
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  out_.resize(rows * dim);
  for (std::vector<float>& lse : lse_) lse.resize(rows);

  AttentionParams pass = params;
  pass.exact_all = true;
  pass.visible = split.exact.data();
  pass.lse = lse_[0].data();
  oscar::attend(plan, layer, pass, workspace, executor);
  pass.visible = split.simulated.data();
  pass.spans = &simulated;
  pass.num_spans = 1;
  pass.lse = lse_[1].data();
  pass.out = out_.data();
  pass.out_head_stride = shape.head_dim;
  pass.out_token_stride = pass.out_head_stride * shape.num_qo_heads;
  oscar::attend(plan, layer, pass, workspace, executor);

  for (std::size_t row = 0; row < rows; ++row) {
    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    const float exact = lse_[0][row], other = lse_[1][row];
    if (other == kNothing) continue;
    const float share = exact == kNothing ? 1.0f : 1.0f / (1.0f + std::exp(exact - other));  // of the simulated part
    const auto heads = static_cast<std::size_t>(shape.num_qo_heads);
    float* out = params.out + static_cast<std::int64_t>(row / heads) * params.out_token_stride +
                 static_cast<std::int64_t>(row % heads) * params.out_head_stride;
    for (std::size_t d = 0; d < dim; ++d) out[d] += share * (out_[row * dim + d] - out[d]);
  }
}

}  // namespace oscar::ggml
