// Statistics files: docs/format-files.md.

#include <array>
#include <oscar/covariance.hpp>
#include <oscar/version.hpp>
#include <span>

#include "covariance/model_json.hpp"
#include "covariance/statistics_check.hpp"
#include "io/oscar_file.hpp"

namespace oscar {
namespace {

constexpr std::string_view kFormat = "oscar-statistics";
constexpr std::string_view kRemedy = "collect the statistics again with `oscar calibrate`";

using VectorMember = std::vector<double> HeadStatistics::*;
enum class Inner { kMatrix, kVector, kBlockRows, kBlocks };
struct Field {
  const char* name;
  VectorMember member;
  Inner inner;
};
constexpr std::array<Field, 8> kFields{{
    {"query_moment", &HeadStatistics::query_moment, Inner::kMatrix},
    {"pre_rope_key_sum", &HeadStatistics::pre_rope_key_sum, Inner::kVector},
    {"key_moment", &HeadStatistics::key_moment, Inner::kMatrix},
    {"block_key_sum", &HeadStatistics::block_key_sum, Inner::kBlockRows},
    {"block_count", &HeadStatistics::block_count, Inner::kBlocks},
    {"value_sum", &HeadStatistics::value_sum, Inner::kVector},
    {"value_moment", &HeadStatistics::value_moment, Inner::kMatrix},
    {"weighted_value_moment", &HeadStatistics::weighted_value_moment, Inner::kMatrix},
}};
constexpr const char* kOutputGram = "output_gram";

io::Shape inner_shape(Inner inner, std::int64_t head_dim, std::int64_t num_blocks) {
  switch (inner) {
    case Inner::kMatrix: return {head_dim, head_dim};
    case Inner::kVector: return {head_dim};
    case Inner::kBlockRows: return {num_blocks, head_dim};
    case Inner::kBlocks: return {num_blocks};
  }
  return {};
}

std::string prefix(int layer) { return "layers." + std::to_string(layer) + "."; }

void add_heads(io::SafetensorsContent& content, const std::string& name, const std::vector<HeadStatistics>& heads,
               VectorMember member, const io::Shape& inner) {
  io::Shape shape{static_cast<std::int64_t>(heads.size())};
  shape.insert(shape.end(), inner.begin(), inner.end());
  io::add_tensor<double>(content, name, shape);
  for (const HeadStatistics& head : heads) io::add_part<double>(content, name, head.*member);
}

void add_layer(io::SafetensorsContent& content, int index, const LayerStatistics& layer) {
  const HeadStatistics& first = layer.heads.front();
  const auto num_heads = static_cast<std::int64_t>(layer.heads.size());
  const auto num_blocks = static_cast<std::int64_t>(first.block_count.size());
  for (const Field& field : kFields) {
    add_heads(content, prefix(index) + field.name, layer.heads, field.member,
              inner_shape(field.inner, first.head_dim, num_blocks));
  }
  if (!first.output_gram.empty()) {
    add_heads(content, prefix(index) + kOutputGram, layer.heads, &HeadStatistics::output_gram,
              inner_shape(Inner::kMatrix, first.head_dim, num_blocks));
  }
  const std::string counts = prefix(index) + "counts";
  io::add_tensor<double>(content, counts, {num_heads, 3});
  for (const HeadStatistics& head : layer.heads) {
    for (const double* count : {&head.num_queries, &head.num_keys, &head.num_weighted}) {
      io::add_part<double>(content, counts, std::span(count, 1));
    }
  }
  const std::string frequencies = prefix(index) + "inv_freq";
  io::add_tensor<double>(content, frequencies, {static_cast<std::int64_t>(layer.rope.inv_freq.size())});
  io::add_part<double>(content, frequencies, layer.rope.inv_freq);
}

Result<LayerStatistics> read_layer(io::OscarFile& file, int index, const LayerGeometry& geometry, RopeSpec rope) {
  LayerStatistics layer;
  layer.rope = std::move(rope);
  OSCAR_ASSIGN(layer.rope.inv_freq, file.tensor<double>(prefix(index) + "inv_freq", {layer.rope.rotary_dim / 2}));
  layer.heads.resize(static_cast<std::size_t>(geometry.num_kv_heads));
  OSCAR_ASSIGN(const io::Shape blocks, file.shape(prefix(index) + "block_count"));
  const std::int64_t num_blocks = blocks.empty() ? 0 : blocks.back();
  const auto read_field = [&](const char* name, VectorMember member, Inner inner) -> Status {
    OSCAR_ASSIGN(auto values, file.heads<double>(prefix(index) + name, geometry.num_kv_heads,
                                                 inner_shape(inner, geometry.head_dim, num_blocks)));
    for (std::size_t h = 0; h < layer.heads.size(); ++h) layer.heads[h].*member = std::move(values[h]);
    return {};
  };
  for (const Field& field : kFields) OSCAR_TRY(read_field(field.name, field.member, field.inner));
  if (file.has(prefix(index) + kOutputGram)) {
    OSCAR_TRY(read_field(kOutputGram, &HeadStatistics::output_gram, Inner::kMatrix));
  }
  OSCAR_ASSIGN(const auto counts, file.heads<double>(prefix(index) + "counts", geometry.num_kv_heads, {3}));
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    HeadStatistics& head = layer.heads[h];
    head.head_dim = geometry.head_dim;
    head.num_queries = counts[h][0];
    head.num_keys = counts[h][1];
    head.num_weighted = counts[h][2];
  }
  return layer;
}

}  // namespace

