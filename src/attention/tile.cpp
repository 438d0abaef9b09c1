#include "attention/tile.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <new>
#include <oscar/codec.hpp>

namespace oscar::attention {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Step of kLog8 scale code i at i + 128, through the codec's own decode.
const float* log_steps() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> steps{};
    const SideRotation side;
    for (int code = -128; code < 128; ++code) {
      const RowParameters parameters{.scale_code = static_cast<std::int8_t>(code)};
      steps[static_cast<std::size_t>(code + 128)] = affine(side, ParameterFormat::kLog8, parameters).step;
    }
    return steps;
  }();
  return table.data();
}

// Brings a page half into the cache while the page before it is worked on: a page is too short for the hardware to
// guess.
void prefetch([[maybe_unused]] const std::uint8_t* half, [[maybe_unused]] int num_bytes) {
#if defined(__GNUC__)
  for (int byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(half + byte);
#endif
}

}  // namespace

Tile::Tile(const Call& call, std::byte* scratch, int kv_head, int first_query, int num_queries)
    : call_(call),
      layout_(call.plan.shape, call.plan.queries_per_tile),
      scratch_(scratch),
      kv_head_(kv_head),
      first_query_(first_query),
      num_queries_(num_queries),
      group_(call.plan.shape.num_qo_heads / call.plan.shape.num_kv_heads),
      dim_(call.plan.shape.head_dim),
      head_(call.layer.rotation->heads[static_cast<std::size_t>(kv_head)]),
      cursor_(*call.layer.rotation, head_, dim_) {
  load_queries();
}

void Tile::load_queries() {
  const AttentionParams& params = call_.params;
  for (int row = 0; row < num_rows(); ++row) {
    const int head = kv_head_ * group_ + row % group_;
    const float* source =
        params.q + (first_query_ + row / group_) * params.q_token_stride + head * params.q_head_stride;
    std::copy_n(source, dim_, query(row));
  }
}

void Tile::transform_queries() {
  if (transformed_) return;
  transformed_ = true;
  alignas(64) float transformed[cpu::kMaxDim];
  for (int row = 0; row < num_rows(); ++row) {
    transform_rows(head_.key.inverse_transposed.data(), dim_, query(row), 1, transformed, call_.plan.isa);
    cpu::KeyRow* fresh = new (&key_row(row)) cpu::KeyRow{.operand = operand(row), .terms = {}};
    call_.kernels.arrange_query(transformed, dim_, call_.params.scale, operand(row), &fresh->terms);
  }
}

void Tile::run(int begin_page, int end_page, std::byte* states) {
  states_ = states;
  for (int row = 0; row < num_rows(); ++row) {
    RowState* fresh =
        new (&state(row)) RowState{.packed = {.max = kNothing}, .exact = {.max = kNothing}, .value_sums = {}};
    std::fill_n(fresh->packed_sum(), 2 * dim_, 0.0f);
  }
  int span_cursor = 0;
  for (int page = begin_page; page < end_page; ++page) {
    const PageSpan span = describe_page(call_.params, call_.plan.shape.num_tokens, page, &span_cursor);
    KeyMasks any;
    for (int query = 0; query < num_queries_; ++query) {
      masks(query) = key_masks(call_.params, span, first_query_ + query);
      any.packed |= masks(query).packed;
      any.exact |= masks(query).exact;
    }
    if (any.packed != 0) {
      if (page + 1 < end_page) prefetch_page(page + 1);
      packed_page(page, span, any.packed);
    }
    if (any.exact != 0) exact_page(span, any.exact);
  }
}

void Tile::prefetch_page(int page) const {
  const int bytes = static_cast<int>(call_.layer.spec.half_bytes());
  prefetch(call_.layer.half(call_.layer.key, page, kv_head_), bytes);
  prefetch(call_.layer.half(call_.layer.value, page, kv_head_), bytes);
}

