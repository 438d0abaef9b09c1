// Rotation files: docs/format-files.md.

#include "rotation/rotation_file.hpp"

#include <array>
#include <oscar/version.hpp>
#include <set>
#include <span>
#include <utility>

#include "covariance/model_json.hpp"
#include "io/oscar_file.hpp"
#include "rotation/rotation_check.hpp"

namespace oscar {
namespace {

constexpr std::string_view kFormat = "oscar-rotation";
constexpr std::string_view kRemedy = "make it again with `oscar calibrate` or fetch it anew";

struct Matrix {
  const char* name;
  std::vector<float> SideRotation::*member;
};
constexpr std::array<Matrix, 4> kMatrices{{
    {"transform", &SideRotation::transform},
    {"inverse_transposed", &SideRotation::inverse_transposed},
    {"feedback", &SideRotation::feedback},
    {"metric", &SideRotation::metric},
}};
struct Scalar {
  const char* name;
  float SideRotation::*member;
};
constexpr std::array<Scalar, 3> kScalars{{
    {"offset_center", &SideRotation::offset_center},
    {"offset_spread", &SideRotation::offset_spread},
    {"clip_ratio", &SideRotation::clip_ratio},
}};
struct Side {
  const char* name;
  SideRotation HeadRotation::*member;
};
constexpr std::array<Side, 2> kSides{{{"key", &HeadRotation::key}, {"value", &HeadRotation::value}}};
struct Mean {
  const char* name;
  std::vector<double> HeadRotation::*member;
};
constexpr std::array<Mean, 2> kMeans{{{"key_mean", &HeadRotation::key_mean}, {"page_mean", &HeadRotation::page_mean}}};

std::string prefix(int layer) { return "layers." + std::to_string(layer) + "."; }

void add_side(io::SafetensorsContent& content, const std::string& name, const std::vector<HeadRotation>& heads,
              SideRotation HeadRotation::*side, std::int64_t head_dim) {
  const auto num_heads = static_cast<std::int64_t>(heads.size());
  for (const Matrix& matrix : kMatrices) {
    if ((heads.front().*side.*matrix.member).empty()) continue;
    io::add_tensor<float>(content, name + matrix.name, {num_heads, head_dim, head_dim});
    for (const HeadRotation& head : heads) {
      io::add_part<float>(content, name + matrix.name, head.*side.*matrix.member);
    }
  }
  for (const Scalar& scalar : kScalars) {
    io::add_tensor<float>(content, name + scalar.name, {num_heads});
    for (const HeadRotation& head : heads) {
      io::add_part<float>(content, name + scalar.name, std::span(&(head.*side.*scalar.member), 1));
    }
  }
}

void add_layer(io::SafetensorsContent& content, int index, const LayerRotation& layer, std::int64_t head_dim) {
  const auto num_heads = static_cast<std::int64_t>(layer.heads.size());
  for (const Side& side : kSides) {
    add_side(content, prefix(index) + side.name + ".", layer.heads, side.member, head_dim);
  }
  for (const Mean& mean : kMeans) {
    if ((layer.heads.front().*mean.member).empty()) continue;
    io::add_tensor<double>(content, prefix(index) + mean.name, {num_heads, head_dim});
    for (const HeadRotation& head : layer.heads) {
      io::add_part<double>(content, prefix(index) + mean.name, head.*mean.member);
    }
  }
  io::add_tensor<std::int32_t>(content, prefix(index) + "bits", {num_heads, 2});
  for (const HeadRotation& head : layer.heads) {
    io::add_part<std::int32_t>(content, prefix(index) + "bits", std::span(&head.key_bits, 1));
    io::add_part<std::int32_t>(content, prefix(index) + "bits", std::span(&head.value_bits, 1));
  }
  io::add_tensor<double>(content, prefix(index) + "inv_freq", {static_cast<std::int64_t>(layer.rope.inv_freq.size())});
  io::add_part<double>(content, prefix(index) + "inv_freq", layer.rope.inv_freq);
}

// For the eye: the ratio of each side, or "per head". The tensors count.
std::string clip_ratio_text(const RotationSet& set, SideRotation HeadRotation::*side) {
  std::set<float> ratios;
  for (const auto& [index, layer] : set.layers) {
    for (const HeadRotation& head : layer.heads) ratios.insert((head.*side).clip_ratio);
  }
  if (ratios.size() > 1) return "per head";
  if (ratios.empty() || *ratios.begin() == 0) return "none";
  std::string text = std::to_string(*ratios.begin());
  return text.substr(0, text.find_last_not_of('0') + 1);
}

Result<std::vector<HeadRotation>> read_heads(io::OscarFile& file, int index, const LayerGeometry& geometry,
                                             Quantizer quantizer) {
  const int num_heads = geometry.num_kv_heads;
  std::vector<HeadRotation> heads(static_cast<std::size_t>(num_heads));
  for (const Side& side : kSides) {
    const std::string name = prefix(index) + side.name + ".";
    for (const Matrix& matrix : kMatrices) {
      const bool is_table = matrix.member == &SideRotation::feedback || matrix.member == &SideRotation::metric;
      if (is_table && quantizer != Quantizer::kFeedback) continue;
      OSCAR_ASSIGN(auto values,
                   file.heads<float>(name + matrix.name, num_heads, {geometry.head_dim, geometry.head_dim}));
      for (std::size_t h = 0; h < heads.size(); ++h) heads[h].*side.member.*matrix.member = std::move(values[h]);
    }
    for (const Scalar& scalar : kScalars) {
      OSCAR_ASSIGN(const auto values, file.tensor<float>(name + scalar.name, {num_heads}));
      for (std::size_t h = 0; h < heads.size(); ++h) heads[h].*side.member.*scalar.member = values[h];
    }
  }
  for (const Mean& mean : kMeans) {
    if (!file.has(prefix(index) + mean.name)) continue;
    OSCAR_ASSIGN(auto values, file.heads<double>(prefix(index) + mean.name, num_heads, {geometry.head_dim}));
    for (std::size_t h = 0; h < heads.size(); ++h) heads[h].*mean.member = std::move(values[h]);
  }
  OSCAR_ASSIGN(const auto bits, file.heads<std::int32_t>(prefix(index) + "bits", num_heads, {2}));
  for (std::size_t h = 0; h < heads.size(); ++h) {
    heads[h].key_bits = bits[h][0];
    heads[h].value_bits = bits[h][1];
  }
  return heads;
}

Status read_layers(io::OscarFile& file, RotationSet& set) {
  OSCAR_ASSIGN(const std::string text, file.text("layers"));
  Result<std::map<int, RopeSpec>> ropes = ropes_from_json(text, set.geometry);
  if (!ropes) return file.bad(ropes.error().message);
  for (auto& [index, rope] : *ropes) {
    LayerRotation& layer = set.layers[index];
    layer.rope = std::move(rope);
    OSCAR_ASSIGN(layer.rope.inv_freq, file.tensor<double>(prefix(index) + "inv_freq", {layer.rope.rotary_dim / 2}));
    const LayerGeometry& geometry = set.geometry.layers[static_cast<std::size_t>(index)];
    OSCAR_ASSIGN(layer.heads, read_heads(file, index, geometry, set.quantizer()));
  }
  return {};
}

}  // namespace

io::SafetensorsContent rotation_content(const RotationSet& set) {
  io::SafetensorsContent content;
  std::map<int, RopeSpec> ropes;
  for (const auto& [index, layer] : set.layers) {
    ropes[index] = layer.rope;
    add_layer(content, index, layer, set.geometry.layers[static_cast<std::size_t>(index)].head_dim);
  }
  content.metadata = {
      {"format", std::string(kFormat)},
      {"format_version", std::to_string(kRotationFormatVersion)},
      {"method", std::string(method_name(set.method))},
      {"model", io::valid_utf8(set.geometry.name)},
      {"geometry", geometry_to_json(set.geometry)},
      {"layers", ropes_to_json(ropes)},
      {"max_context", std::to_string(set.max_context)},
      {"num_tokens", std::to_string(set.num_tokens)},
      {"corpus_hash", io::valid_utf8(set.corpus_hash)},
      {"producer", io::valid_utf8(set.producer)},
      {"composition", io::valid_utf8(set.composition)},
      {"key_clip_ratio", clip_ratio_text(set, &HeadRotation::key)},
      {"value_clip_ratio", clip_ratio_text(set, &HeadRotation::value)},
  };
  content.metadata[std::string(io::kContentHashField)] = io::content_hash(content);
  return content;
}

std::string rotation_hash(const RotationSet& set) {
  return rotation_content(set).metadata.at(std::string(io::kContentHashField));
}

Status save_rotation(const RotationSet& set, const std::string& path) {
  if (const auto fault = rotation_fault(set)) {
    return make_error(ErrorCode::kInvalidArgument, path + ": the rotation set cannot be saved: " + *fault);
  }
  return io::write_safetensors(rotation_content(set), path);
}

Result<std::shared_ptr<const RotationSet>> load_rotation(const std::string& path) {
  OSCAR_ASSIGN(io::OscarFile file,
               io::OscarFile::open(path, kFormat, kRotationFormatVersion, "rotation file", kRemedy));
  auto set = std::make_shared<RotationSet>();
  OSCAR_ASSIGN(const std::string method_text, file.text("method"));
  const std::optional<Method> method = parse_method(method_text);
  if (!method) {
    return make_error(ErrorCode::kUnsupported,
                      path + ": method " + io::quote(method_text) + " is unknown to oscar " OSCAR_VERSION_STRING);
  }
  set->method = *method;
  OSCAR_ASSIGN(const std::string geometry_text, file.text("geometry"));
  Result<ModelGeometry> geometry = geometry_from_json(geometry_text);
  if (!geometry) return file.bad(geometry.error().message);
  set->geometry = *std::move(geometry);
  OSCAR_ASSIGN(set->max_context, file.number("max_context", 0));
  OSCAR_ASSIGN(set->num_tokens, file.number("num_tokens", 0));
  OSCAR_ASSIGN(set->corpus_hash, file.text("corpus_hash"));
  OSCAR_ASSIGN(set->producer, file.text("producer"));
  OSCAR_ASSIGN(set->composition, file.text("composition"));
  OSCAR_ASSIGN(set->content_hash, file.text(std::string(io::kContentHashField)));
  OSCAR_TRY(read_layers(file, *set));
  OSCAR_TRY(file.finish());
  if (const auto fault = rotation_fault(*set)) return file.bad(*fault);
  return set;
}

}  // namespace oscar
