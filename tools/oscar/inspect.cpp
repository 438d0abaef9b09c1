// `oscar inspect`: what is in a rotation file, a statistics file or a GGUF model.

#include <fmt/format.h>

#include <Eigen/Dense>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <oscar/covariance.hpp>

#include "options.hpp"
#include "outcome.hpp"
#include "rotation/transform_check.hpp"

namespace oscar::tool {
namespace {

using DoubleMatrix = Eigen::Map<const Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;

struct InspectOptions {
  std::string path;
  Format format = Format::kTable;
};

enum class FileKind { kGguf, kStatistics, kRotation };

// By the first bytes; what is neither GGUF nor statistics is left to the rotation reader, whose message says what is
// wrong.
FileKind kind_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  constexpr std::size_t kPeekBytes = 1 << 20;  // safetensors keeps its metadata at the front of the header
  std::string head(kPeekBytes, '\0');
  in.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<std::size_t>(in.gcount()));
  if (head.starts_with("GGUF")) return FileKind::kGguf;
  return head.find("oscar-statistics") != std::string::npos ? FileKind::kStatistics : FileKind::kRotation;
}

std::string_view kind_name(LayerKind kind) {
  switch (kind) {
    case LayerKind::kFull: return "full";
    case LayerKind::kSlidingWindow: return "sliding";
    case LayerKind::kNoCache: return "none";
  }
  return "?";
}

// "0-4,6" of layers that share a line.
std::string ranges_text(const std::vector<std::size_t>& indices) {
  std::string out;
  for (std::size_t i = 0; i < indices.size();) {
    std::size_t end = i;
    while (end + 1 < indices.size() && indices[end + 1] == indices[end] + 1) ++end;
    if (!out.empty()) out += ',';
    out += end == i ? fmt::format("{}", indices[i]) : fmt::format("{}-{}", indices[i], indices[end]);
    i = end + 1;
  }
  return out;
}

nlohmann::ordered_json geometry_json(const ModelGeometry& geometry) {
  auto layers = nlohmann::ordered_json::array();
  for (const LayerGeometry& layer : geometry.layers) {
    layers.push_back({{"kind", kind_name(layer.kind)},
                      {"num_qo_heads", layer.num_qo_heads},
                      {"num_kv_heads", layer.num_kv_heads},
                      {"head_dim", layer.head_dim},
                      {"sliding_window", layer.sliding_window}});
  }
  return {{"architecture", geometry.architecture},
          {"name", geometry.name},
          {"context_length", geometry.context_length},
          {"fingerprint", geometry.fingerprint},
          {"layers", layers}};
}

std::string geometry_text(const ModelGeometry& geometry) {
  std::string out = fmt::format("architecture  {}\nname          {}\ncontext       {} tokens\nfingerprint   {}\n\n",
                                geometry.architecture, geometry.name, geometry.context_length, geometry.fingerprint);
  Table table({"layers", "cache", "query heads", "KV heads", "head_dim", "window"}, 2);
  const auto same = [](const LayerGeometry& a, const LayerGeometry& b) {
    return a.kind == b.kind && a.num_qo_heads == b.num_qo_heads && a.num_kv_heads == b.num_kv_heads &&
           a.head_dim == b.head_dim && a.sliding_window == b.sliding_window;
  };
  std::vector<std::pair<LayerGeometry, std::vector<std::size_t>>> groups;
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    auto group = std::ranges::find_if(groups, [&](const auto& g) { return same(g.first, geometry.layers[i]); });
    if (group == groups.end()) group = groups.insert(groups.end(), {geometry.layers[i], {}});
    group->second.push_back(i);
  }
  for (const auto& [layer, indices] : groups) {
    table.add({ranges_text(indices), std::string(kind_name(layer.kind)), std::to_string(layer.num_qo_heads),
               std::to_string(layer.num_kv_heads), std::to_string(layer.head_dim),
               std::to_string(layer.sliding_window)});
  }
  return out + table.text();
}