cpu::ParameterSource Tile::parameter_source(const std::uint8_t* half, const SideRotation& side) const {
  return {.stored = half + dim_ * kPageTokens / 4,
          .log8 = call_.layer.spec.parameter_format == ParameterFormat::kLog8,
          .log_steps = log_steps(),
          .offset_center = side.offset_center,
          .offset_unit = side.offset_spread / 20.0f};
}

// The page-mean term of every row: one dot product where all tokens lie in one block of positions, else one a block.
void Tile::mean_offsets(const PageSpan& page, std::uint64_t tokens) {
  if (!cursor_.has_mean()) return;
  alignas(64) float mean[cpu::kMaxDim];
  const auto block_of = [&](int token) { return page.positions[token] >> 6; };
  const bool one_block = page.min_position >> 6 == page.max_position >> 6;
  for (std::uint64_t left = tokens; left != 0;) {
    const int first = std::countr_zero(left);
    std::uint64_t same = left;
    if (!one_block) {
      for (int t = first; t < page.count; ++t) {
        if (block_of(t) != block_of(first)) same &= ~(std::uint64_t{1} << t);
      }
    }
    cursor_.mean(block_of(first), mean);
    for (int row = 0; row < num_rows(); ++row) {
      if (masks(row / group_).packed == 0) continue;
      const float term = call_.params.scale * call_.kernels.dot(query(row), mean, dim_);
      key_row(row).offset = term;
      key_row(row).offsets = one_block ? nullptr : offsets(row);
      if (one_block) continue;
      for (std::uint64_t rest = same; rest != 0; rest &= rest - 1) offsets(row)[std::countr_zero(rest)] = term;
    }
    left &= ~same;
  }
}

void Tile::packed_page(int page, const PageSpan& span, std::uint64_t tokens) {
  const cpu::AttentionKernels& kernels = call_.kernels;
  transform_queries();
  const std::uint8_t* key_half = call_.layer.half(call_.layer.key, page, kv_head_);
  const std::uint8_t* value_half = call_.layer.half(call_.layer.value, page, kv_head_);
  alignas(64) float key_step[kPageTokens], key_middle[kPageTokens], value_step[kPageTokens], value_middle[kPageTokens];
  kernels.decode_parameters(parameter_source(key_half, head_.key), tokens, key_step, key_middle);
  kernels.decode_parameters(parameter_source(value_half, head_.value), tokens, value_step, value_middle);
  mean_offsets(span, tokens);

  alignas(64) float logits[cpu::kMaxPackedRows * kPageTokens];
  cpu::KeyRow keys[cpu::kMaxPackedRows];
  cpu::ValueRow values[cpu::kMaxPackedRows];
  int rows[cpu::kMaxPackedRows];
  int filled = 0;
  for (int row = 0; row < num_rows(); ++row) {
    if (masks(row / group_).packed != 0) {
      keys[filled] = key_row(row);
      rows[filled++] = row;
    }
    if (filled == 0 || (filled < cpu::kMaxPackedRows && row + 1 < num_rows())) continue;
    kernels.key_logits(key_half, dim_, keys, filled, key_step, key_middle, logits);
    for (int i = 0; i < filled; ++i) {
      RowState& gathered = state(rows[i]);
      float* row_logits = logits + i * kPageTokens;
      const float rescale =
          kernels.softmax_page(masks(rows[i] / group_).packed, call_.params.soft_cap, row_logits, &gathered.packed);
      values[i] = {.weights = row_logits,
                   .rescale = rescale,
                   .accumulator = gathered.packed_sum(),
                   .sums = &gathered.value_sums};
    }
    kernels.add_values(value_half, dim_, values, filled, value_step, value_middle);
    filled = 0;
  }
}

