#include "io/oscar_file.hpp"

#include <charconv>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>

namespace oscar::io {
namespace {

std::optional<std::int64_t> parse_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Coordinates of element `index` of a row-major tensor.
std::string place_text(const Shape& shape, std::size_t index) {
  Shape place(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    const auto dimension = static_cast<std::size_t>(shape[i]);
    place[i] = static_cast<std::int64_t>(index % dimension);
    index /= dimension;
  }
  return shape_text(place);
}

}  // namespace

OscarFile::OscarFile(SafetensorsFile file, std::string remedy) : file_(std::move(file)), remedy_(std::move(remedy)) {}

tl::unexpected<Error> OscarFile::bad(const std::string& reason) const {
  return make_error(ErrorCode::kBadInput, file_.path() + ": " + reason + "; " + remedy_);
}

Result<OscarFile> OscarFile::open(const std::string& path, std::string_view format, int newest_version,
                                  std::string_view what, std::string_view remedy) {
  OSCAR_ASSIGN(SafetensorsFile safetensors, SafetensorsFile::open(path));
  OscarFile file(std::move(safetensors), std::string(remedy));
  const auto& metadata = file.file_.metadata();
  const auto found_format = metadata.find("format");
  if (found_format == metadata.end() || found_format->second != format) {
    return file.bad("not a " + std::string(what) + ": its format is " +
                    (found_format == metadata.end() ? "not given" : quote(found_format->second)) + ", expected '" +
                    std::string(format) + "'");
  }
  OSCAR_ASSIGN(const std::int64_t version, file.number("format_version", 1));
  if (version > newest_version) {
    return make_error(ErrorCode::kUnsupported, path + ": has version " + std::to_string(version) + " of the " +
                                                   std::string(what) + " format, this build reads up to " +
                                                   std::to_string(newest_version) +
                                                   "; use an oscar that knows version " + std::to_string(version));
  }
  OSCAR_ASSIGN(const std::string expected_hash, file.text(std::string(kContentHashField)));
  OSCAR_ASSIGN(const std::string hash, file.file_.content_hash());
  if (hash != expected_hash) {
    return file.bad("the " + std::string(what) + " is damaged: its content hash is " + hash + " but it says " +
                    quote(expected_hash));
  }
  return file;
}

Result<std::string> OscarFile::text(const std::string& field) const {
  const auto found = file_.metadata().find(field);
  if (found == file_.metadata().end()) return bad("metadata field '" + field + "' is missing");
  return found->second;
}

Result<std::int64_t> OscarFile::number(const std::string& field, std::int64_t minimum) const {
  OSCAR_ASSIGN(const std::string value, text(field));
  const std::optional<std::int64_t> number = parse_number(value);
  if (!number || *number < minimum) {
    return bad("metadata field '" + field + "' is " + quote(value) + ", expected an integer of at least " +
               std::to_string(minimum));
  }
  return *number;
}

Result<Shape> OscarFile::shape(const std::string& name) const {
  const auto found = file_.tensors().find(name);
  if (found == file_.tensors().end()) return bad("tensor '" + name + "' is missing");
  return found->second.shape;
}

template <typename T>
Result<std::vector<T>> OscarFile::tensor(const std::string& name, const Shape& shape) {
  OSCAR_ASSIGN(std::vector<T> values, file_.read<T>(name, shape));
  if constexpr (std::is_floating_point_v<T>) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(values[i])) continue;
      return bad("tensor '" + name + "' has a NaN or an infinity at " + place_text(shape, i));
    }
  }
  read_.insert(name);
  return values;
}

template <typename T>
Result<std::vector<std::vector<T>>> OscarFile::heads(const std::string& name, int num_heads, const Shape& inner) {
  Shape shape{num_heads};
  shape.insert(shape.end(), inner.begin(), inner.end());
  OSCAR_ASSIGN(const std::vector<T> values, tensor<T>(name, shape));
  const std::size_t width = values.size() / static_cast<std::size_t>(num_heads);
  std::vector<std::vector<T>> heads;
  for (auto begin = values.begin(); heads.size() < static_cast<std::size_t>(num_heads);) {
    const auto end = begin + static_cast<std::ptrdiff_t>(width);
    heads.emplace_back(begin, end);
    begin = end;
  }
  return heads;
}

Status OscarFile::finish() const {
  for (const auto& [name, info] : file_.tensors()) {
    if (!read_.contains(name)) return bad("tensor " + quote(name) + " has no place in this format");
  }
  return {};
}

template Result<std::vector<float>> OscarFile::tensor<float>(const std::string&, const Shape&);
template Result<std::vector<double>> OscarFile::tensor<double>(const std::string&, const Shape&);
template Result<std::vector<std::int32_t>> OscarFile::tensor<std::int32_t>(const std::string&, const Shape&);
template Result<std::vector<std::vector<float>>> OscarFile::heads<float>(const std::string&, int, const Shape&);
template Result<std::vector<std::vector<double>>> OscarFile::heads<double>(const std::string&, int, const Shape&);
template Result<std::vector<std::vector<std::int32_t>>> OscarFile::heads<std::int32_t>(const std::string&, int,
                                                                                       const Shape&);

}  // namespace oscar::io
