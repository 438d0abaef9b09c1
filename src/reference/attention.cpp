#include "reference/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "reference/codec.hpp"
#include "reference/page.hpp"

namespace oscar::reference {
namespace {

const ExactSpan* span_of(const AttentionParams& params, int token) {
  for (int i = 0; i < params.num_spans; ++i) {
    const ExactSpan& span = params.spans[i];
    if (token >= span.first_token && token < span.first_token + span.num_tokens) return &span;
  }
  return nullptr;
}

double from_16_bits(std::uint16_t bits, WindowDtype dtype) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int fraction_bits = dtype == WindowDtype::kF16 ? 10 : 7;
  const int exponent_mask = dtype == WindowDtype::kF16 ? 31 : 255;
  const int bias = exponent_mask / 2;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = bits >> fraction_bits & exponent_mask;
  if (exponent == exponent_mask) return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  const int mantissa = exponent == 0 ? fraction : fraction + (1 << fraction_bits);
  return sign * std::ldexp(mantissa, std::max(exponent, 1) - bias - fraction_bits);
}

std::vector<double> exact_row(const ExactSpan& span, const std::uint16_t* base, int kv_head, int token, int head_dim,
                              WindowDtype dtype) {
  const std::uint16_t* row = base + (token - span.first_token) * span.token_stride + kv_head * span.head_stride;
  std::vector<double> values(static_cast<std::size_t>(head_dim));
  for (std::size_t c = 0; c < values.size(); ++c) values[c] = from_16_bits(row[c], dtype);
  return values;
}

// y^ of one token, transformed space.
std::vector<double> packed_row(const std::uint8_t* half, const SideRotation& side, const KvSpec& spec, int slot,
                               CodePosition (*position)(int, int, int)) {
  EncodedRow row;
  for (int c = 0; c < spec.head_dim; ++c) {
    row.codes.push_back(static_cast<std::uint8_t>(read_code(half, position(spec.head_dim, slot, c))));
  }
  const std::uint8_t* parameters = half + 16 * spec.head_dim;
  if (spec.parameter_format == ParameterFormat::kLog8) {
    row.scale_code = static_cast<std::int8_t>(parameters[slot]);
    row.offset_code = static_cast<std::int8_t>(parameters[kPageTokens + slot]);
  } else {
    float scale, zero;
    std::memcpy(&scale, parameters + 4 * slot, sizeof scale);
    std::memcpy(&zero, parameters + 4 * (kPageTokens + slot), sizeof zero);
    row.scale = scale;
    row.zero = zero;
  }
  return decode(side, spec.parameter_format, row);
}

}  // namespace

KeySource key_source(const AttentionParams& params, int query, int token) {
  const std::int64_t at = params.key_positions[token], from = params.q_positions[query];
  bool visible;
  if (params.visible != nullptr) {
    visible = (params.visible[query * params.visible_stride + token / 64] >> (token % 64) & 1) != 0;
  } else {
    visible = at <= from && (params.sliding_window == 0 || at > from - params.sliding_window);
  }
  if (!visible) return KeySource::kInvisible;
  const ExactSpan* span = span_of(params, token);
  if (span == nullptr) return KeySource::kPacked;
  const bool exact = span->always || params.exact_all || at < params.sink || at > from - params.recent;
  return exact ? KeySource::kExact : KeySource::kPacked;
}

std::vector<double> packed_key(const PagedLayer& layer, int kv_head, int token, int position) {
  const HeadRotation& head = layer.rotation->heads[static_cast<std::size_t>(kv_head)];
  const std::uint8_t* half = layer.half(layer.key, token / kPageTokens, kv_head);
  std::vector<double> key = inverse_transform(
      head.key.inverse_transposed, packed_row(half, head.key, layer.spec, token % kPageTokens, key_code_position));
  if (head.page_mean.empty()) return key;
  const std::vector<double>& mu = head.page_mean;
  const RopeSpec& rope = layer.rotation->rope;
  const std::size_t pairs = rope.order == RopeOrder::kNone ? 0 : rope.inv_freq.size();
  const double block_start = std::floor(position / 64.0) * 64;
  for (std::size_t p = 0; p < pairs; ++p) {
    const double c = std::cos(rope.inv_freq[p] * block_start), s = std::sin(rope.inv_freq[p] * block_start);
    key[p] += mu[p] * c - mu[p + pairs] * s;
    key[p + pairs] += mu[p + pairs] * c + mu[p] * s;
  }
  for (std::size_t c = 2 * pairs; c < key.size(); ++c) key[c] += mu[c];
  return key;
}

