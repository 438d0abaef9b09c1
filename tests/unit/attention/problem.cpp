#include "problem.hpp"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "reference/attention.hpp"

namespace oscar::test {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

std::vector<float> to_floats(const Matrix& m) {
  std::vector<float> values(static_cast<std::size_t>(m.size()));
  std::transform(m.data(), m.data() + m.size(), values.begin(), [](double v) { return static_cast<float>(v); });
  return values;
}

std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x8000) >> 16);
}

// Normal numbers only: test rows are of size 1.
std::uint16_t to_f16(float value) {
  int exponent;
  const float fraction = std::frexp(std::fabs(value), &exponent);  // [0.5, 1)
  if (value == 0 || exponent < -13) return 0;
  const int mantissa = static_cast<int>(std::lround(fraction * 2048)) - 1024;
  return static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) + ((exponent + 14) << 10) + mantissa);
}

}  // namespace

Problem::Problem(const ProblemOptions& options) : shape(options.shape), random_(options.seed) {
  std::normal_distribution<float> normal;
  const auto tokens = static_cast<std::size_t>(shape.num_tokens), queries = static_cast<std::size_t>(shape.num_queries);
  const auto dim = static_cast<std::size_t>(shape.head_dim), qo = static_cast<std::size_t>(shape.num_qo_heads);
  make_rotation(options);
  make_pages(options);

  key_positions.resize(tokens);
  std::iota(key_positions.begin(), key_positions.end(), options.first_position);
  if (options.shuffle_positions) std::shuffle(key_positions.begin(), key_positions.end(), random_);
  for (int i = 0; i < shape.num_queries; ++i) {
    q_positions.push_back(options.first_position + std::max(0, shape.num_tokens - shape.num_queries + i));
  }
  rows_k.resize(tokens * static_cast<std::size_t>(shape.num_kv_heads) * dim);
  rows_v.resize(rows_k.size());
  for (auto* rows : {&rows_k, &rows_v}) {
    for (std::uint16_t& value : *rows) {
      value = options.dtype == WindowDtype::kBf16 ? to_bf16(normal(random_)) : to_f16(normal(random_));
    }
  }
  q.resize(queries * qo * dim);
  for (float& value : q) value = normal(random_);
  out.resize(q.size());
  lse.resize(queries * qo);

  params.q = q.data();
  params.q_token_stride = params.out_token_stride = static_cast<std::int64_t>(qo * dim);
  params.q_head_stride = params.out_head_stride = static_cast<std::int64_t>(dim);
  params.q_positions = q_positions.data();
  params.key_positions = key_positions.data();
  params.scale = 1 / std::sqrt(static_cast<float>(dim));
  params.out = out.data();
  params.lse = lse.data();
  if (options.random_visible) {
    params.visible_stride = (shape.num_tokens + 63) / 64;
    visible.resize(queries * static_cast<std::size_t>(params.visible_stride));
    for (std::uint64_t& word : visible) word = std::uint64_t{random_()} << 32 | random_();
    params.visible = visible.data();
  }
  const int sink = std::min(params.sink, shape.num_tokens);
  const int recent = std::clamp(shape.num_tokens - sink, 0, params.recent);
  set_spans({span(0, sink), span(shape.num_tokens - recent, recent)});
}

void Problem::make_rotation(const ProblemOptions& options) {
  std::normal_distribution<double> normal;
  const int dim = shape.head_dim;
  const int rotary = options.rotary_dim < 0 ? dim : options.rotary_dim;
  rotation.rope.order = options.rope_order;
  if (options.rope_order != RopeOrder::kNone) {
    rotation.rope.rotary_dim = rotary;
    for (int p = 0; p < rotary / 2; ++p) rotation.rope.inv_freq.push_back(std::pow(1e6, -2.0 * p / rotary));
  }
  for (int h = 0; h < shape.num_kv_heads; ++h) {
    HeadRotation head;
    for (SideRotation* side : {&head.key, &head.value}) {
      // Orthogonal times uneven scales, as the balanced transform is.
      Matrix random = Matrix::NullaryExpr(dim, dim, [&] { return normal(random_); });
      Matrix a = Eigen::HouseholderQR<Matrix>(random).householderQ();
      for (int c = 0; c < dim; ++c) a.row(c) *= std::exp(0.3 * normal(random_));
      side->transform = to_floats(a);
      side->inverse_transposed = to_floats(a.inverse().transpose());
      side->offset_center = static_cast<float>(normal(random_));
      side->offset_spread = static_cast<float>(side == &head.key ? options.key_offset : 0.5);
    }
    if (options.page_mean) {
      for (int c = 0; c < dim; ++c) head.page_mean.push_back(2 * normal(random_));
    }
    rotation.heads.push_back(std::move(head));
  }
}