void Tile::exact_page(const PageSpan& span, std::uint64_t tokens) {
  const cpu::AttentionKernels& kernels = call_.kernels;
  const bool f16 = call_.layer.spec.window_dtype == WindowDtype::kF16;
  const std::uint16_t *key_rows[kPageTokens], *value_rows[kPageTokens];
  exact_rows(call_.params, span, tokens, kv_head_, key_rows, value_rows);
  auto* key_tile = at<float>(layout_.key_tile_offset);
  auto* value_tile = at<float>(layout_.value_tile_offset);
  kernels.load_keys(key_rows, f16, dim_, key_tile);
  kernels.load_values(value_rows, f16, dim_, value_tile);
  const int num_keys = (static_cast<int>(std::bit_width(tokens)) + 15) / 16 * 16;

  alignas(64) float logits[cpu::kMaxExactRows * kPageTokens];
  int rows[cpu::kMaxExactRows];
  const float* queries[cpu::kMaxExactRows];
  float* sums[cpu::kMaxExactRows];
  float rescale[cpu::kMaxExactRows];
  int filled = 0;
  for (int row = 0; row < num_rows(); ++row) {
    if (masks(row / group_).exact != 0) {
      rows[filled] = row;
      queries[filled] = query(row);
      sums[filled] = state(row).exact_sum(dim_);
      ++filled;
    }
    if (filled == 0 || (filled < cpu::kMaxExactRows && row + 1 < num_rows())) continue;
    kernels.exact_logits(queries, filled, key_tile, dim_, num_keys, call_.params.scale, logits);
    for (int i = 0; i < filled; ++i) {
      rescale[i] = kernels.softmax_page(masks(rows[i] / group_).exact, call_.params.soft_cap, logits + i * kPageTokens,
                                        &state(rows[i]).exact);
    }
    kernels.exact_values(logits, rescale, filled, value_tile, dim_, num_keys, sums);
    filled = 0;
  }
}

void finish_row(const Call& call, int query, int qo_head, std::byte* states, int num_states, std::size_t stride) {
  const AttentionShape& shape = call.plan.shape;
  const AttentionParams& params = call.params;
  const int dim = shape.head_dim;
  float* out = params.out + query * params.out_token_stride + qo_head * params.out_head_stride;
  const auto state = [&](int i) -> RowState& {
    return *reinterpret_cast<RowState*>(states + static_cast<std::size_t>(i) * stride);
  };
  float max = kNothing;
  for (int i = 0; i < num_states; ++i) max = std::max({max, state(i).packed.max, state(i).exact.max});
  float* lse = params.lse == nullptr ? nullptr : params.lse + std::int64_t{query} * shape.num_qo_heads + qo_head;
  if (max == kNothing) {
    std::fill_n(out, dim, 0.0f);
    if (lse != nullptr) *lse = kNothing;
    return;
  }
  float packed[cpu::kMaxDim] = {}, exact[cpu::kMaxDim] = {};
  float sum = 0;
  bool any_packed = false;
  for (int i = 0; i < num_states; ++i) {
    RowState& part = state(i);
    if (part.packed.max != kNothing) {
      const float weight = std::exp(part.packed.max - max);
      sum += weight * part.packed.sum;
      for (int d = 0; d < dim; ++d) packed[d] += weight * (part.packed_sum()[d] + part.value_sums.middle);
      any_packed = true;
    }
    if (part.exact.max != kNothing) {
      const float weight = std::exp(part.exact.max - max);
      sum += weight * part.exact.sum;
      for (int d = 0; d < dim; ++d) exact[d] += weight * part.exact_sum(dim)[d];
    }
  }
  if (any_packed) {
    const int kv_head = qo_head / (shape.num_qo_heads / shape.num_kv_heads);
    const SideRotation& side = call.layer.rotation->heads[static_cast<std::size_t>(kv_head)].value;
    float original[cpu::kMaxDim];
    inverse_transform_rows(side.inverse_transposed.data(), dim, packed, 1, original, call.plan.isa);
    for (int d = 0; d < dim; ++d) exact[d] += original[d];
  }
  for (int d = 0; d < dim; ++d) out[d] = exact[d] / sum;
  if (lse != nullptr) *lse = max + std::log(sum);
}

}  // namespace oscar::attention
