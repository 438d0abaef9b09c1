#include "covariance/model_json.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

namespace oscar {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxText = 1 << 20;  // of one JSON field; 1000 layers take 130 KB
constexpr std::size_t kMaxLayers = 4096;
constexpr int kMaxHeads = 4096;

constexpr std::array<std::pair<LayerKind, const char*>, 3> kKindNames{{
    {LayerKind::kFull, "full"},
    {LayerKind::kSlidingWindow, "sliding_window"},
    {LayerKind::kNoCache, "no_cache"},
}};
constexpr std::array<std::pair<RopeOrder, const char*>, 3> kOrderNames{{
    {RopeOrder::kNone, "none"},
    {RopeOrder::kHalves, "halves"},
    {RopeOrder::kInterleaved, "interleaved"},
}};

template <typename Names, typename Value>
const char* name_of(const Names& names, Value value) {
  for (const auto& [candidate, name] : names) {
    if (candidate == value) return name;
  }
  return "unknown";
}

// Fields of one JSON object; the first fault is kept.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fault_ = where_ + " is not an object";
  }

  std::string text(const char* field) {
    const json* value = find(field);
    if (value == nullptr) return {};
    if (value->is_string()) return value->get<std::string>();
    set_fault(field, "is not a text");
    return {};
  }

  int integer(const char* field) {
    const json* value = find(field);
    if (value == nullptr) return 0;
    if (value->is_number_integer()) {
      const bool fits = !value->is_number_unsigned() || value->get<std::uint64_t>() <= kMaxInt;
      const auto number = value->get<std::int64_t>();
      if (fits && number >= 0 && number <= static_cast<std::int64_t>(kMaxInt)) return static_cast<int>(number);
    }
    set_fault(field, "is not an integer in 0..2147483647");
    return 0;
  }

  template <typename Value, std::size_t kCount>
  Value choice(const char* field, const std::array<std::pair<Value, const char*>, kCount>& names) {
    const std::string name = text(field);
    for (const auto& [value, candidate] : names) {
      if (name == candidate) return value;
    }
    set_fault(field, "has an unknown value");
    return names.front().first;
  }

  const std::string& fault() const { return fault_; }  // empty = none

 private:
  static constexpr std::uint64_t kMaxInt = std::numeric_limits<int>::max();

  const json* find(const char* field) {
    if (!object_.is_object()) return nullptr;
    const auto found = object_.find(field);
    if (found != object_.end()) return &*found;
    set_fault(field, "is missing");
    return nullptr;
  }
  void set_fault(const char* field, const char* what) {
    if (fault_.empty()) fault_ = where_ + ": '" + field + "' " + what;
  }

  const json& object_;
  std::string where_;
  std::string fault_;
};

tl::unexpected<Error> bad(std::string reason) { return make_error(ErrorCode::kBadInput, std::move(reason)); }

Result<json> parse_object(const std::string& text, const char* what) {
  if (text.size() > kMaxText) {
    return bad(std::string(what) + " has " + std::to_string(text.size()) + " bytes, at most 1048576 are accepted");
  }
  json value = json::parse(text, nullptr, false);
  if (!value.is_object()) return bad(std::string(what) + " is not a JSON object");
  return value;
}

std::optional<std::string> layer_fault(const LayerGeometry& layer) {
  if (layer.kind == LayerKind::kNoCache) return std::nullopt;
  if (layer.head_dim < 16 || layer.head_dim > 256 || layer.head_dim % 16 != 0) {
    return "head_dim is " + std::to_string(layer.head_dim) + ", expected a multiple of 16 in 16..256";
  }
  if (layer.num_kv_heads < 1 || layer.num_kv_heads > kMaxHeads || layer.num_qo_heads < layer.num_kv_heads ||
      layer.num_qo_heads > kMaxHeads || layer.num_qo_heads % layer.num_kv_heads != 0) {
    return std::to_string(layer.num_qo_heads) + " query heads do not share " + std::to_string(layer.num_kv_heads) +
           " KV heads evenly";
  }
  if (layer.sliding_window < 0) return "sliding_window is " + std::to_string(layer.sliding_window);
  return std::nullopt;
}

}  // namespace

std::optional<std::string> geometry_fault(const ModelGeometry& geometry) {
  if (geometry.layers.empty() || geometry.layers.size() > kMaxLayers) {
    return "the model has " + std::to_string(geometry.layers.size()) + " layers, expected 1..4096";
  }
  if (geometry.context_length < 0) return "context_length is " + std::to_string(geometry.context_length);
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    if (const auto fault = layer_fault(geometry.layers[i])) return "layer " + std::to_string(i) + ": " + *fault;
  }
  return std::nullopt;
}

