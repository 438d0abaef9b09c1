#include <oscar/cache.hpp>

#include <algorithm>

#include "codec/codec_kernels.hpp"

namespace oscar {
namespace {

constexpr std::int32_t kEmpty = -1;

// Every instruction set rounds alike, so the fastest is taken without asking.
const cpu::CodecKernels& fastest_kernels() {
  static const cpu::CodecKernels& kernels = codec_kernels(supported_isas().back());
  return kernels;
}

// One span of one token, to be extended or appended.
bool extends(const ExactSpan& span, const ExactSpan& next) {
  return span.first_token + span.num_tokens == next.first_token &&
         span.k + span.num_tokens * span.token_stride == next.k;
}

void append(std::vector<ExactSpan>& spans, const ExactSpan& next) {
  if (!spans.empty() && extends(spans.back(), next)) {
    spans.back().num_tokens += next.num_tokens;
  } else {
    spans.push_back(next);
  }
}

}  // namespace

std::size_t WindowRows::side_bytes(const KvSpec& spec, int ring_capacity) {
  return (static_cast<std::size_t>(spec.sink) + static_cast<std::size_t>(ring_capacity)) *
         static_cast<std::size_t>(spec.num_kv_heads) * static_cast<std::size_t>(spec.head_dim) * sizeof(std::uint16_t);
}

WindowRows::WindowRows(const KvSpec& spec, int ring_capacity, std::uint16_t* k, std::uint16_t* v)
    : spec_(spec),
      ring_capacity_(ring_capacity),
      k_(k),
      v_(v),
      key_tags_(static_cast<std::size_t>(spec.sink + ring_capacity), kEmpty),
      value_tags_(key_tags_) {}

void WindowRows::clear() {
  std::fill(key_tags_.begin(), key_tags_.end(), kEmpty);
  std::fill(value_tags_.begin(), value_tags_.end(), kEmpty);
}

std::int64_t WindowRows::row_of(std::int32_t token) const {
  if (token < spec_.sink) return token;
  return ring_capacity_ > 0 ? spec_.sink + token % ring_capacity_ : -1;
}

bool WindowRows::valid(std::int32_t token) const {
  if (token < 0) return false;
  const std::int64_t row = row_of(token);
  return row >= 0 && key_tags_[row] == token && value_tags_[row] == token;
}

void WindowRows::write(std::int32_t token, const float* rows, std::uint16_t* side, std::vector<std::int32_t>& tags) {
  const std::int64_t row = rows != nullptr && token >= 0 ? row_of(token) : -1;
  if (row < 0) return;
  const std::int64_t width = std::int64_t{spec_.num_kv_heads} * spec_.head_dim;
  const auto convert = spec_.window_dtype == WindowDtype::kBf16 ? fastest_kernels().to_bf16 : fastest_kernels().to_f16;
  convert(rows, width, side + row * width);
  tags[row] = token;
}

void WindowRows::write_key(std::int32_t token, const float* k) { write(token, k, k_, key_tags_); }
void WindowRows::write_value(std::int32_t token, const float* v) { write(token, v, v_, value_tags_); }

void WindowRows::spans(std::int32_t num_tokens, std::vector<ExactSpan>& out) const {
  out.clear();
  const std::int64_t width = std::int64_t{spec_.num_kv_heads} * spec_.head_dim;
  const auto take_row = [&](std::int64_t row) {
    const std::int32_t token = key_tags_[row];
    if (token == kEmpty || token != value_tags_[row] || token >= num_tokens) return;
    append(out, {.first_token = token,
                 .num_tokens = 1,
                 .k = k_ + row * width,
                 .v = v_ + row * width,
                 .token_stride = width,
                 .head_stride = spec_.head_dim});
  };
  for (std::int64_t row = 0; row < spec_.sink; ++row) take_row(row);
  if (ring_capacity_ == 0) return;
  // The ring usually holds one run of tokens: starting behind the newest, its rows come in ascending order.
  const auto ring = key_tags_.begin() + spec_.sink;
  const std::int64_t newest = std::max_element(ring, key_tags_.end()) - ring;
  for (std::int64_t i = 1; i <= ring_capacity_; ++i) take_row(spec_.sink + (newest + i) % ring_capacity_);
  const auto earlier = [](const ExactSpan& a, const ExactSpan& b) { return a.first_token < b.first_token; };
  if (std::is_sorted(out.begin(), out.end(), earlier)) return;
  // After rewinds and gaps old rows may lie between new ones; spans that overlap in tokens are impossible.
  std::sort(out.begin(), out.end(), earlier);
  std::size_t last = 0;
  for (std::size_t i = 1; i < out.size(); ++i) {
    if (extends(out[last], out[i])) {
      out[last].num_tokens += out[i].num_tokens;
    } else {
      out[++last] = out[i];
    }
  }
  out.resize(last + 1);
}

}  // namespace oscar
