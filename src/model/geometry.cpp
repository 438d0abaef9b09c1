// ModelGeometry from GGUF metadata. What a model's keys do not say (which layers slide, where llama.cpp decides by
// architecture) is the common default here; the sampler refines it from the model's own graph.

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <limits>
#include <oscar/model.hpp>
#include <span>
#include <utility>

#include "io/hash.hpp"
#include "model/gguf.hpp"

namespace oscar {
namespace {

constexpr std::int64_t kMaxLayers = gguf::kMaxArray;
constexpr std::int64_t kMaxHeads = 4096;
constexpr std::int64_t kMaxHeadDim = 1 << 20;  // only to keep arithmetic sane; kLargestHeadDim is what is supported
constexpr int kHeadDimStep = 16;
constexpr int kLargestHeadDim = 256;

// Architectures whose sliding layers follow a fixed period that the file need not tell: of `period` layers one attends
// to everything, the first or the last. Period 1: every layer slides.
struct WindowPeriod {
  std::string_view architecture;
  int period;
  bool full_first;
};
constexpr std::array kWindowPeriods = {
    WindowPeriod{"gemma2", 2, false},  WindowPeriod{"gemma3", 6, false},      WindowPeriod{"gemma3n", 5, false},
    WindowPeriod{"cohere2", 4, false}, WindowPeriod{"gpt-oss", 2, false},     WindowPeriod{"exaone4", 4, false},
    WindowPeriod{"olmo2", 4, false},   WindowPeriod{"smallthinker", 4, true}, WindowPeriod{"llama4", 4, false},
};

// Typed access to the metadata of one file.
class Metadata {
 public:
  Metadata(const gguf::Header& header, const std::string& path) : header_(header), path_(path) {}

  tl::unexpected<Error> bad(const std::string& what) const {
    return make_error(ErrorCode::kBadInput, path_ + ": " + what);
  }
  tl::unexpected<Error> unsupported(const std::string& what) const {
    return make_error(ErrorCode::kUnsupported, path_ + ": " + what);
  }

  tl::unexpected<Error> unreadable(const std::string& tensor) const {
    return make_error(ErrorCode::kIo, path_ + ": tensor " + tensor + " cannot be read; check the disk");
  }

  Status set_architecture() {
    const gguf::Value* value = find("general.architecture");
    const auto* name = value != nullptr ? std::get_if<std::string>(value) : nullptr;
    if (name == nullptr) return bad("general.architecture is missing; this GGUF file is not a language model");
    const bool valid = !name->empty() && name->size() <= 64 && std::ranges::all_of(*name, [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
             c == '.';
    });
    if (!valid) return bad("general.architecture is not a name; the header is corrupt: download the file again");
    architecture_ = *name;
    return {};
  }
  const std::string& architecture() const { return architecture_; }
  std::string key(std::string_view suffix) const { return architecture_ + "." + std::string(suffix); }
  bool has(std::string_view suffix) const { return find(key(suffix)) != nullptr; }

  std::string text(std::string_view full_key) const {
    const gguf::Value* value = find(full_key);
    const auto* found = value != nullptr ? std::get_if<std::string>(value) : nullptr;
    std::string text = found != nullptr ? *found : std::string();
    // Shown on terminals: no control characters.
    std::ranges::replace_if(
        text, [](unsigned char c) { return c < ' ' || c == 0x7F; }, '?');
    return text;
  }

  // The integer under "<architecture>.<suffix>", `absent` when there is none.
  Result<std::int64_t> integer(std::string_view suffix, std::int64_t least, std::int64_t most,
                               std::int64_t absent) const {
    const gguf::Value* value = find(key(suffix));
    if (value == nullptr) return absent;
    const auto* number = std::get_if<std::int64_t>(value);
    if (number == nullptr)
      return bad(key(suffix) + " is not an integer; the header is corrupt: convert the model again");
    return in_range(suffix, *number, least, most);
  }

