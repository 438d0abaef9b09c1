#pragma once
// What rotation and statistics files share: safetensors whose metadata names the format, its version and the content
// hash, with one tensor a layer for all heads. docs/format-files.md.

#include <cstdint>
#include <oscar/result.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.hpp"

namespace oscar::io {

// Reads one; every error names the path.
class OscarFile {
 public:
  // `what` is the noun for messages ("rotation file"), `remedy` how to get a good one. Errors: kIo, kBadInput (another
  // kind of file, truncated, content hash wrong), kUnsupported (version above `newest_version`).
  static Result<OscarFile> open(const std::string& path, std::string_view format, int newest_version,
                                std::string_view what, std::string_view remedy);

  tl::unexpected<Error> bad(const std::string& reason) const;  // kBadInput with path and remedy

  // Metadata fields. kBadInput when missing or, for number(), not an integer >= minimum.
  Result<std::string> text(const std::string& field) const;
  Result<std::int64_t> number(const std::string& field, std::int64_t minimum) const;

  bool has(const std::string& name) const { return file_.tensors().contains(name); }
  Result<Shape> shape(const std::string& name) const;

  // The tensor [num_heads, inner...] as one vector a head; NaN and infinity are refused with their place. T: float,
  // double or int32_t.
  template <typename T>
  Result<std::vector<std::vector<T>>> heads(const std::string& name, int num_heads, const Shape& inner);
  // The same without the head dimension.
  template <typename T>
  Result<std::vector<T>> tensor(const std::string& name, const Shape& shape);

  // Every tensor has been read: one that nobody asked for is an error.
  Status finish() const;

 private:
  OscarFile(SafetensorsFile file, std::string remedy);
  SafetensorsFile file_;
  std::string remedy_;
  std::set<std::string> read_;
};

// Adds one part to the tensor `name`, which must have been given its dtype and shape.
template <typename T>
void add_tensor(SafetensorsContent& content, const std::string& name, Shape shape) {
  content.tensors[name] = TensorParts{dtype_of<T>(), std::move(shape), {}};
}
template <typename T>
void add_part(SafetensorsContent& content, const std::string& name, std::span<const T> values) {
  content.tensors.at(name).parts.push_back(std::as_bytes(values));
}

}  // namespace oscar::io