void Problem::make_pages(const ProblemOptions& options) {
  KvSpec spec{.num_kv_heads = shape.num_kv_heads,
              .head_dim = shape.head_dim,
              .parameter_format = options.format,
              .window_dtype = options.dtype};
  const int num_pages = (shape.num_tokens + 63) / 64, num_blocks = num_pages + 2;  // two blocks stay free
  const bool log8 = options.format == ParameterFormat::kLog8;
  const std::int64_t half = shape.head_dim * 16 + (log8 ? 128 : 512);
  const auto half_size = static_cast<std::size_t>(half);
  pages.resize(half_size * 2 * static_cast<std::size_t>(shape.num_kv_heads * num_blocks));
  for (std::uint8_t& byte : pages) byte = static_cast<std::uint8_t>(random_());
  std::normal_distribution<float> normal;
  for (std::size_t at = 0; at < pages.size(); at += half_size) {
    std::uint8_t* stored = pages.data() + at + 16 * shape.head_dim;
    const bool key = at / half_size % 2 == 0;
    for (int t = 0; t < kPageTokens; ++t) {
      const float scale_log = -8 + 4 * normal(random_);  // a scale of 2^(-8/16), give or take 2^(4/16)
      if (log8) {
        stored[t] = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::lround(scale_log)));
        stored[kPageTokens + t] = static_cast<std::uint8_t>(
            static_cast<std::int8_t>(std::clamp<long>(std::lround(20 * normal(random_)), -128, 127)));
      } else {
        const float scale = std::exp2(scale_log / 16);
        const float zero = 1.5f + static_cast<float>(key ? options.key_offset : 0.5) * normal(random_);
        std::memcpy(stored + 4 * t, &scale, sizeof scale);
        std::memcpy(stored + 4 * (kPageTokens + t), &zero, sizeof zero);
      }
    }
  }
  for (int p = 0; p < num_blocks; ++p) block_table.push_back(p);
  std::shuffle(block_table.begin(), block_table.end(), random_);
  layer.spec = spec;
  layer.rotation = &rotation;
  layer.key = {.base = pages.data(), .page_stride_bytes = half * 2 * shape.num_kv_heads, .head_stride_bytes = half * 2};
  layer.value = layer.key;
  layer.value.base += half;
  layer.block_table = block_table.data();
}

void Problem::set_spans(std::vector<ExactSpan> new_spans) {
  spans = std::move(new_spans);
  params.spans = spans.data();
  params.num_spans = static_cast<int>(spans.size());
}

ExactSpan Problem::span(int first_token, int num_tokens, bool always) const {
  const std::int64_t stride = std::int64_t{shape.num_kv_heads} * shape.head_dim;
  return {.first_token = first_token,
          .num_tokens = num_tokens,
          .k = rows_k.data() + first_token * stride,
          .v = rows_v.data() + first_token * stride,
          .token_stride = stride,
          .head_stride = shape.head_dim,
          .always = always};
}

void Problem::poison() {
  using reference::KeySource;
  const auto read_as = [&](int token, KeySource source) {
    for (int i = 0; i < shape.num_queries; ++i) {
      if (reference::key_source(params, i, token) == source) return true;
    }
    return false;
  };
  const int num_blocks = static_cast<int>(block_table.size());
  const bool log8 = layer.spec.parameter_format == ParameterFormat::kLog8;
  const int parameters = 16 * shape.head_dim;
  for (int slot = 0; slot < num_blocks * kPageTokens; ++slot) {
    if (slot < shape.num_tokens && read_as(slot, KeySource::kPacked)) continue;
    const int page = slot / kPageTokens, t = slot % kPageTokens;
    for (int h = 0; h < shape.num_kv_heads; ++h) {
      for (std::uint8_t* half : {layer.half(layer.key, page, h), layer.half(layer.value, page, h)}) {
        if (page * kPageTokens >= shape.num_tokens) std::fill_n(half, parameters, std::uint8_t{0xFF});
        const int width = log8 ? 1 : 4;  // 0xFFFFFFFF is a NaN
        std::fill_n(half + parameters + t * width, width, std::uint8_t{0xFF});
        std::fill_n(half + parameters + (kPageTokens + t) * width, width, std::uint8_t{0xFF});
      }
    }
  }
  const int row = shape.num_kv_heads * shape.head_dim;
  for (int token = 0; token < shape.num_tokens; ++token) {
    if (read_as(token, KeySource::kExact)) continue;
    std::fill_n(rows_k.data() + token * row, row, std::uint16_t{0xFFFF});  // NaN in BF16 and F16
    std::fill_n(rows_v.data() + token * row, row, std::uint16_t{0xFFFF});
  }
}

void Problem::run(Isa isa, int num_threads) {
  std::fill(out.begin(), out.end(), std::numeric_limits<float>::quiet_NaN());
  std::fill(lse.begin(), lse.end(), std::numeric_limits<float>::quiet_NaN());
  const AttentionPlan plan = plan_attention(shape, num_threads, isa);
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };
  std::vector<Line> workspace(plan.workspace_bytes / sizeof(Line));
  // It comes uninitialised: NaN.
  for (Line& line : workspace) std::fill_n(line.bytes, sizeof line.bytes, std::uint8_t{0xFF});
  const auto pool = make_thread_pool(num_threads);
  attend(plan, layer, params, workspace.data(), *pool);
}

template <typename Expected>
RowErrors row_errors(const std::vector<float>& actual, const std::vector<Expected>& expected, int head_dim) {
  RowErrors result;
  const auto dim = static_cast<std::size_t>(head_dim);
  const std::size_t num_rows = actual.size() / dim;
  for (std::size_t row = 0; row < num_rows; ++row) {
    double largest = 0, error = 0;
    std::size_t at = row * dim;
    for (std::size_t i = row * dim; i < (row + 1) * dim; ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(expected[i])));
      const double difference = std::fabs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
      if (difference <= error) continue;
      error = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
      at = i;
    }
    const double relative = error == 0 ? 0 : error / largest;
    result.average += relative / static_cast<double>(num_rows);
    if (relative <= result.worst) continue;
    result.worst = relative;
    result.where = "row " + std::to_string(row) + " channel " + std::to_string(at % dim) + ": " +
                   std::to_string(actual[at]) + " for " + std::to_string(expected[at]);
  }
  return result;
}
template RowErrors row_errors(const std::vector<float>&, const std::vector<float>&, int);
template RowErrors row_errors(const std::vector<float>&, const std::vector<double>&, int);

}  // namespace oscar::test
