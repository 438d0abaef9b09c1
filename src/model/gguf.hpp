#pragma once
// The header of a GGUF file: metadata and tensor descriptions, never tensor data. Every count and length is checked
// against the bytes that are left before it is used, so that a hostile file costs an error and not memory.

#include <cstdint>
#include <istream>
#include <map>
#include <oscar/result.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace oscar::gguf {

// Integers of every width arrive as int64 (uint64 above its range saturates). Arrays are kept when their elements are
// integers or booleans and there are at most kMaxArray of them; other arrays and strings over kMaxString are skipped:
// nothing here asks for vocabularies.
using Value = std::variant<std::int64_t, double, bool, std::string, std::vector<std::int64_t>>;

inline constexpr std::uint64_t kMaxArray = 4096;  // one value a layer is the largest array read
inline constexpr std::uint64_t kMaxString = 64 * 1024;

struct Tensor {
  std::string name;
  std::vector<std::uint64_t> shape;  // fastest dimension first; at most 4
  std::uint32_t type = 0;            // number of the ggml type
  std::uint64_t offset = 0;          // from the start of the file
  std::uint64_t num_bytes = 0;       // 0 when the type is one that this build does not know
};

struct Header {
  std::uint32_t version = 0;
  std::map<std::string, Value, std::less<>> metadata;
  std::map<std::string, Tensor, std::less<>> tensors;
};

// Bytes of a block of a ggml type and elements in it; {0, 0} for a type this build does not know.
struct TypeSize {
  std::uint32_t block_elements = 0;
  std::uint32_t block_bytes = 0;
};
TypeSize type_size(std::uint32_t type);

// Reads the header from `in`, a stream of `file_size` bytes at its start; `path` is for messages. Versions 2 and 3,
// little endian. Errors: kBadInput (not GGUF, truncated, corrupt, tensors that end beyond the file), kUnsupported
// (version 1, newer, big endian).
Result<Header> read_header(std::istream& in, std::uint64_t file_size, const std::string& path);

}  // namespace oscar::gguf
