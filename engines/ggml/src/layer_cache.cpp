#include "layer_cache.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

namespace oscar::ggml {
namespace {

constexpr int kChunkRows = 256;  // rows converted and stored at a time; bounds scratch memory

std::size_t index_of(Side side) { return side == Side::kKey ? 0 : 1; }

// The row of `cell` in spans, or null.
const std::uint16_t* exact_row(const std::vector<ExactSpan>& spans, Side side, std::int32_t cell) {
  const auto after = std::upper_bound(spans.begin(), spans.end(), cell,
                                      [](std::int32_t c, const ExactSpan& span) { return c < span.first_token; });
  if (after == spans.begin()) return nullptr;
  const ExactSpan& span = *(after - 1);
  const std::int32_t offset = cell - span.first_token;
  if (offset >= span.num_tokens) return nullptr;
  return (side == Side::kKey ? span.k : span.v) + offset * span.token_stride;
}

// Whether two sets of inverse frequencies turn keys alike over any context: they come from the same formula in double.
bool same_frequencies(const RopeSpec& a, const RopeSpec& b) {
  constexpr double kRelative = 1e-5;  // 1 radian in 100,000
  if (a.rotary_dim != b.rotary_dim || a.inv_freq.size() != b.inv_freq.size()) return false;
  for (std::size_t p = 0; p < a.inv_freq.size(); ++p) {
    if (std::abs(a.inv_freq[p] - b.inv_freq[p]) > kRelative * std::abs(a.inv_freq[p])) return false;
  }
  return true;
}

bool has_page_mean(const LayerRotation& rotation) {
  return std::any_of(rotation.heads.begin(), rotation.heads.end(),
                     [](const HeadRotation& head) { return !head.page_mean.empty(); });
}

}  // namespace

void LayerCache::attach(Side side, std::uint8_t* base) {
  base_[index_of(side)] = base;
  if (base_[0] == nullptr || base_[1] == nullptr) return;
  const LayerLayout& layout = layout_;
  streams_.clear();
  for (int s = 0; s < layout.num_streams; ++s) {
    Stream& stream = streams_.emplace_back();
    std::uint8_t* const memory[2] = {base_[0] + layout.stream_bytes * s, base_[1] + layout.stream_bytes * s};
    const auto half_bytes = static_cast<std::int64_t>(layout.half_bytes);
    stream.pages.spec = layout.window_spec;
    stream.pages.spec.parameter_format = layout.page_format;
    stream.pages.rotation = rotation_;
    stream.pages.key = {
        .base = memory[0], .page_stride_bytes = half_bytes * layout.num_kv_heads, .head_stride_bytes = half_bytes};
    stream.pages.value = stream.pages.key;
    stream.pages.value.base = memory[1];
    stream.windows = WindowRows(layout.window_spec, layout.ring_capacity,
                                reinterpret_cast<std::uint16_t*>(memory[0] + layout.page_bytes),
                                reinterpret_cast<std::uint16_t*>(memory[1] + layout.page_bytes));
  }
}

void LayerCache::set_rotation(const LayerRotation& rotation, ParameterFormat format) {
  rotation_ = &rotation;
  layout_.page_format = format;
  for (Stream& stream : streams_) {
    stream.pages.rotation = rotation_;
    stream.pages.spec.parameter_format = format;
  }
}

Status LayerCache::learn_rope(const ggml_tensor* key_rows) {
  if (rope_known_) return {};
  OSCAR_ASSIGN(const ggml_tensor* node, find_rope(key_rows));
  if (node != nullptr) {
    OSCAR_ASSIGN(rope_, read_rope(node, layout_.head_dim));
  }
  if (has_page_mean(*rotation_) && !same_frequencies(rope_, rotation_->rope)) {
    return make_error(ErrorCode::kMismatch,
                      "layer " + std::to_string(index_) +
                          ": this context turns keys at other RoPE frequencies than the calibrated one; drop the RoPE "
                          "options (base, scale, YaRN) or calibrate with them");
  }
  if (rope_.order == RopeOrder::kInterleaved) permutation_ = halves_permutation(rope_, layout_.head_dim);
  rope_known_ = true;
  return {};
}

void LayerCache::to_halves(Side side, const float* row, float* halves) const {
  if (side == Side::kValue || permutation_.empty()) {
    std::copy_n(row, layout_.row_width(), halves);
    return;
  }
  for (int h = 0; h < layout_.num_kv_heads; ++h, row += layout_.head_dim) {
    for (const int channel : permutation_) *halves++ = row[channel];
  }
}

void LayerCache::from_halves(Side side, const float* halves, float* row) const {
  if (side == Side::kValue || permutation_.empty()) {
    std::copy_n(halves, layout_.row_width(), row);
    return;
  }
  for (int h = 0; h < layout_.num_kv_heads; ++h, row += layout_.head_dim) {
    for (const int channel : permutation_) row[channel] = *halves++;
  }
}

EncodedRow LayerCache::unpack_row(Side side, const Stream& stream, std::int32_t cell, std::int32_t position) const {
  const int head_dim = layout_.head_dim;
  const bool is_key = side == Side::kKey;
  EncodedRow encoded{.codes = std::vector<std::uint8_t>(layout_.row_width()),
                     .parameters = std::vector<RowParameters>(layout_.num_kv_heads),
                     .position = position};
  for (int h = 0; h < layout_.num_kv_heads; ++h) {
    const std::uint8_t* half = stream.pages.half(is_key ? stream.pages.key : stream.pages.value, cell / kPageTokens, h);
    (is_key ? unpack_key_row : unpack_value_row)(half, head_dim, layout_.page_format, cell % kPageTokens,
                                                 encoded.codes.data() + h * head_dim, &encoded.parameters[h]);
  }
  return encoded;
}

void LayerCache::pack_row(Side side, const Stream& stream, std::int32_t cell, const EncodedRow& encoded) const {
  const int head_dim = layout_.head_dim;
  const bool is_key = side == Side::kKey;
  for (int h = 0; h < layout_.num_kv_heads; ++h) {
    std::uint8_t* half = stream.pages.half(is_key ? stream.pages.key : stream.pages.value, cell / kPageTokens, h);
    (is_key ? pack_key_row : pack_value_row)(half, head_dim, layout_.page_format, cell % kPageTokens,
                                             encoded.codes.data() + h * head_dim, encoded.parameters[h]);
  }
}

void LayerCache::decode_row(Side side, const EncodedRow& encoded, Isa isa, float* row) const {
  const int head_dim = layout_.head_dim;
  std::vector<float> transformed(head_dim), mean(head_dim);
  for (int h = 0; h < layout_.num_kv_heads; ++h, row += head_dim) {
    const HeadRotation& head = rotation_->heads[h];
    const SideRotation& transform = side == Side::kKey ? head.key : head.value;
    decode_rows(transform, layout_.page_format, head_dim, encoded.codes.data() + h * head_dim, &encoded.parameters[h],
                1, transformed.data());
    inverse_transform_rows(transform.inverse_transposed.data(), head_dim, transformed.data(), 1, row, isa);
    if (side == Side::kValue || head.page_mean.empty()) continue;
    block_mean(head, rotation_->rope, head_dim, encoded.position, mean.data());
    for (int d = 0; d < head_dim; ++d) row[d] += mean[d];
  }
}

void LayerCache::show_row(Side side, const EncodedRow& encoded, Isa isa, ggml_fp16_t* row) const {
  constexpr float kLargestHalf = 65504;
  std::vector<float> halves(layout_.row_width()), engine(layout_.row_width());
  decode_row(side, encoded, isa, halves.data());
  for (float& x : halves) x = std::clamp(x, -kLargestHalf, kLargestHalf);
  from_halves(side, halves.data(), engine.data());
  ggml_fp32_to_fp16_row(engine.data(), row, layout_.row_width());
  carry(encoded, layout_.page_format, layout_.head_dim, row);
}

bool LayerCache::take_over(Side side, Stream& stream, std::int32_t cell, Isa isa, const ggml_fp16_t* row,
                           std::int32_t* position) {
  const int width = layout_.row_width();
  const EncodedRow carried = read_carried(row, layout_.page_format, layout_.num_kv_heads, layout_.head_dim);
  std::vector<ggml_fp16_t> shown(width);
  if (carried.position < 0) return false;  // and block_mean asks for a place in the text
  show_row(side, carried, isa, shown.data());
  if (std::memcmp(shown.data(), row, shown.size() * sizeof(ggml_fp16_t)) != 0) return false;
  pack_row(side, stream, cell, carried);
  *position = carried.position;
  if (stream.windows.valid(cell)) {  // a kept row of what the cell held before
    std::vector<float> halves(width);
    decode_row(side, carried, isa, halves.data());
    if (side == Side::kKey) stream.windows.write_key(cell, halves.data());
    if (side == Side::kValue) stream.windows.write_value(cell, halves.data());
  }
  return true;
}

void LayerCache::read_rows(Side side, int stream_index, std::int64_t first_cell, int num_rows,
                           const std::int32_t* positions, Isa isa, ggml_fp16_t* rows) {
  const int width = layout_.row_width();
  Stream& stream = streams_[stream_index];
  stream.windows.spans(static_cast<std::int32_t>(layout_.num_cells), spans_);
  std::vector<float> halves(width), row(width);
  for (int i = 0; i < num_rows; ++i, rows += width) {
    const auto cell = static_cast<std::int32_t>(first_cell + i);
    if (const std::uint16_t* exact = exact_row(spans_, side, cell); exact != nullptr) {
      ggml_fp16_to_fp32_row(exact, halves.data(), width);
      from_halves(side, halves.data(), row.data());
      ggml_fp32_to_fp16_row(row.data(), rows, width);
    } else {
      show_row(side, unpack_row(side, stream, cell, positions[i]), isa, rows);
    }
  }
}

Status LayerCache::write_rows(Side side, int stream_index, std::int64_t first_cell, int num_rows,
                              std::int32_t* positions, const Workbench& bench, const ggml_fp16_t* rows) {
  const int width = layout_.row_width();
  Stream& stream = streams_[stream_index];
  std::vector<float> row(width), halves(static_cast<std::size_t>(kChunkRows) * width);
  std::vector<std::int32_t> cells, cell_positions;
  const auto store_chunk = [&]() -> Status {
    const StoreRows chunk{.num_rows = static_cast<int>(cells.size()),
                          .tokens = cells.data(),
                          .positions = cell_positions.data(),
                          .k = side == Side::kKey ? halves.data() : nullptr,
                          .v = side == Side::kValue ? halves.data() : nullptr};
    if (bench.encode) OSCAR_TRY(store(stream.pages, bench.quantizer, chunk, bench.isa, *bench.executor));
    cells.clear();
    cell_positions.clear();
    return {};
  };
  std::int32_t moved = 0;  // position of a cell less its index
  for (int i = 0; i < num_rows; ++i, rows += width) {
    const auto cell = static_cast<std::int32_t>(first_cell + i);
    std::int32_t position = cell + moved;
    const bool taken = take_over(side, stream, cell, bench.isa, rows, &position);
    moved = position - cell;
    if (side == Side::kKey) positions[i] = position;
    if (taken) continue;
    float* to = halves.data() + cells.size() * width;
    ggml_fp16_to_fp32_row(rows, row.data(), width);
    to_halves(side, row.data(), to);
    if (side == Side::kKey) stream.windows.write_key(cell, to);
    if (side == Side::kValue) stream.windows.write_value(cell, to);
    cells.push_back(cell);
    cell_positions.push_back(position);
    if (cells.size() == kChunkRows) OSCAR_TRY(store_chunk());
  }
  return store_chunk();
}

Status LayerCache::turn_keys(int stream_index, const std::int32_t* shifts, const std::int32_t* positions,
                             const Workbench& bench) {
  const int width = layout_.row_width();
  const int half = rope_.rotary_dim / 2;
  Stream& stream = streams_[stream_index];
  stream.windows.spans(static_cast<std::int32_t>(layout_.num_cells), spans_);
  std::vector<float> rows(static_cast<std::size_t>(kChunkRows) * width);
  std::vector<std::int32_t> cells, cell_positions;
  const auto store_chunk = [&]() -> Status {
    const StoreRows chunk{.num_rows = static_cast<int>(cells.size()),
                          .tokens = cells.data(),
                          .positions = cell_positions.data(),
                          .k = rows.data(),
                          .v = nullptr};
    if (bench.encode) OSCAR_TRY(store(stream.pages, bench.quantizer, chunk, bench.isa, *bench.executor));
    cells.clear();
    cell_positions.clear();
    return {};
  };
  for (std::int32_t cell = 0; cell < static_cast<std::int32_t>(layout_.num_cells); ++cell) {
    const std::int32_t shift = shifts[cell];
    if (shift == 0) continue;
    float* row = rows.data() + cells.size() * width;
    const std::uint16_t* exact = exact_row(spans_, Side::kKey, cell);
    if (exact != nullptr) {
      ggml_fp16_to_fp32_row(exact, row, width);
    } else {
      decode_row(Side::kKey, unpack_row(Side::kKey, stream, cell, positions[cell] - shift), bench.isa, row);
    }
    for (int h = 0; h < layout_.num_kv_heads; ++h) {
      float* head = row + h * layout_.head_dim;
      for (int p = 0; p < half; ++p) {
        const double angle = shift * rope_.inv_freq[p], c = std::cos(angle), s = std::sin(angle);
        const double x = head[p], y = head[p + half];
        head[p] = static_cast<float>(x * c - y * s);
        head[p + half] = static_cast<float>(x * s + y * c);
      }
    }
    if (exact != nullptr) stream.windows.write_key(cell, row);  // in its own place: the spans stay as they are
    cells.push_back(cell);
    cell_positions.push_back(positions[cell]);
    if (cells.size() == kChunkRows) OSCAR_TRY(store_chunk());
  }
  return store_chunk();
}

void LayerCache::copy_stream(Side side, int from, int to) {
  std::uint8_t* base = base_[index_of(side)];
  std::memcpy(base + layout_.stream_bytes * to, base + layout_.stream_bytes * from, layout_.page_bytes);
  WindowRows& windows = streams_[to].windows;
  if (side == Side::kKey) windows.clear();
  streams_[from].windows.spans(static_cast<std::int32_t>(layout_.num_cells), spans_);
  std::vector<float> row(layout_.row_width());
  for (const ExactSpan& span : spans_) {
    for (std::int32_t i = 0; i < span.num_tokens; ++i) {
      const std::uint16_t* rows = side == Side::kKey ? span.k : span.v;
      ggml_fp16_to_fp32_row(rows + i * span.token_stride, row.data(), layout_.row_width());
      if (side == Side::kKey) windows.write_key(span.first_token + i, row.data());
      if (side == Side::kValue) windows.write_value(span.first_token + i, row.data());
    }
  }
}

bool LayerCache::keeps(int stream, int num_tokens) {
  streams_[stream].windows.spans(num_tokens, spans_);
  return spans_.size() == 1 && spans_[0].first_token == 0 && spans_[0].num_tokens == num_tokens;
}

Status LayerCache::encode_kept_rows(int stream_index, int num_tokens, const std::int32_t* positions,
                                    const Workbench& bench) {
  Stream& stream = streams_[stream_index];
  stream.windows.spans(num_tokens, spans_);
  const int width = layout_.row_width();
  std::vector<float> k(static_cast<std::size_t>(kChunkRows) * width), v(k.size());
  std::vector<std::int32_t> cells(kChunkRows);
  for (int first = 0; first < num_tokens; first += kChunkRows) {
    const int count = std::min(kChunkRows, num_tokens - first);
    std::iota(cells.begin(), cells.begin() + count, first);
    for (int i = 0; i < count; ++i) {
      const std::int64_t at = (first + i) * spans_[0].token_stride;
      ggml_fp16_to_fp32_row(spans_[0].k + at, k.data() + static_cast<std::size_t>(i) * width, width);
      ggml_fp16_to_fp32_row(spans_[0].v + at, v.data() + static_cast<std::size_t>(i) * width, width);
    }
    OSCAR_TRY(
        store(stream.pages, bench.quantizer,
              {.num_rows = count, .tokens = cells.data(), .positions = positions + first, .k = k.data(), .v = v.data()},
              bench.isa, *bench.executor));
  }
  return {};
}

void LayerCache::forget_windows() {
  for (Stream& stream : streams_) stream.windows.clear();
}

}  // namespace oscar::ggml
