#include "rotation/rotation_check.hpp"

#include <algorithm>
#include <cmath>
#include <span>

#include "covariance/model_json.hpp"

namespace oscar {
namespace {

constexpr int kSupportedBits = 2;

template <typename T>
bool finite(const std::vector<T>& values) {
  return std::ranges::all_of(values, [](T value) { return std::isfinite(value); });
}

bool strictly_upper(const std::vector<float>& matrix, std::size_t width) {
  for (std::size_t row = 0; row < width; ++row) {
    const auto left = std::span(matrix).subspan(row * width, row + 1);
    if (std::ranges::any_of(left, [](float value) { return value != 0; })) return false;
  }
  return true;
}

bool positive_diagonal(const std::vector<float>& matrix, std::size_t width) {
  for (std::size_t i = 0; i < width; ++i) {
    if (!(matrix[i * width + i] > 0)) return false;
  }
  return true;
}

std::optional<std::string> matrix_fault(const char* name, const std::vector<float>& matrix, std::size_t size) {
  if (matrix.size() != size) {
    return std::string(name) + " has " + std::to_string(matrix.size()) + " numbers, expected " + std::to_string(size);
  }
  if (!finite(matrix)) return std::string(name) + " has a NaN or an infinity";
  return std::nullopt;
}

std::optional<std::string> side_fault(const SideRotation& side, std::size_t width, Quantizer quantizer) {
  const std::size_t square = width * width;
  const std::size_t table = quantizer == Quantizer::kFeedback ? square : 0;
  if (auto fault = matrix_fault("transform", side.transform, square)) return fault;
  if (auto fault = matrix_fault("inverse_transposed", side.inverse_transposed, square)) return fault;
  if (auto fault = matrix_fault("feedback", side.feedback, table)) return fault;
  if (auto fault = matrix_fault("metric", side.metric, table)) return fault;
  if (table != 0 && !strictly_upper(side.feedback, width)) return "feedback is not strictly upper triangular";
  if (table != 0 && !positive_diagonal(side.metric, width)) return "metric has a diagonal element that is not positive";
  if (!std::isfinite(side.offset_center)) return "offset_center is not finite";
  if (!std::isfinite(side.offset_spread) || !(side.offset_spread > 0)) return "offset_spread is not positive";
  if (!(side.clip_ratio >= 0 && side.clip_ratio <= 1)) return "clip_ratio is not in 0..1";
  return std::nullopt;
}

std::optional<std::string> head_fault(const HeadRotation& head, std::size_t width, Quantizer quantizer) {
  if (auto fault = side_fault(head.key, width, quantizer)) return "key." + *fault;
  if (auto fault = side_fault(head.value, width, quantizer)) return "value." + *fault;
  if (head.key_mean.size() != head.page_mean.size() || (!head.key_mean.empty() && head.key_mean.size() != width)) {
    return "key_mean and page_mean have " + std::to_string(head.key_mean.size()) + " and " +
           std::to_string(head.page_mean.size()) + " numbers, expected 0 or " + std::to_string(width) + " in both";
  }
  if (!finite(head.key_mean)) return "key_mean has a NaN or an infinity";
  if (!finite(head.page_mean)) return "page_mean has a NaN or an infinity";
  if (head.key_bits != kSupportedBits || head.value_bits != kSupportedBits) {
    return "bits are " + std::to_string(head.key_bits) + " and " + std::to_string(head.value_bits) +
           ", this build knows 2";
  }
  return std::nullopt;
}

std::optional<std::string> layer_fault(const LayerRotation& layer, const LayerGeometry& geometry, Quantizer quantizer) {
  if (geometry.kind == LayerKind::kNoCache) return "the model keeps no cache there";
  if (layer.heads.size() != static_cast<std::size_t>(geometry.num_kv_heads)) {
    return std::to_string(layer.heads.size()) + " KV heads, the model has " + std::to_string(geometry.num_kv_heads);
  }
  if (auto fault = rope_fault(layer.rope, geometry.head_dim)) return fault;
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    const HeadRotation& head = layer.heads[h];
    if (auto fault = head_fault(head, static_cast<std::size_t>(geometry.head_dim), quantizer)) {
      return "KV head " + std::to_string(h) + ": " + *fault;
    }
    if (head.key_mean.size() != layer.heads.front().key_mean.size()) {
      return "KV head " + std::to_string(h) + " differs from head 0 in having a page mean";
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> rotation_fault(const RotationSet& set) {
  if (auto fault = geometry_fault(set.geometry)) return fault;
  const auto& layers = set.geometry.layers;
  for (const auto& [index, layer] : set.layers) {
    const std::string where = "layer " + std::to_string(index) + ": ";
    if (index < 0 || static_cast<std::size_t>(index) >= layers.size()) return where + "the model has no such layer";
    if (auto fault = layer_fault(layer, layers[static_cast<std::size_t>(index)], set.quantizer()))
      return where + *fault;
  }
  if (set.max_context < 0 || set.num_tokens < 0) return "max_context or num_tokens is negative";
  return std::nullopt;
}

}  // namespace oscar
