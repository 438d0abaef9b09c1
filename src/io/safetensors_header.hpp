#pragma once
// The JSON header of a safetensors file as written, before its ranges are held against the file.

#include <cstdint>
#include <map>
#include <oscar/result.hpp>
#include <string>
#include <string_view>

#include "io/safetensors.hpp"

namespace oscar::io {

struct RawTensor {
  std::string dtype;
  Shape shape;
  std::vector<std::int64_t> data_offsets;  // [2] begin and end, relative to the header's end
};
struct RawHeader {
  std::map<std::string, std::string> metadata;
  std::map<std::string, RawTensor> tensors;
};

// Parses as it goes and stops at the first thing that has no place in a header, so that memory stays within a small
// multiple of the text. The error is a bare reason (no path).
Result<RawHeader> parse_header(std::string_view json);

}  // namespace oscar::io
