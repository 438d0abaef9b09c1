#include "torch/convert.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <oscar/version.hpp>
#include <utility>
#include <vector>

#include "rotation/rotation_check.hpp"
#include "rotation/rotation_file.hpp"
#include "rotation/transform_check.hpp"
#include "torch/published_writer.hpp"

namespace oscar::torch {
namespace {

constexpr std::string_view kHadamard = "hadamard";
constexpr std::string_view kProducer = "oscar " OSCAR_VERSION_STRING " convert";
// Prefixes of `objective`: what the eigenvectors are those of. The rest names the composition.
constexpr std::string_view kKeyMoment = "qqt_";
constexpr std::string_view kValueMoment = "sst_";

std::string scientific(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1e", value);
  return text.data();
}

std::string without_prefix(const std::string& objective) {
  if (objective.empty()) return "unknown";
  for (const std::string_view prefix : {kKeyMoment, kValueMoment}) {
    if (objective.starts_with(prefix)) return objective.substr(prefix.size());
  }
  return objective;
}

// For the eye: "r_h_pbr", or both when the sides differ.
std::string composition_of(const PublishedFile& keys, const PublishedFile& values) {
  const std::string key = without_prefix(keys.objective());
  const std::string value = without_prefix(values.objective());
  return key == value ? key : key + ", " + value;
}

bool is_hadamard(const std::vector<float>& matrix, int width) {
  constexpr double kTolerance = 1e-5;  // float32 leaves 1e-8 at the sizes of heads
  return std::ranges::all_of(
      matrix, [&](float value) { return std::abs(std::abs(value) - 1 / std::sqrt(width)) <= kTolerance; });
}

// One side's file, read for a model.
class SideReader {
 public:
  SideReader(PublishedFile& file, float clip_ratio) : file_(file), clip_ratio_(clip_ratio) {}

  bool per_head() const { return per_head_; }  // whether any layer was
  const PublishedFile& file() const { return file_; }

  Status check_layers(const ModelGeometry& geometry) const {
    for (const auto& [index, layer] : file_.layers()) {
      if (static_cast<std::size_t>(index) >= geometry.layers.size()) {
        return mismatch("holds layer " + std::to_string(index) + ", the model has " +
                        std::to_string(geometry.layers.size()) + " layers");
      }
      if (geometry.layers[static_cast<std::size_t>(index)].kind == LayerKind::kNoCache) {
        return mismatch("holds layer " + std::to_string(index) + ", in which the model keeps no cache");
      }
    }
    for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
      if (geometry.layers[i].kind != LayerKind::kFull || file_.layers().contains(static_cast<int>(i))) continue;
      return mismatch("has no layer " + std::to_string(i) + ", which the model reads in full; it holds " +
                      std::to_string(file_.layers().size()) + " layers");
    }
    return {};
  }

  // The side of each KV head of layer `index`, one that check_layers passed.
  Result<std::vector<SideRotation>> read(int index, const LayerGeometry& geometry) {
    const PublishedLayer& layer = file_.layers().at(index);
    const std::string where = "layer " + std::to_string(index) + ": ";
    OSCAR_ASSIGN(std::vector<std::vector<float>> rotations, matrices(where + "rotation", layer.rotation, geometry));
    std::vector<std::vector<float>> inverses = rotations;  // R^-T = R
    if (layer.inverse_transposed) {
      OSCAR_ASSIGN(inverses, matrices(where + "q_rotation or o_rotation", *layer.inverse_transposed, geometry));
    }
    std::vector<SideRotation> sides(static_cast<std::size_t>(geometry.num_kv_heads));
    for (std::size_t h = 0; h < sides.size(); ++h) {
      SideRotation& side = sides[h];
      side.transform = rotations[std::min(h, rotations.size() - 1)];
      side.inverse_transposed = inverses[std::min(h, inverses.size() - 1)];
      side.clip_ratio = clip_ratio_;
      if (h < std::max(rotations.size(), inverses.size())) {
        OSCAR_TRY(check(side, where + "KV head " + std::to_string(h) + ": ", geometry.head_dim,
                        layer.inverse_transposed.has_value()));
      }
    }
    return sides;
  }

 private:
  tl::unexpected<Error> bad(const std::string& reason) const {
    return make_error(ErrorCode::kBadInput, file_.path() + ": " + reason);
  }
  tl::unexpected<Error> mismatch(const std::string& reason) const {
    return make_error(ErrorCode::kMismatch,
                      file_.path() + ": " + reason + "; it was made for another model, name that one with -m");
  }

