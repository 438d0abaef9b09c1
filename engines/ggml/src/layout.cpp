#include "layout.hpp"

#include <algorithm>
#include <string>

namespace oscar::ggml {

bool is_quantized(const RotationSet& rotation, int layer) {
  const std::vector<LayerGeometry>& layers = rotation.geometry.layers;
  return rotation.layers.contains(layer) && layer < static_cast<int>(layers.size()) &&
         layers[layer].kind == LayerKind::kFull;
}

LayerLayout plan_layer(const CacheConfig& config, ParameterFormat format, int num_kv_heads, int head_dim,
                       std::int64_t num_cells, int num_streams) {
  LayerLayout layout;
  layout.num_kv_heads = num_kv_heads;
  layout.head_dim = head_dim;
  layout.num_cells = num_cells;
  layout.num_streams = num_streams;
  layout.page_format = format;
  layout.num_pages = (num_cells + kPageTokens - 1) / kPageTokens;

  KvSpec& spec = layout.window_spec;
  spec.num_kv_heads = num_kv_heads;
  spec.head_dim = head_dim;
  spec.window_dtype = WindowDtype::kF16;
  if (config.keep_exact_rows) {
    // Every row lives in the ring, and any method's pages must fit.
    spec.parameter_format = ParameterFormat::kFloatPair;
    spec.sink = 0;
    spec.recent = static_cast<int>(num_cells);
  } else {
    spec.parameter_format = format;
    spec.sink = std::min<int>(config.sink, static_cast<int>(num_cells));
    spec.recent = std::max(1, config.recent);
  }
  layout.ring_capacity = spec.recent;
  layout.half_bytes = spec.half_bytes();
  layout.page_bytes = static_cast<std::size_t>(layout.num_pages * num_kv_heads) * layout.half_bytes;
  layout.window_bytes = WindowRows::side_bytes(spec, layout.ring_capacity);
  layout.stream_bytes = align_up(layout.page_bytes + layout.window_bytes);
  return layout;
}

void add_usage(const LayerLayout& layout, CacheUsage& usage) {
  const std::int64_t sides = 2 * static_cast<std::int64_t>(layout.num_streams);
  const std::int64_t rows = layout.window_spec.sink + layout.ring_capacity;
  usage.buffer_bytes += 2 * static_cast<std::int64_t>(layout.side_bytes());
  usage.page_bytes += sides * static_cast<std::int64_t>(layout.page_bytes);
  usage.window_bytes += sides * static_cast<std::int64_t>(layout.window_bytes);
  usage.bookkeeping_bytes += sides * rows * static_cast<std::int64_t>(sizeof(std::int32_t));  // tags
  usage.elements += sides * layout.num_cells * layout.row_width();
  ++usage.quantized_layers;
}

void add_delegated_usage(std::int64_t width, std::int64_t num_cells, int num_streams, CacheUsage& usage) {
  const std::int64_t side = width * num_cells * num_streams * static_cast<std::int64_t>(sizeof(std::uint16_t));
  usage.delegated_bytes += 2 * side;
  usage.buffer_bytes += 2 * static_cast<std::int64_t>(align_up(static_cast<std::size_t>(side)));
  ++usage.delegated_layers;
}

Result<CacheUsage> predict_usage(const ModelGeometry& geometry, const RotationSet* rotation, const CacheConfig& config,
                                 std::int64_t context, int num_streams) {
  constexpr std::int64_t kCellPadding = 256;  // llama.cpp rounds a stream's cells up to this
  if (context < 1 || num_streams < 1) {
    return make_error(ErrorCode::kInvalidArgument, "context " + std::to_string(context) + " and streams " +
                                                       std::to_string(num_streams) + ": both must be at least 1");
  }
  if (config.mode == CacheMode::kInt2 && rotation == nullptr) {
    return make_error(ErrorCode::kInvalidArgument, "an INT2 cache needs a rotation; fit or load one");
  }
  const std::int64_t num_cells = (context + kCellPadding - 1) / kCellPadding * kCellPadding;
  CacheUsage usage;
  bool has_positions = false;
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    const LayerGeometry& layer = geometry.layers[i];
    if (layer.kind == LayerKind::kNoCache) continue;
    if (config.mode == CacheMode::kInt2 && is_quantized(*rotation, static_cast<int>(i))) {
      add_usage(
          plan_layer(config, rotation->parameter_format(), layer.num_kv_heads, layer.head_dim, num_cells, num_streams),
          usage);
      has_positions = true;
    } else {
      add_delegated_usage(static_cast<std::int64_t>(layer.num_kv_heads) * layer.head_dim, num_cells, num_streams,
                          usage);
    }
  }
  if (has_positions)
    usage.bookkeeping_bytes += num_cells * num_streams * static_cast<std::int64_t>(sizeof(std::int32_t));
  return usage;
}

}  // namespace oscar::ggml