  // The same where a value may also come as one number a layer. [num_layers]
  Result<std::vector<std::int64_t>> per_layer(std::string_view suffix, std::size_t num_layers, std::int64_t least,
                                              std::int64_t most, std::int64_t absent) const {
    const gguf::Value* value = find(key(suffix));
    const auto* array = value != nullptr ? std::get_if<std::vector<std::int64_t>>(value) : nullptr;
    if (array == nullptr) {
      OSCAR_ASSIGN(const std::int64_t scalar, integer(suffix, least, most, absent));
      return std::vector<std::int64_t>(num_layers, scalar);
    }
    if (array->size() < num_layers) {
      return bad(key(suffix) + " has " + std::to_string(array->size()) + " entries for " + std::to_string(num_layers) +
                 " layers; the header is corrupt: convert the model again");
    }
    for (std::size_t i = 0; i < num_layers; ++i) OSCAR_TRY(in_range(suffix, (*array)[i], least, most));
    return std::vector<std::int64_t>(array->begin(), array->begin() + static_cast<std::ptrdiff_t>(num_layers));
  }

  const gguf::Value* find(std::string_view full_key) const {
    const auto found = header_.metadata.find(full_key);
    return found != header_.metadata.end() ? &found->second : nullptr;
  }

 private:
  Result<std::int64_t> in_range(std::string_view suffix, std::int64_t value, std::int64_t least,
                                std::int64_t most) const {
    if (value < least || value > most) {
      return bad(key(suffix) + " is " + std::to_string(value) + ", expected " + std::to_string(least) + " to " +
                 std::to_string(most) + "; the header is corrupt or not a language model's");
    }
    return value;
  }

