#include "covariance/statistics_check.hpp"

#include <algorithm>
#include <cmath>

#include "covariance/model_json.hpp"

namespace oscar {
namespace {

bool finite(const std::vector<double>& values) {
  return std::ranges::all_of(values, [](double value) { return std::isfinite(value); });
}

std::optional<std::string> layer_fault(const LayerStatistics& layer, const LayerGeometry& geometry) {
  if (geometry.kind == LayerKind::kNoCache) return "the model keeps no cache there";
  if (layer.heads.size() != static_cast<std::size_t>(geometry.num_kv_heads)) {
    return std::to_string(layer.heads.size()) + " KV heads, the model has " + std::to_string(geometry.num_kv_heads);
  }
  if (const auto fault = rope_fault(layer.rope, geometry.head_dim)) return fault;
  const HeadStatistics& first = layer.heads.front();
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    const HeadStatistics& head = layer.heads[h];
    const std::string where = "KV head " + std::to_string(h) + ": ";
    if (head.head_dim != geometry.head_dim) {
      return where + "head_dim is " + std::to_string(head.head_dim) + ", the model's is " +
             std::to_string(geometry.head_dim);
    }
    if (const auto fault = head_fault(head)) return where + *fault;
    if (head.block_count.size() != first.block_count.size() || head.output_gram.size() != first.output_gram.size()) {
      return where + "block_count or output_gram differs in size from KV head 0";
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> head_fault(const HeadStatistics& head) {
  const auto width = static_cast<std::size_t>(std::max(head.head_dim, 0));
  const std::size_t num_blocks = head.block_count.size();
  const struct {
    const char* name;
    const std::vector<double>& values;
    std::size_t size;
  } fields[] = {
      {"query_moment", head.query_moment, width * width},
      {"pre_rope_key_sum", head.pre_rope_key_sum, width},
      {"key_moment", head.key_moment, width * width},
      {"block_key_sum", head.block_key_sum, num_blocks * width},
      {"block_count", head.block_count, num_blocks},
      {"value_sum", head.value_sum, width},
      {"value_moment", head.value_moment, width * width},
      {"weighted_value_moment", head.weighted_value_moment, width * width},
      {"output_gram", head.output_gram, head.output_gram.empty() ? 0 : width * width},
  };
  for (const auto& field : fields) {
    if (field.values.size() != field.size) {
      return std::string(field.name) + " has " + std::to_string(field.values.size()) + " numbers, expected " +
             std::to_string(field.size);
    }
    if (!finite(field.values)) return std::string(field.name) + " has a NaN or an infinity";
  }
  for (const double count : {head.num_queries, head.num_keys, head.num_weighted}) {
    if (!std::isfinite(count) || count < 0) return "a token count is " + std::to_string(count);
  }
  return std::nullopt;
}

std::optional<std::string> statistics_fault(const ModelStatistics& statistics) {
  if (const auto fault = geometry_fault(statistics.geometry)) return fault;
  const auto& layers = statistics.geometry.layers;
  for (const auto& [index, layer] : statistics.layers) {
    const std::string where = "layer " + std::to_string(index) + ": ";
    if (index < 0 || static_cast<std::size_t>(index) >= layers.size()) return where + "the model has no such layer";
    if (const auto fault = layer_fault(layer, layers[static_cast<std::size_t>(index)])) return where + *fault;
  }
  return std::nullopt;
}

}  // namespace oscar