  // One matrix [head_dim, head_dim], or one a KV head.
  Result<std::vector<std::vector<float>>> matrices(const std::string& what, const Tensor& tensor,
                                                   const LayerGeometry& geometry) {
    const std::int64_t width = geometry.head_dim;
    const bool one_a_head = tensor.shape == io::Shape{geometry.num_kv_heads, width, width};
    if (!one_a_head && tensor.shape != io::Shape{width, width}) {
      return mismatch(what + " is " + io::shape_text(tensor.shape) + ", the model has head_dim " +
                      std::to_string(width) + " and " + std::to_string(geometry.num_kv_heads) + " KV heads");
    }
    OSCAR_ASSIGN(const std::vector<float> values, file_.read(tensor));
    per_head_ = per_head_ || one_a_head;
    const auto size = static_cast<std::ptrdiff_t>(width * width);
    std::vector<std::vector<float>> out;
    for (auto at = values.begin(); at != values.end(); at += size) out.emplace_back(at, at + size);
    return out;
  }

  Status check(const SideRotation& side, const std::string& where, int width, bool has_inverse) const {
    const double error = residual(side.transform, side.inverse_transposed, width);
    if (error <= kMaxResidual) {
      if (file_.objective() != kHadamard || is_hadamard(side.transform, width)) return {};
      return bad(where + "the objective is 'hadamard' but the rotation is no Hadamard matrix; fetch the file anew");
    }
    const std::string limit = scientific(error) + ", the limit is " + scientific(kMaxResidual);
    if (has_inverse) {
      return bad(where + "the inverse does not fit the rotation: |R R^-1 - I| is " + limit + "; fit the file again");
    }
    return bad(where + "the rotation is not orthogonal: |R R^T - I| is " + limit +
               "; fit the file again, and save it in float32");
  }