  const gguf::Header& header_;
  const std::string& path_;
  std::string architecture_;
};

std::string layer_tensor(std::size_t layer, std::string_view name) {
  return "blk." + std::to_string(layer) + "." + std::string(name);
}

// The tensor that makes a layer's keys, null in a layer without attention.
const gguf::Tensor* key_tensor(const gguf::Header& header, std::size_t layer) {
  const auto at = [&](std::string_view name) {
    const auto found = header.tensors.find(layer_tensor(layer, name));
    return found != header.tensors.end() ? &found->second : nullptr;
  };
  if (const auto* separate = at("attn_k.weight")) return separate;
  // Linear-attention layers call their input projection attn_qkv as well; their convolution gives them away.
  return at("ssm_conv1d.weight") == nullptr ? at("attn_qkv.weight") : nullptr;
}

// Which layers slide, by the file's own pattern, else by the architecture's.
Result<std::vector<bool>> sliding_layers(const Metadata& metadata, std::size_t num_layers) {
  std::vector<bool> slides(num_layers, false);
  int period = 0;
  bool full_first = false;
  const gguf::Value* pattern = metadata.find(metadata.key("attention.sliding_window_pattern"));
  if (pattern != nullptr && std::holds_alternative<std::vector<std::int64_t>>(*pattern)) {
    OSCAR_ASSIGN(const auto flags, metadata.per_layer("attention.sliding_window_pattern", num_layers, 0, 1, 0));
    for (std::size_t i = 0; i < num_layers; ++i) slides[i] = flags[i] != 0;
    return slides;
  }
  for (const WindowPeriod& known : kWindowPeriods) {
    if (known.architecture != metadata.architecture()) continue;
    period = known.period;
    full_first = known.full_first;
  }
  OSCAR_ASSIGN(const std::int64_t told, metadata.integer("attention.sliding_window_pattern", 0, kMaxLayers, period));
  if (told <= 0) return slides;
  const auto step = static_cast<std::size_t>(told);
  for (std::size_t i = 0; i < num_layers; ++i) slides[i] = i % step != (full_first ? 0 : step - 1);
  return slides;
}

Status refuse_other_attention(const Metadata& metadata) {
  const std::string& architecture = metadata.architecture();
  if (metadata.has("attention.kv_lora_rank") || metadata.has("attention.key_length_mla") ||
      architecture == "deepseek2") {
    return metadata.unsupported(architecture +
                                " keeps one compressed latent a token (MLA) and no keys and values a head; "
                                "a 2-bit cache is not available for it");
  }
  const gguf::Value* causal = metadata.find(metadata.key("attention.causal"));
  if (causal != nullptr && std::holds_alternative<bool>(*causal) && !std::get<bool>(*causal)) {
    return metadata.unsupported(architecture + " is an encoder (attention.causal is false) and has no KV cache");
  }
  return {};
}

Status check_layer(const Metadata& metadata, std::size_t index, const LayerGeometry& layer, std::int64_t value_length) {
  const std::string where = "layer " + std::to_string(index) + ": ";
  if (value_length != layer.head_dim) {
    return metadata.unsupported(where + "keys have " + std::to_string(layer.head_dim) + " channels and values " +
                                std::to_string(value_length) + "; only equal widths are supported");
  }
  if (layer.head_dim % kHeadDimStep != 0 || layer.head_dim > kLargestHeadDim || layer.head_dim == 0) {
    return metadata.unsupported(where + "head_dim is " + std::to_string(layer.head_dim) +
                                "; only multiples of 16 up to 256 are supported");
  }
  if (layer.num_qo_heads == 0 || layer.num_qo_heads % layer.num_kv_heads != 0) {
    return metadata.unsupported(where + std::to_string(layer.num_qo_heads) + " query heads do not share " +
                                std::to_string(layer.num_kv_heads) + " KV heads evenly");
  }
  return {};
}

Status read_layers(const Metadata& metadata, const gguf::Header& header, ModelGeometry& geometry) {
  OSCAR_ASSIGN(const std::int64_t block_count, metadata.integer("block_count", 1, kMaxLayers, 0));
  if (block_count == 0)
    return metadata.bad(metadata.key("block_count") + " is missing; this GGUF file is not a language model");
  const auto num_layers = static_cast<std::size_t>(block_count);

  OSCAR_ASSIGN(const auto qo_heads, metadata.per_layer("attention.head_count", num_layers, 0, kMaxHeads, 0));
  std::vector<std::int64_t> kv_heads = qo_heads;
  if (metadata.has("attention.head_count_kv")) {
    OSCAR_ASSIGN(kv_heads, metadata.per_layer("attention.head_count_kv", num_layers, 0, kMaxHeads, 0));
  }
  OSCAR_ASSIGN(const std::int64_t width, metadata.integer("embedding_length", 1, 1 << 24, 0));
  const std::int64_t most_heads = *std::ranges::max_element(qo_heads);
  const std::int64_t split_width = most_heads > 0 ? width / most_heads : 0;
  OSCAR_ASSIGN(const std::int64_t key_length, metadata.integer("attention.key_length", 1, kMaxHeadDim, split_width));
  OSCAR_ASSIGN(const std::int64_t value_length,
               metadata.integer("attention.value_length", 1, kMaxHeadDim, split_width));
  OSCAR_ASSIGN(const auto key_length_swa, metadata.integer("attention.key_length_swa", 1, kMaxHeadDim, key_length));
  OSCAR_ASSIGN(const auto value_length_swa,
               metadata.integer("attention.value_length_swa", 1, kMaxHeadDim, value_length));
  OSCAR_ASSIGN(const std::int64_t window,
               metadata.integer("attention.sliding_window", 0, std::numeric_limits<int>::max(), 0));
  OSCAR_ASSIGN(const std::vector<bool> slides, sliding_layers(metadata, num_layers));
  // Layers at the end that read another layer's cache, and layers for multi-token prediction, own none.
  OSCAR_ASSIGN(const std::int64_t shared, metadata.integer("attention.shared_kv_layers", 0, block_count, 0));
  OSCAR_ASSIGN(const std::int64_t predictors, metadata.integer("nextn_predict_layers", 0, block_count, 0));
  OSCAR_ASSIGN(const std::int64_t recurrence_period, metadata.integer("full_attention_interval", 1, kMaxLayers, 1));
  const std::size_t last_with_cache = num_layers - static_cast<std::size_t>(std::max(shared, predictors));
  const bool split_file = metadata.find("split.count") != nullptr;  // other parts hold the later layers' tensors

  for (std::size_t i = 0; i < num_layers; ++i) {
    LayerGeometry layer;
    const bool attends =
        split_file ? (static_cast<std::int64_t>(i) + 1) % recurrence_period == 0 : key_tensor(header, i) != nullptr;
    if (i >= last_with_cache || kv_heads[i] == 0 || !attends) {
      layer.kind = LayerKind::kNoCache;
      geometry.layers.push_back(layer);
      continue;
    }
    const bool sliding = window > 0 && slides[i];
    layer.kind = sliding ? LayerKind::kSlidingWindow : LayerKind::kFull;
    layer.num_qo_heads = static_cast<int>(qo_heads[i]);
    layer.num_kv_heads = static_cast<int>(kv_heads[i]);
    layer.head_dim = static_cast<int>(sliding ? key_length_swa : key_length);
    layer.sliding_window = sliding ? static_cast<int>(window) : 0;
    OSCAR_TRY(check_layer(metadata, i, layer, sliding ? value_length_swa : value_length));
    geometry.layers.push_back(layer);
  }
  const bool any = std::ranges::any_of(geometry.layers, [](const auto& l) { return l.kind != LayerKind::kNoCache; });
  if (!any)
    return metadata.unsupported(geometry.architecture + " has no attention layer with a KV cache (recurrent model)");
  return {};
}

// XXH3-128 over the architecture, each layer's shape and the bytes of the first key tensor: facts of the file only, no
// defaults that a later version may learn better.
Result<std::string> fingerprint(const Metadata& metadata, const gguf::Header& header, const ModelGeometry& geometry,
                                std::istream& in) {
  io::Hasher hasher;
  hasher.update_text(geometry.architecture);
  const gguf::Tensor* tensor = nullptr;
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    const LayerGeometry& layer = geometry.layers[i];
    for (const int field : {layer.num_qo_heads, layer.num_kv_heads, layer.head_dim}) {
      hasher.update_number(static_cast<std::uint64_t>(field));
    }
    if (tensor == nullptr && layer.kind != LayerKind::kNoCache) tensor = key_tensor(header, i);
  }
  if (tensor == nullptr || tensor->num_bytes == 0) {
    return metadata.bad(
        "the first layer's key weights are missing or of an unknown type; use the first part of a split model");
  }
  hasher.update_text(tensor->name);
  hasher.update_number(tensor->type);
  in.clear();
  in.seekg(static_cast<std::streamoff>(tensor->offset));
  std::array<char, 64 * 1024> buffer;
  for (std::uint64_t left = tensor->num_bytes; left > 0;) {
    const auto part = std::min<std::uint64_t>(left, buffer.size());
    if (!in.read(buffer.data(), static_cast<std::streamsize>(part))) {
      return metadata.unreadable(tensor->name);
    }
    hasher.update(std::as_bytes(std::span(buffer).first(part)));
    left -= part;
  }
  return hasher.hex();
}

}  // namespace

