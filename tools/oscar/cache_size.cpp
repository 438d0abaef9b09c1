#include "cache_size.hpp"

#include <functional>

namespace oscar::tool {
namespace {

double mean_over_elements(const ModelGeometry& geometry, const RotationSet& rotation, int sink, int recent,
                          const std::function<double(const KvSpec&)>& bits) {
  double sum = 0;
  double elements = 0;
  for (const auto& [index, unused] : rotation.layers) {
    if (index < 0 || static_cast<std::size_t>(index) >= geometry.layers.size()) continue;
    const LayerGeometry& layer = geometry.layers[static_cast<std::size_t>(index)];
    const double weight = static_cast<double>(layer.num_kv_heads) * layer.head_dim;
    sum += weight * bits(layer_spec(layer, rotation, sink, recent));
    elements += weight;
  }
  return elements > 0 ? sum / elements : 0;
}

}  // namespace

KvSpec layer_spec(const LayerGeometry& layer, const RotationSet& rotation, int sink, int recent) {
  KvSpec spec;
  spec.num_kv_heads = layer.num_kv_heads;
  spec.head_dim = layer.head_dim;
  spec.parameter_format = rotation.parameter_format();
  spec.sink = sink;
  spec.recent = recent;
  spec.window_dtype = WindowDtype::kF16;
  return spec;
}

double page_bits(const ModelGeometry& geometry, const RotationSet& rotation) {
  return mean_over_elements(geometry, rotation, 0, 0, [](const KvSpec& spec) { return spec.page_bits_per_element(); });
}

double bits_at(const ModelGeometry& geometry, const RotationSet& rotation, int sink, int recent, std::int64_t context) {
  return mean_over_elements(geometry, rotation, sink, recent,
                            [context](const KvSpec& spec) { return spec.bits_per_element(context); });
}

Result<std::shared_ptr<const RotationSet>> sizing_set(const ModelGeometry& geometry, Method method) {
  OSCAR_ASSIGN(const auto plain, fit_rotation(geometry, Method::kNaive));
  auto set = std::make_shared<RotationSet>(*plain);
  set->method = method;
  return set;
}

Result<std::int64_t> stock_bytes(const ModelGeometry& geometry, std::int64_t context) {
  ggml::CacheConfig config;
  config.mode = ggml::CacheMode::kDelegate;
  OSCAR_ASSIGN(const ggml::CacheUsage usage, ggml::predict_usage(geometry, nullptr, config, context, 1));
  return usage.buffer_bytes;
}

}  // namespace oscar::tool
