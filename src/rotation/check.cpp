#include <oscar/rotation.hpp>

namespace oscar {
namespace {

constexpr const char* kKinds[] = {"full", "sliding window", "no cache"};

std::string described(const LayerGeometry& layer) {
  std::string text = kKinds[static_cast<int>(layer.kind)];
  if (layer.kind == LayerKind::kNoCache) return text;
  return text + ", " + std::to_string(layer.num_qo_heads) + " query heads, " + std::to_string(layer.num_kv_heads) +
         " KV heads, head_dim " + std::to_string(layer.head_dim);
}

// What the rotation file has and what the model has, for the first thing that differs; empty when nothing does.
std::string first_difference(const ModelGeometry& file, const ModelGeometry& model) {
  const auto differs = [](const std::string& what, const std::string& here, const std::string& there) {
    return what + " is " + here + " in the rotation file and " + there + " in the model";
  };
  if (file.architecture != model.architecture) return differs("architecture", file.architecture, model.architecture);
  if (file.layers.size() != model.layers.size()) {
    return differs("the number of layers", std::to_string(file.layers.size()), std::to_string(model.layers.size()));
  }
  for (std::size_t i = 0; i < file.layers.size(); ++i) {
    const std::string here = described(file.layers[i]);
    const std::string there = described(model.layers[i]);
    if (here != there) return differs("layer " + std::to_string(i), here, there);
  }
  if (file.fingerprint != model.fingerprint) return differs("the fingerprint", file.fingerprint, model.fingerprint);
  return {};
}

}  // namespace

Status check_rotation(const RotationSet& set, const ModelGeometry& geometry) {
  const std::string difference = first_difference(set.geometry, geometry);
  if (difference.empty()) return {};
  return make_error(ErrorCode::kMismatch, "the rotation was made for another model: " + difference +
                                              "; recalibrate for this model: oscar calibrate -m MODEL -f TEXT");
}

}  // namespace oscar
