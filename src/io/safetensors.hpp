#pragma once
// safetensors files: an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range; text
// metadata), then the tensors' bytes. The reader takes nothing on trust: every length is checked before it is used.

#include <cstdint>
#include <map>
#include <oscar/result.hpp>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "io/file.hpp"

namespace oscar::io {

enum class Dtype { kBool, kU8, kI8, kU16, kI16, kF16, kBf16, kU32, kI32, kF32, kU64, kI64, kF64 };
std::string_view dtype_name(Dtype dtype);  // as in the header: "F32", ...
std::size_t dtype_bytes(Dtype dtype);

template <typename T>
constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<T, float>) return Dtype::kF32;
  if constexpr (std::is_same_v<T, double>) return Dtype::kF64;
  if constexpr (std::is_same_v<T, std::uint8_t>) return Dtype::kU8;
  if constexpr (std::is_same_v<T, std::int8_t>) return Dtype::kI8;
  if constexpr (std::is_same_v<T, std::int32_t>) return Dtype::kI32;
}

// A text out of a file as it may appear in a message: in quotes, printable, cut at 80 characters.
std::string quote(std::string_view text);

using Shape = std::vector<std::int64_t>;
std::string shape_text(const Shape& shape);  // "[3, 64, 64]"

struct TensorInfo {
  Dtype dtype = Dtype::kF32;
  Shape shape;
  std::uint64_t offset = 0;  // of the first byte in the file
  std::uint64_t num_bytes = 0;
};

// An open file whose header has been checked: known dtypes, sizes that match the shapes, ranges that cover the file's
// data exactly once.
class SafetensorsFile {
 public:
  // Errors: kIo, kBadInput (not safetensors, truncated, damaged).
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }

  // The elements of `name`, row-major. Errors: kBadInput when it is missing or has another dtype or shape.
  template <typename T>
  Result<std::vector<T>> read(const std::string& name, const Shape& shape) const {
    OSCAR_ASSIGN(const TensorInfo* info, find(name, dtype_of<T>(), shape));
    std::vector<T> values(static_cast<std::size_t>(info->num_bytes / sizeof(T)));
    OSCAR_TRY(file_.read(info->offset, std::as_writable_bytes(std::span(values))));
    return values;
  }
  // The stored bytes, whatever the dtype.
  Result<std::vector<std::byte>> read_bytes(const std::string& name) const;

  // content_hash() of what the file holds, in one bounded pass.
  Result<std::string> content_hash() const;

 private:
  SafetensorsFile(FileReader file, std::map<std::string, std::string> metadata,
                  std::map<std::string, TensorInfo> tensors);
  Result<const TensorInfo*> find(const std::string& name, Dtype dtype, const Shape& shape) const;

  FileReader file_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, TensorInfo> tensors_;
};

// A tensor to write: its bytes are those of `parts` in order. Borrows.
struct TensorParts {
  Dtype dtype = Dtype::kF32;
  Shape shape;
  std::vector<std::span<const std::byte>> parts;
};

// The content of a file to be. Metadata must be UTF-8.
struct SafetensorsContent {
  std::map<std::string, std::string> metadata;
  std::map<std::string, TensorParts> tensors;
};

inline constexpr std::string_view kContentHashField = "content_hash";

// XXH3-128 over every metadata field but kContentHashField (name, value), then every tensor (name, dtype, rank,
// dimensions, bytes), each in ascending order of its name; texts carry their lengths. Independent of the order in a
// file.
std::string content_hash(const SafetensorsContent& content);

// Whole or not at all. Data is ordered by falling element size, so that every tensor is aligned. Errors: kIo.
Status write_safetensors(const SafetensorsContent& content, const std::string& path);

// `text` with every byte sequence that is not UTF-8 replaced by U+FFFD.
std::string valid_utf8(const std::string& text);

}  // namespace oscar::io
