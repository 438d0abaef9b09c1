#include "batch.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace oscar::ggml {
namespace {

// Below this many rows waking the workers costs more than they save.
constexpr int kMinParallelRows = 4;

}  // namespace

Status Batch::begin(LayerCache& layer, const ggml_tensor* cell_ids) {
  layer_ = &layer;
  has_[0] = has_[1] = encoded_ = false;
  const std::int64_t num_cells = layer.layout().num_cells, end = num_cells * layer.layout().num_streams;
  const std::byte* data = host_bytes(cell_ids, bytes_);
  const auto num_rows = static_cast<std::size_t>(cell_ids->ne[0]);
  streams_.resize(num_rows);
  cells_.resize(num_rows);
  positions_.resize(num_rows);
  for (std::size_t i = 0; i < num_rows; ++i) {
    const std::int64_t id = cell_ids->type == GGML_TYPE_I64 ? reinterpret_cast<const std::int64_t*>(data)[i]
                                                            : reinterpret_cast<const std::int32_t*>(data)[i];
    if (id < 0 || id >= end) {
      drop();
      return make_error(ErrorCode::kInternal, "layer " + std::to_string(layer.index()) + ": cell " +
                                                  std::to_string(id) + " of " + std::to_string(end) + " was written");
    }
    streams_[i] = static_cast<std::int32_t>(id / num_cells);
    cells_[i] = static_cast<std::int32_t>(id % num_cells);
  }
  return {};
}

void Batch::stage(Side side, const ggml_tensor* rows) {
  const std::size_t s = index_of(side);
  has_[s] = true;
  const auto width = static_cast<std::size_t>(layer_->layout().row_width());
  rows_[s].resize(cells_.size() * width);
  exact_[s].resize(cells_.size() * width);
  const std::byte* data = host_bytes(rows, bytes_);
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    layer_->to_halves(side, reinterpret_cast<const float*>(data + i * rows->nb[1]), rows_[s].data() + i * width);
  }
  ggml_fp32_to_fp16_row(rows_[s].data(), exact_[s].data(), static_cast<std::int64_t>(rows_[s].size()));
  ggml_fp16_to_fp32_row(exact_[s].data(), rows_[s].data(), static_cast<std::int64_t>(rows_[s].size()));
}

Status Batch::encode(const Workbench& bench) {
  if (encoded_ || !bench.encode) return {};
  encoded_ = true;
  const std::size_t width = static_cast<std::size_t>(layer_->layout().row_width());
  for (int first = 0; first < num_rows();) {
    int last = first + 1;
    while (last < num_rows() && streams_[last] == streams_[first]) ++last;
    const StoreRows rows{.num_rows = last - first,
                         .tokens = cells_.data() + first,
                         .positions = positions_.data() + first,
                         .k = has_[0] ? rows_[0].data() + first * width : nullptr,
                         .v = has_[1] ? rows_[1].data() + first * width : nullptr};
    Executor& executor = last - first < kMinParallelRows ? serial_executor() : *bench.executor;
    OSCAR_TRY(store(layer_->stream(streams_[first]).pages, bench.quantizer, rows, bench.isa, executor));
    first = last;
  }
  return {};
}

Status Batch::commit(const Workbench& bench) {
  if (empty()) return {};
  OSCAR_TRY(encode(bench));
  const std::size_t width = static_cast<std::size_t>(layer_->layout().row_width());
  for (int i = 0; i < num_rows(); ++i) {
    WindowRows& windows = layer_->stream(streams_[i]).windows;
    if (has_[0]) windows.write_key(cells_[i], rows_[0].data() + i * width);
    if (has_[1]) windows.write_value(cells_[i], rows_[1].data() + i * width);
  }
  drop();
  return {};
}

void Batch::append_spans(int stream, bool always, std::vector<ExactSpan>& spans) const {
  if (!has_[0] || !has_[1]) return;
  const std::int64_t width = layer_->layout().row_width();
  const std::size_t begin = spans.size();
  for (int i = 0; i < num_rows(); ++i) {
    if (streams_[i] != stream) continue;
    if (spans.size() > begin && spans.back().first_token + spans.back().num_tokens == cells_[i] &&
        spans.back().k + spans.back().num_tokens * width == exact_[0].data() + i * width) {
      ++spans.back().num_tokens;
      continue;
    }
    spans.push_back({.first_token = cells_[i],
                     .num_tokens = 1,
                     .k = exact_[0].data() + i * width,
                     .v = exact_[1].data() + i * width,
                     .token_stride = width,
                     .head_stride = layer_->layout().head_dim,
                     .always = always});
  }
  std::sort(spans.begin() + static_cast<std::ptrdiff_t>(begin), spans.end(),
            [](const ExactSpan& a, const ExactSpan& b) { return a.first_token < b.first_token; });
}

}  // namespace oscar::ggml