std::optional<std::string> rope_fault(const RopeSpec& rope, int head_dim) {
  if (rope.rotary_dim < 0 || rope.rotary_dim > head_dim || rope.rotary_dim % 2 != 0) {
    return "rotary_dim is " + std::to_string(rope.rotary_dim) + ", expected an even number in 0.." +
           std::to_string(head_dim);
  }
  if (rope.order == RopeOrder::kNone && rope.rotary_dim != 0) {
    return "rotary_dim is " + std::to_string(rope.rotary_dim) + " but keys carry no rotary embedding";
  }
  if (rope.inv_freq.size() != static_cast<std::size_t>(rope.rotary_dim) / 2) {
    return std::to_string(rope.inv_freq.size()) + " inverse frequencies for rotary_dim " +
           std::to_string(rope.rotary_dim);
  }
  for (const double frequency : rope.inv_freq) {
    if (!std::isfinite(frequency)) return "an inverse frequency is not finite";
  }
  return std::nullopt;
}

std::string geometry_to_json(const ModelGeometry& geometry) {
  json layers = json::array();
  for (const LayerGeometry& layer : geometry.layers) {
    layers.push_back({{"kind", name_of(kKindNames, layer.kind)},
                      {"num_qo_heads", layer.num_qo_heads},
                      {"num_kv_heads", layer.num_kv_heads},
                      {"head_dim", layer.head_dim},
                      {"sliding_window", layer.sliding_window}});
  }
  const json object{{"architecture", geometry.architecture},
                    {"name", geometry.name},
                    {"context_length", geometry.context_length},
                    {"fingerprint", geometry.fingerprint},
                    {"layers", std::move(layers)}};
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<ModelGeometry> geometry_from_json(const std::string& text) {
  OSCAR_ASSIGN(const json object, parse_object(text, "the geometry"));
  Fields fields(object, "the geometry");
  ModelGeometry geometry;
  geometry.architecture = fields.text("architecture");
  geometry.name = fields.text("name");
  geometry.context_length = fields.integer("context_length");
  geometry.fingerprint = fields.text("fingerprint");
  if (!fields.fault().empty()) return bad(fields.fault());
  const auto layers = object.find("layers");
  if (layers == object.end() || !layers->is_array() || layers->size() > kMaxLayers) {
    return bad("the geometry: 'layers' is not a list of at most 4096");
  }
  for (const json& entry : *layers) {
    Fields layer_fields(entry, "layer " + std::to_string(geometry.layers.size()) + " of the geometry");
    LayerGeometry& layer = geometry.layers.emplace_back();
    layer.kind = layer_fields.choice("kind", kKindNames);
    layer.num_qo_heads = layer_fields.integer("num_qo_heads");
    layer.num_kv_heads = layer_fields.integer("num_kv_heads");
    layer.head_dim = layer_fields.integer("head_dim");
    layer.sliding_window = layer_fields.integer("sliding_window");
    if (!layer_fields.fault().empty()) return bad(layer_fields.fault());
  }
  if (const auto fault = geometry_fault(geometry)) return bad("the geometry: " + *fault);
  return geometry;
}

std::string ropes_to_json(const std::map<int, RopeSpec>& ropes) {
  json object = json::object();
  for (const auto& [layer, rope] : ropes) {
    object[std::to_string(layer)] = {{"rope_order", name_of(kOrderNames, rope.order)}, {"rotary_dim", rope.rotary_dim}};
  }
  return object.dump();
}

Result<std::map<int, RopeSpec>> ropes_from_json(const std::string& text, const ModelGeometry& geometry) {
  OSCAR_ASSIGN(const json object, parse_object(text, "the list of layers"));
  std::map<int, RopeSpec> ropes;
  for (const auto& [key, entry] : object.items()) {
    int index = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), index);
    const bool is_index = error == std::errc() && end == key.data() + key.size() && index >= 0 &&
                          static_cast<std::size_t>(index) < geometry.layers.size();
    if (!is_index || geometry.layers[static_cast<std::size_t>(index)].kind == LayerKind::kNoCache) {
      return bad("the list of layers names '" + key.substr(0, 16) + "', which is no layer with a cache");
    }
    Fields fields(entry, "layer " + key);
    RopeSpec& rope = ropes[index];
    rope.order = fields.choice("rope_order", kOrderNames);
    rope.rotary_dim = fields.integer("rotary_dim");
    if (!fields.fault().empty()) return bad(fields.fault());
  }
  return ropes;
}

}  // namespace oscar
