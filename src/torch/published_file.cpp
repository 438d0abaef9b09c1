#include "torch/published_file.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <utility>

namespace oscar::torch {
namespace {

constexpr std::string_view kRemedy = "name a rotation file of the published code (k_rotation_*.pt, v_rotation_*.pt)";

std::string text_of(const Value* value) {
  const auto* text = value == nullptr ? nullptr : value->as<std::string>();
  return text == nullptr ? std::string() : *text;
}

// A layer's index: an integer, or its digits as text.
std::optional<int> index_of(const Value& key) {
  std::int64_t index = -1;
  if (const auto* number = key.as<std::int64_t>()) index = *number;
  if (const auto* text = key.as<std::string>()) {
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), index);
    if (error != std::errc() || end != text->data() + text->size()) return std::nullopt;
  }
  if (index < 0 || index >= PublishedFile::kMaxLayers) return std::nullopt;
  return static_cast<int>(index);
}

std::optional<Tensor> tensor_of(const Value& layer, std::string_view name) {
  const Value* value = layer.find(name);
  const auto* tensor = value == nullptr ? nullptr : value->as<Tensor>();
  return tensor == nullptr ? std::nullopt : std::optional(*tensor);
}

float widened_half(std::uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int fraction = half & 1023;
  const float sign = (half & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 31) return fraction == 0 ? sign * HUGE_VALF : NAN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

template <typename T>
T load(const char* bytes) {  // little-endian, as this machine
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

float element(const std::string& storage, io::Dtype dtype, std::int64_t index) {
  const char* at = storage.data() + static_cast<std::size_t>(index) * io::dtype_bytes(dtype);
  switch (dtype) {
    case io::Dtype::kF64: return static_cast<float>(load<double>(at));
    case io::Dtype::kF16: return widened_half(load<std::uint16_t>(at));
    case io::Dtype::kBf16: return std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(at)} << 16);
    default: return load<float>(at);  // the pickle reader knows these four
  }
}

}  // namespace

tl::unexpected<Error> PublishedFile::bad(const std::string& reason) const {
  return make_error(ErrorCode::kBadInput, path() + ": " + reason + "; " + std::string(kRemedy));
}

Result<PublishedFile> PublishedFile::open(const std::string& path) {
  OSCAR_ASSIGN(Archive archive, Archive::open(path));
  PublishedFile file(std::move(archive));
  if (file.archive_.has("byteorder")) {
    OSCAR_ASSIGN(const std::string order, file.archive_.read("byteorder"));
    if (order != "little") return file.bad("was written with byte order " + io::quote(order) + ", expected 'little'");
  }
  if (file.archive_.size("data.pkl") > Pickle::kMaxBytes) return file.bad("its data.pkl is too large");
  OSCAR_ASSIGN(const std::string bytes, file.archive_.read("data.pkl"));
  const Result<Pickle> pickle = Pickle::parse(bytes);
  if (!pickle) return make_error(pickle.error().code, path + ": " + pickle.error().message);
  OSCAR_TRY(file.read_header(pickle->root()));
  return file;
}

Status PublishedFile::read_header(const Value& root) {
  const Value* layers = root.find("layers");
  if (layers == nullptr) return bad("holds " + describe(root) + " without 'layers'");
  const auto* dict = layers->as<Dict>();
  if (dict == nullptr || dict->entries.empty()) return bad("its 'layers' is " + describe(*layers) + " without entries");
  objective_ = text_of(root.find("objective"));
  if (const Value* calibration = root.find("calibration")) {
    const Value* tokens = calibration->find("tokens");
    const auto* count = tokens == nullptr ? nullptr : tokens->as<std::int64_t>();
    if (count != nullptr) num_tokens_ = std::max<std::int64_t>(0, *count);
    corpus_hash_ = text_of(calibration->find("corpus_hash"));
    if (corpus_hash_.empty()) corpus_hash_ = text_of(calibration->find("prompt_sha256"));
  }
  for (const auto& [key, value] : dict->entries) OSCAR_TRY(read_layer(*key, *value));
  return {};
}

Status PublishedFile::read_layer(const Value& key, const Value& value) {
  const std::optional<int> index = index_of(key);
  if (!index) return bad("a layer has " + describe(key) + " as its key, expected 0.." + std::to_string(kMaxLayers - 1));
  const std::string where = "layer " + std::to_string(*index);
  if (const Value* id = value.find("layer_id"); id != nullptr && index_of(*id) != index) {
    return bad(where + " says that it is " + describe(*id));
  }
  const std::optional<Tensor> rotation = tensor_of(value, "rotation");
  if (!rotation) return bad(where + " has no tensor 'rotation'");
  const auto [ignored, is_new] = layers_.emplace(
      *index, PublishedLayer{*rotation, tensor_of(value, value.find("q_rotation") ? "q_rotation" : "o_rotation"),
                             tensor_of(value, "k_mean")});
  if (!is_new) return bad(where + " is there twice");
  return {};
}

Result<std::vector<float>> PublishedFile::read(const Tensor& tensor) {
  const Storage& storage = tensor.storage;
  const bool is_number =
      !storage.key.empty() && std::ranges::all_of(storage.key, [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number) return bad("a storage is called " + io::quote(storage.key) + ", expected a number");
  if (storage_key_ != storage.key || storage_bytes_.empty()) {
    OSCAR_ASSIGN(storage_bytes_, archive_.read("data/" + storage.key));
    storage_key_ = storage.key;
  }
  // The pickle reader has held the view against the storage's element count; this holds the count against the bytes.
  const std::uint64_t expected = static_cast<std::uint64_t>(storage.num_elements) * io::dtype_bytes(storage.dtype);
  if (storage_bytes_.size() != expected) {
    return bad("storage " + storage.key + " has " + std::to_string(storage_bytes_.size()) + " bytes, expected " +
               std::to_string(expected));
  }
  std::size_t num_elements = 1;
  for (const std::int64_t extent : tensor.shape) num_elements *= static_cast<std::size_t>(extent);
  std::vector<float> values(num_elements);
  io::Shape place(tensor.shape.size());
  std::int64_t at = tensor.offset;
  for (float& value : values) {
    value = element(storage_bytes_, storage.dtype, at);
    if (!std::isfinite(value)) {
      return bad("storage " + storage.key + " has a NaN or an infinity at element " + std::to_string(at));
    }
    for (std::size_t d = place.size(); d-- > 0;) {  // the next place, last dimension first
      at += tensor.strides[d];
      if (++place[d] < tensor.shape[d]) break;
      at -= tensor.shape[d] * tensor.strides[d];
      place[d] = 0;
    }
  }
  return values;
}

}  // namespace oscar::torch
