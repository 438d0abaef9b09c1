#include "rivals/simulator.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>

#include "rivals/feedback.hpp"
#include "rivals/kivi.hpp"
#include "rivals/lloyd_max.hpp"

namespace oscar::rivals {
namespace {

constexpr double kMixedShare = 0.25;  // of the KV heads that get 3-bit keys in ours-mix25

using HeadIndex = std::pair<int, std::size_t>;  // layer, KV head

// The heads with the largest errors.
std::set<HeadIndex> worst_heads(const std::map<int, std::vector<double>>& errors, double share) {
  std::vector<std::pair<double, HeadIndex>> order;
  for (const auto& [layer, heads] : errors) {
    for (std::size_t h = 0; h < heads.size(); ++h) order.push_back({heads[h], {layer, h}});
  }
  std::ranges::sort(order, std::greater<>());
  order.resize(static_cast<std::size_t>(std::lround(share * static_cast<double>(order.size()))));
  std::set<HeadIndex> worst;
  for (const auto& [error, head] : order) worst.insert(head);
  return worst;
}

FeedbackOptions key_options(std::string_view name, bool is_worst) {
  if (name == "ours-k3" || (name == "ours-mix25" && is_worst)) return {.bits = 3};
  if (name == "ours-k4") return {.bits = 4};
  if (name == "ours-nom") return {.zero_point = false};
  return {};
}

FeedbackOptions value_options(std::string_view name) { return {.bits = name == "ours-1.6" ? 1 : 2}; }

Status check_inputs(std::string_view name, const RivalInputs& inputs) {
  const Rival* rival = find_rival(name);
  const std::string who = "method " + std::string(name);
  if (rival == nullptr) return make_error(ErrorCode::kInvalidArgument, who + " is not one that can be simulated");
  if (inputs.geometry == nullptr) return make_error(ErrorCode::kInvalidArgument, who + " needs the model's geometry");
  if (!rival->needs_rotation) return {};
  if (inputs.rotation == nullptr || inputs.rotation->method != rival->rotation) {
    return make_error(ErrorCode::kInvalidArgument,
                      who + " needs a rotation of method " + std::string(method_name(rival->rotation)));
  }
  for (const auto& [index, layer] : inputs.rotation->layers) {
    const auto known = inputs.key_errors.find(index);
    if (name != "ours-mix25" || (known != inputs.key_errors.end() && known->second.size() == layer.heads.size()))
      continue;
    return make_error(ErrorCode::kInvalidArgument, who + " needs the key error of every KV head of layer " +
                                                       std::to_string(index) + ", from statistics of the model");
  }
  return check_rotation(*inputs.rotation, *inputs.geometry);
}

}  // namespace

const std::vector<Rival>& rivals() {
  static const std::vector<Rival> kRivals = {
      {.name = "kivi"},
      {.name = "turbo2"},
      {.name = "turbo3"},
      {.name = "published-lloyd-max", .needs_rotation = true, .rotation = Method::kPublished},
      {.name = "ours-k3", .needs_rotation = true},
      {.name = "ours-k4", .needs_rotation = true},
      {.name = "ours-mix25", .needs_rotation = true},
      {.name = "ours-1.6", .needs_rotation = true},
      {.name = "ours-nom", .needs_rotation = true},
  };
  return kRivals;
}

const Rival* find_rival(std::string_view name) {
  const auto found = std::ranges::find(rivals(), name, &Rival::name);
  return found != rivals().end() ? &*found : nullptr;
}

Result<std::shared_ptr<const Simulator>> Simulator::make(std::string_view name, const RivalInputs& inputs) {
  OSCAR_TRY(check_inputs(name, inputs));
  auto simulator = std::make_shared<Simulator>();
  simulator->rotation_ = inputs.rotation;
  const bool is_ours = find_rival(name)->needs_rotation && find_rival(name)->rotation == Method::kOurs;
  const std::set<HeadIndex> worst = worst_heads(inputs.key_errors, kMixedShare);
  for (std::size_t i = 0; i < inputs.geometry->layers.size(); ++i) {
    const LayerGeometry& geometry = inputs.geometry->layers[i];
    const int index = static_cast<int>(i), dim = geometry.head_dim;
    if (geometry.kind != LayerKind::kFull) continue;
    Layer layer{.head_dim = dim, .heads = {}};
    const LayerRotation* rotation = nullptr;
    if (find_rival(name)->needs_rotation) {
      const auto found = inputs.rotation->layers.find(index);
      if (found == inputs.rotation->layers.end()) continue;  // keeps its 16-bit cache
      rotation = &found->second;
    }
    for (std::size_t h = 0; h < static_cast<std::size_t>(geometry.num_kv_heads); ++h) {
      Head& head = layer.heads.emplace_back();
      if (name == "kivi") {
        head.key = std::make_unique<KiviKeys>(dim);
        head.value = std::make_unique<KiviValues>(dim);
      } else if (is_ours) {
        const HeadRotation& fitted = rotation->heads[h];
        const FeedbackOptions keys = key_options(name, worst.contains({index, h}));
        head.key = std::make_unique<FeedbackRows>(fitted, rotation->rope, true, dim, keys, inputs.isa);
        head.value =
            std::make_unique<FeedbackRows>(fitted, rotation->rope, false, dim, value_options(name), inputs.isa);
      } else if (rotation != nullptr) {
        head.key = std::make_unique<PublishedLloydMaxRows>(rotation->heads[h].key, dim, inputs.isa);
        head.value = std::make_unique<PublishedLloydMaxRows>(rotation->heads[h].value, dim, inputs.isa);
      } else {
        const int bits = name == "turbo3" ? 3 : 2;
        head.key = std::make_unique<TurboRows>(dim, bits, 2 * i, inputs.isa);  // one rotation a layer and side
        head.value = std::make_unique<TurboRows>(dim, bits, 2 * i + 1, inputs.isa);
      }
    }
    simulator->layers_.emplace(index, std::move(layer));
  }
  return simulator;
}

void Simulator::read_back(int index, std::int64_t first, int num_rows, float* k, float* v) const {
  const auto found = layers_.find(index);
  if (found == layers_.end()) return;
  const Layer& layer = found->second;
  const auto dim = static_cast<std::size_t>(layer.head_dim), width = layer.heads.size() * dim;
  std::vector<float> rows(static_cast<std::size_t>(num_rows) * dim);
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    for (const bool is_key : {true, false}) {
      float* side = (is_key ? k : v) + h * dim;
      for (std::size_t i = 0; i < static_cast<std::size_t>(num_rows); ++i)
        std::copy_n(side + i * width, dim, rows.data() + i * dim);
      (is_key ? layer.heads[h].key : layer.heads[h].value)->read_back(first, num_rows, rows.data());
      for (std::size_t i = 0; i < static_cast<std::size_t>(num_rows); ++i)
        std::copy_n(rows.data() + i * dim, dim, side + i * width);
    }
  }
}

int Simulator::group_tokens() const {
  int group = 1;
  for (const auto& [index, layer] : layers_) {
    for (const Head& head : layer.heads)
      group = std::max({group, head.key->group_tokens(), head.value->group_tokens()});
  }
  return group;
}

double Simulator::bits_per_element() const {
  double bits = 0, elements = 0;
  for (const auto& [index, layer] : layers_) {
    for (const Head& head : layer.heads) {
      bits += layer.head_dim * (head.key->bits_per_element() + head.value->bits_per_element()) / 2;
      elements += layer.head_dim;
    }
  }
  return elements > 0 ? bits / elements : 0;
}

double Simulator::bits_per_element(int sink, int recent, std::int64_t context) const {
  const auto exact = static_cast<double>(std::min<std::int64_t>(context, std::int64_t{sink} + recent));
  return bits_per_element() + 16 * exact / static_cast<double>(context);
}

}  // namespace oscar::rivals