Status save_statistics(const ModelStatistics& statistics, const std::string& path) {
  if (const auto fault = statistics_fault(statistics)) {
    return make_error(ErrorCode::kInvalidArgument, path + ": the statistics cannot be saved: " + *fault);
  }
  io::SafetensorsContent content;
  std::map<int, RopeSpec> ropes;
  for (const auto& [index, layer] : statistics.layers) {
    ropes[index] = layer.rope;
    add_layer(content, index, layer);
  }
  content.metadata = {
      {"format", std::string(kFormat)},
      {"format_version", std::to_string(kStatisticsFormatVersion)},
      {"geometry", geometry_to_json(statistics.geometry)},
      {"layers", ropes_to_json(ropes)},
      {"num_tokens", std::to_string(statistics.num_tokens)},
      {"corpus_hash", io::valid_utf8(statistics.corpus_hash)},
      {"producer", "oscar " OSCAR_VERSION_STRING},
  };
  content.metadata[std::string(io::kContentHashField)] = io::content_hash(content);
  return io::write_safetensors(content, path);
}

Result<ModelStatistics> load_statistics(const std::string& path) {
  OSCAR_ASSIGN(io::OscarFile file,
               io::OscarFile::open(path, kFormat, kStatisticsFormatVersion, "statistics file", kRemedy));
  ModelStatistics statistics;
  OSCAR_ASSIGN(const std::string geometry_text, file.text("geometry"));
  Result<ModelGeometry> geometry = geometry_from_json(geometry_text);
  if (!geometry) return file.bad(geometry.error().message);
  statistics.geometry = *std::move(geometry);
  OSCAR_ASSIGN(const std::string layers_text, file.text("layers"));
  Result<std::map<int, RopeSpec>> ropes = ropes_from_json(layers_text, statistics.geometry);
  if (!ropes) return file.bad(ropes.error().message);
  OSCAR_ASSIGN(statistics.num_tokens, file.number("num_tokens", 0));
  OSCAR_ASSIGN(statistics.corpus_hash, file.text("corpus_hash"));
  for (auto& [index, rope] : *ropes) {
    const LayerGeometry& layer = statistics.geometry.layers[static_cast<std::size_t>(index)];
    OSCAR_ASSIGN(statistics.layers[index], read_layer(file, index, layer, std::move(rope)));
  }
  OSCAR_TRY(file.finish());
  if (const auto fault = statistics_fault(statistics)) return file.bad(*fault);
  return statistics;
}

}  // namespace oscar