std::vector<double> packed_value(const PagedLayer& layer, int kv_head, int token) {
  const SideRotation& side = layer.rotation->heads[static_cast<std::size_t>(kv_head)].value;
  const std::uint8_t* half = layer.half(layer.value, token / kPageTokens, kv_head);
  return inverse_transform(side.inverse_transposed,
                           packed_row(half, side, layer.spec, token % kPageTokens, value_code_position));
}

AttentionResult attend(const AttentionShape& shape, const PagedLayer& layer, const AttentionParams& params) {
  const auto num_queries = static_cast<std::size_t>(shape.num_queries);
  const auto num_heads = static_cast<std::size_t>(shape.num_qo_heads), dim = static_cast<std::size_t>(shape.head_dim);
  AttentionResult result{std::vector<double>(num_queries * num_heads * dim),
                         std::vector<double>(num_queries * num_heads, -std::numeric_limits<double>::infinity())};
  const int group = shape.num_qo_heads / shape.num_kv_heads;
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    // Every row that some query reads, rebuilt once: [token][source].
    using Row = std::vector<double>;
    std::vector<Row> keys[2], values[2];
    for (auto* rows : {keys, values}) {
      for (int source = 0; source < 2; ++source) rows[source].resize(static_cast<std::size_t>(shape.num_tokens));
    }
    const auto load = [&](std::size_t token, bool exact) {
      if (!keys[exact][token].empty()) return;
      const int t = static_cast<int>(token);
      if (exact) {
        const ExactSpan& span = *span_of(params, t);
        keys[1][token] = exact_row(span, span.k, kv_head, t, shape.head_dim, layer.spec.window_dtype);
        values[1][token] = exact_row(span, span.v, kv_head, t, shape.head_dim, layer.spec.window_dtype);
      } else {
        keys[0][token] = packed_key(layer, kv_head, t, params.key_positions[t]);
        values[0][token] = packed_value(layer, kv_head, t);
      }
    };
    for (std::size_t i = 0; i < num_queries; ++i) {
      for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const float* q = params.q + static_cast<std::int64_t>(i) * params.q_token_stride + h * params.q_head_stride;
        const std::size_t row = i * num_heads + static_cast<std::size_t>(h);
        std::vector<double> logits;
        std::vector<const double*> read;
        for (int token = 0; token < shape.num_tokens; ++token) {
          const KeySource source = key_source(params, static_cast<int>(i), token);
          if (source == KeySource::kInvisible) continue;
          const bool exact = source == KeySource::kExact;
          const auto at = static_cast<std::size_t>(token);
          load(at, exact);
          double logit = 0;
          for (std::size_t c = 0; c < dim; ++c) logit += q[c] * keys[exact][at][c];
          logit *= params.scale;
          if (params.soft_cap > 0) logit = params.soft_cap * std::tanh(logit / params.soft_cap);
          logits.push_back(logit);
          read.push_back(values[exact][at].data());
        }
        if (logits.empty()) continue;
        const double max = *std::max_element(logits.begin(), logits.end());
        double sum = 0;
        for (const double logit : logits) sum += std::exp(logit - max);
        for (std::size_t j = 0; j < logits.size(); ++j) {
          const double weight = std::exp(logits[j] - max) / sum;
          for (std::size_t c = 0; c < dim; ++c) result.out[row * dim + c] += weight * read[j][c];
        }
        result.lse[row] = max + std::log(sum);
      }
    }
  }
  return result;
}

}  // namespace oscar::reference