  PublishedFile& file_;
  float clip_ratio_;
  bool per_head_ = false;
};

// What holds between the two files.
Status check_pair(const PublishedFile& keys, const PublishedFile& values) {
  if (keys.objective().starts_with(kValueMoment) && values.objective().starts_with(kKeyMoment)) {
    return make_error(ErrorCode::kMismatch, keys.path() + " holds rotations of values ('" + keys.objective() +
                                                "') and " + values.path() + " those of keys ('" + values.objective() +
                                                "'); name the keys' file first");
  }
  for (const auto& [one, other] : {std::pair(&keys, &values), std::pair(&values, &keys)}) {
    for (const auto& [index, layer] : one->layers()) {
      if (other->layers().contains(index)) continue;
      return make_error(ErrorCode::kMismatch, other->path() + " has no layer " + std::to_string(index) + ", which " +
                                                  one->path() + " has; name two files of one calibration");
    }
  }
  return {};
}

Status check_key_mean(const PublishedFile& keys, bool drop) {
  if (drop) return {};
  for (const auto& [index, layer] : keys.layers()) {
    if (!layer.key_mean) continue;
    return make_error(ErrorCode::kUnsupported,
                      keys.path() + ": layer " + std::to_string(index) +
                          " subtracts a mean (k_mean) before it rotates, which the rotation file cannot hold; "
                          "--drop-key-mean converts without it (logits stay exact, the error of two bits grows), or "
                          "use `oscar calibrate`");
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<const RotationSet>> from_published(PublishedFile& keys, PublishedFile& values,
                                                          const ModelGeometry& geometry,
                                                          const FromPublishedOptions& options) {
  OSCAR_TRY(check_pair(keys, values));
  OSCAR_TRY(check_key_mean(keys, options.drop_key_mean));
  SideReader key_reader(keys, options.key_clip_ratio);
  SideReader value_reader(values, options.value_clip_ratio);
  OSCAR_TRY(key_reader.check_layers(geometry));
  OSCAR_TRY(value_reader.check_layers(geometry));

  auto set = std::make_shared<RotationSet>();
  set->geometry = geometry;
  set->max_context = geometry.context_length;
  set->num_tokens = std::max(keys.num_tokens(), values.num_tokens());
  set->corpus_hash = keys.corpus_hash().empty() ? values.corpus_hash() : keys.corpus_hash();
  set->producer = kProducer;
  set->composition = composition_of(keys, values);
  for (const auto& [index, ignored] : keys.layers()) {
    const LayerGeometry& layer = geometry.layers[static_cast<std::size_t>(index)];
    OSCAR_ASSIGN(std::vector<SideRotation> key_sides, key_reader.read(index, layer));
    OSCAR_ASSIGN(std::vector<SideRotation> value_sides, value_reader.read(index, layer));
    std::vector<HeadRotation>& heads = set->layers[index].heads;
    heads.resize(key_sides.size());
    for (std::size_t h = 0; h < heads.size(); ++h) {
      heads[h].key = std::move(key_sides[h]);
      heads[h].value = std::move(value_sides[h]);
    }
  }
  const bool per_head = key_reader.per_head() || value_reader.per_head();
  set->method = per_head ? Method::kPublishedPerHead : Method::kPublished;
  if (!per_head && keys.objective() == kHadamard && values.objective() == kHadamard) {
    set->method = Method::kHadamard;
    set->composition = "h";
  }
  if (const auto fault = rotation_fault(*set)) {
    return make_error(ErrorCode::kBadInput,
                      keys.path() + " and " + values.path() + " cannot be used: " + *fault + "; fetch them anew");
  }
  set->content_hash = rotation_hash(*set);
  return set;
}

namespace {

std::string objective_of(const RotationSet& set, std::string_view moment) {
  if (set.method == Method::kHadamard) return std::string(kHadamard);
  return std::string(moment) + io::valid_utf8(set.composition);
}

bool shared_by_heads(const RotationSet& set, SideRotation HeadRotation::*side) {
  return std::ranges::all_of(set.layers, [&](const auto& entry) {
    const std::vector<HeadRotation>& heads = entry.second.heads;
    return std::ranges::all_of(heads, [&](const HeadRotation& head) {
      return (head.*side).transform == (heads.front().*side).transform &&
             (head.*side).inverse_transposed == (heads.front().*side).inverse_transposed;
    });
  });
}

PublishedContent content_of(const RotationSet& set, SideRotation HeadRotation::*side, std::string_view moment,
                            std::string_view inverse_name) {
  PublishedContent content;
  content.per_head = set.method == Method::kPublishedPerHead || !shared_by_heads(set, side);
  content.objective = objective_of(set, moment);
  content.inverse_name = inverse_name;
  content.model_name = io::valid_utf8(set.geometry.name);
  content.fitter = io::valid_utf8(set.producer);
  content.corpus_hash = io::valid_utf8(set.corpus_hash);
  content.num_tokens = set.num_tokens;
  bool orthogonal = true;
  for (const auto& [index, layer] : set.layers) {
    PublishedLayerContent& out = content.layers[index];
    out.width = set.geometry.layers[static_cast<std::size_t>(index)].head_dim;
    const auto num_matrices = content.per_head ? static_cast<std::ptrdiff_t>(layer.heads.size()) : 1;
    for (const HeadRotation& head : std::span(layer.heads).first(static_cast<std::size_t>(num_matrices))) {
      out.rotation.push_back((head.*side).transform);
      out.inverse_transposed.push_back((head.*side).inverse_transposed);
      orthogonal = orthogonal && (head.*side).transform == (head.*side).inverse_transposed;
    }
  }
  content.format_version = !orthogonal ? 3 : content.per_head ? 2 : 1;
  if (orthogonal) {
    for (auto& [index, layer] : content.layers) layer.inverse_transposed.clear();
  }
  return content;
}

}  // namespace

Result<PublishedPair> to_published(const RotationSet& set) {
  const std::string method = "method " + std::string(method_name(set.method));
  if (set.quantizer() != Quantizer::kMinMax) {
    return make_error(ErrorCode::kUnsupported,
                      method +
                          " has no published form: it removes a mean that turns with position, and its rows are "
                          "quantised another way than the published code does; calibrate with --method published "
                          "or published-per-head");
  }
  if (set.method == Method::kNaive) {
    return make_error(ErrorCode::kUnsupported,
                      method +
                          " has no rotation; the published code does without files for that, or convert a "
                          "rotation file of method hadamard, published or published-per-head");
  }
  PublishedPair pair;
  OSCAR_ASSIGN(pair.key_archive,
               published_archive(content_of(set, &HeadRotation::key, kKeyMoment, "q_rotation"), "k_rotation"));
  OSCAR_ASSIGN(pair.value_archive,
               published_archive(content_of(set, &HeadRotation::value, kValueMoment, "o_rotation"), "v_rotation"));
  return pair;
}

}  // namespace oscar::torch