Result<int> inspect_rotation(const InspectOptions& options) {
  OSCAR_ASSIGN(const auto set, load_rotation(options.path));
  Table table({"layer", "KV heads", "K condition", "V condition", "|page mean|"}, 1);
  auto layers = nlohmann::ordered_json::array();
  for (const auto& [index, layer] : set->layers) {
    const int head_dim = set->geometry.layers[static_cast<std::size_t>(index)].head_dim;
    double key = 1;
    double value = 1;
    double mean = 0;
    auto heads = nlohmann::ordered_json::array();
    for (const HeadRotation& head : layer.heads) {
      const double head_key = condition_number(head.key.transform, head_dim);
      const double head_value = condition_number(head.value.transform, head_dim);
      double square = 0;
      for (const double m : head.page_mean) square += m * m;
      heads.push_back({{"key_condition", head_key},
                       {"value_condition", head_value},
                       {"page_mean_norm", std::sqrt(square)},
                       {"key_bits", head.key_bits},
                       {"value_bits", head.value_bits}});
      key = std::max(key, head_key);
      value = std::max(value, head_value);
      mean = std::max(mean, std::sqrt(square));
    }
    table.add({std::to_string(index), std::to_string(layer.heads.size()), fmt::format("{:.1f}", key),
               fmt::format("{:.1f}", value), fmt::format("{:.3g}", mean)});
    layers.push_back({{"layer", index}, {"rotary_dim", layer.rope.rotary_dim}, {"heads", heads}});
  }
  if (options.format == Format::kJson) {
    print_json(nlohmann::ordered_json{{"kind", "rotation"},
                                      {"method", method_name(set->method)},
                                      {"content_hash", set->content_hash},
                                      {"max_context", set->max_context},
                                      {"num_tokens", set->num_tokens},
                                      {"corpus_hash", set->corpus_hash},
                                      {"composition", set->composition},
                                      {"producer", set->producer},
                                      {"geometry", geometry_json(set->geometry)},
                                      {"layers", layers}});
    return kExitDone;
  }
  print(
      fmt::format(
          "rotation file of {} ({})\nmethod        {}\ncomposition   {}\ncalibrated on {} tokens, for contexts to {}\n"
          "corpus        {}\nproducer      {}\nhash          {}\n\n",
          set->geometry.name, set->geometry.architecture, method_name(set->method), set->composition, set->num_tokens,
          set->max_context, set->corpus_hash, set->producer, set->content_hash) +
      table.text() + "\nconditions and page means: the largest of a layer's heads\n");
  return kExitDone;
}

// Channels' worth of energy: (sum of eigenvalues)^2 / sum of their squares, D for white data, 1 for a single direction.
double effective_rank(const std::vector<double>& moment, int size) {
  const DoubleMatrix m(moment.data(), size, size);
  const double squares = m.squaredNorm();
  return squares > 0 ? m.trace() * m.trace() / squares : 0;
}

Result<int> inspect_statistics(const InspectOptions& options) {
  OSCAR_ASSIGN(const ModelStatistics statistics, load_statistics(options.path));
  Table table({"layer", "KV heads", "K mean share", "K rank", "V rank", "Q rank"}, 1);
  auto layers = nlohmann::ordered_json::array();
  for (const auto& [index, layer] : statistics.layers) {
    std::array<double, 4> sums{};
    for (const HeadStatistics& head : layer.heads) {
      const int d = head.head_dim;
      const double energy = DoubleMatrix(head.key_moment.data(), d, d).trace();
      double mean_square = 0;
      for (const double s : head.pre_rope_key_sum) mean_square += s * s;
      const double share = head.num_keys > 0 && energy > 0 ? mean_square / head.num_keys / energy : 0;
      sums[0] += share;
      sums[1] += effective_rank(head.key_moment, d);
      sums[2] += effective_rank(head.value_moment, d);
      sums[3] += effective_rank(head.query_moment, d);
    }
    const auto heads = static_cast<double>(std::max<std::size_t>(1, layer.heads.size()));
    table.add({std::to_string(index), std::to_string(layer.heads.size()), fmt::format("{:.2f}", sums[0] / heads),
               fmt::format("{:.1f}", sums[1] / heads), fmt::format("{:.1f}", sums[2] / heads),
               fmt::format("{:.1f}", sums[3] / heads)});
    layers.push_back({{"layer", index},
                      {"kv_heads", layer.heads.size()},
                      {"key_mean_share", sums[0] / heads},
                      {"key_rank", sums[1] / heads},
                      {"value_rank", sums[2] / heads},
                      {"query_rank", sums[3] / heads}});
  }
  if (options.format == Format::kJson) {
    print_json(nlohmann::ordered_json{{"kind", "statistics"},
                                      {"num_tokens", statistics.num_tokens},
                                      {"corpus_hash", statistics.corpus_hash},
                                      {"geometry", geometry_json(statistics.geometry)},
                                      {"layers", layers}});
    return kExitDone;
  }
  print(fmt::format("statistics of {} ({})\ntokens        {}\ncorpus        {}\n\n", statistics.geometry.name,
                    statistics.geometry.architecture, statistics.num_tokens, statistics.corpus_hash) +
        table.text() + "\nmean over heads; mean share: energy of the pre-RoPE mean; rank: channels' worth of energy\n");
  return kExitDone;
}

Result<int> inspect_model(const InspectOptions& options) {
  OSCAR_ASSIGN(const ModelGeometry geometry, read_gguf_geometry(options.path));
  if (options.format == Format::kJson) {
    nlohmann::ordered_json json = geometry_json(geometry);
    json["kind"] = "model";
    print_json(json);
  } else {
    print(geometry_text(geometry));
  }
  return kExitDone;
}

Result<int> run_inspect(const InspectOptions& options) {
  switch (kind_of(options.path)) {
    case FileKind::kGguf: return inspect_model(options);
    case FileKind::kStatistics: return inspect_statistics(options);
    case FileKind::kRotation: return inspect_rotation(options);
  }
  return kExitDone;
}

}  // namespace

Verb add_inspect(CLI::App& app) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* verb = app.add_subcommand("inspect", "Show a rotation file, a statistics file or a model's geometry");
  verb->add_option("file", options->path, "Rotation file, statistics file or GGUF model")
      ->required()
      ->type_name("FILE");
  add_format_option(*verb, options->format);
  return {verb, [options] { return run_inspect(*options); }};
}

}  // namespace oscar::tool