Result<ModelGeometry> read_gguf_geometry(const std::string& path) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  if (!std::filesystem::exists(status)) {
    return make_error(ErrorCode::kIo, path + ": no such file; pass the path of a GGUF model");
  }
  if (!std::filesystem::is_regular_file(status)) {
    return make_error(ErrorCode::kIo, path + ": not a regular file; pass the path of a GGUF model");
  }
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return make_error(ErrorCode::kIo, path + ": cannot be opened; check its permissions");
  const auto file_size = static_cast<std::uint64_t>(in.tellg());
  in.seekg(0);
  OSCAR_ASSIGN(const gguf::Header header, gguf::read_header(in, file_size, path));

  Metadata metadata(header, path);
  OSCAR_TRY(metadata.set_architecture());
  if (header.tensors.empty()) return metadata.bad("the file has no tensors (a vocabulary only?); pass a whole model");
  OSCAR_TRY(refuse_other_attention(metadata));
  ModelGeometry geometry;
  geometry.architecture = metadata.architecture();
  geometry.name = metadata.text("general.name");
  OSCAR_ASSIGN(const std::int64_t context, metadata.integer("context_length", 1, std::numeric_limits<int>::max(), 0));
  if (context == 0) return metadata.bad(metadata.key("context_length") + " is missing; convert the model again");
  geometry.context_length = static_cast<int>(context);
  OSCAR_TRY(read_layers(metadata, header, geometry));
  OSCAR_ASSIGN(geometry.fingerprint, fingerprint(metadata, header, geometry, in));
  return geometry;
}

}  // namespace oscar
