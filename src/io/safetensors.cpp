#include "io/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "io/hash.hpp"
#include "io/safetensors_header.hpp"

namespace oscar::io {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are read and written in place");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::size_t kHashBuffer = std::size_t{1} << 20;

struct DtypeEntry {
  Dtype dtype;
  std::string_view name;
  std::size_t bytes;
};
constexpr std::array<DtypeEntry, 13> kDtypes{{
    {Dtype::kBool, "BOOL", 1},
    {Dtype::kU8, "U8", 1},
    {Dtype::kI8, "I8", 1},
    {Dtype::kU16, "U16", 2},
    {Dtype::kI16, "I16", 2},
    {Dtype::kF16, "F16", 2},
    {Dtype::kBf16, "BF16", 2},
    {Dtype::kU32, "U32", 4},
    {Dtype::kI32, "I32", 4},
    {Dtype::kF32, "F32", 4},
    {Dtype::kU64, "U64", 8},
    {Dtype::kI64, "I64", 8},
    {Dtype::kF64, "F64", 8},
}};

const DtypeEntry& entry(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)]; }

std::optional<Dtype> parse_dtype(std::string_view name) {
  const auto* found = std::ranges::find(kDtypes, name, &DtypeEntry::name);
  if (found == kDtypes.end()) return std::nullopt;
  return found->dtype;
}

// Product of the dimensions times the element size; empty on overflow.
std::optional<std::uint64_t> tensor_bytes(const Shape& shape, std::size_t element_bytes) {
  std::uint64_t bytes = element_bytes;
  for (const std::int64_t dimension : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(dimension), &bytes)) return std::nullopt;
  }
  return bytes;
}

tl::unexpected<Error> bad(const std::string& path, const std::string& reason) {
  return make_error(ErrorCode::kBadInput, path + ": " + reason);
}

Result<std::map<std::string, TensorInfo>> check_tensors(const std::string& path,
                                                        const std::map<std::string, RawTensor>& raw_tensors,
                                                        std::uint64_t data_start, std::uint64_t file_size) {
  std::map<std::string, TensorInfo> tensors;
  for (const auto& [name, raw] : raw_tensors) {
    const std::optional<Dtype> dtype = parse_dtype(raw.dtype);
    if (!dtype) return bad(path, "tensor " + quote(name) + " has the unknown dtype " + quote(raw.dtype));
    const auto begin = static_cast<std::uint64_t>(raw.data_offsets[0]);
    const auto end = static_cast<std::uint64_t>(raw.data_offsets[1]);
    const std::optional<std::uint64_t> bytes = tensor_bytes(raw.shape, dtype_bytes(*dtype));
    if (begin > end || !bytes || *bytes != end - begin) {
      return bad(path, "tensor " + quote(name) + " is " + raw.dtype + " " + shape_text(raw.shape) +
                           " but its range is " + std::to_string(begin) + " to " + std::to_string(end) +
                           "; the file is damaged");
    }
    if (end > file_size - data_start) {
      return bad(path, "tensor " + quote(name) + " ends at byte " + std::to_string(end) +
                           " of the data but there are only " + std::to_string(file_size - data_start) +
                           "; the file is truncated, copy or make it again");
    }
    tensors[name] = TensorInfo{*dtype, raw.shape, data_start + begin, *bytes};
  }
  return tensors;
}

// The ranges follow each other without gap or overlap, from the header to the file's end.
Status check_coverage(const std::string& path, const std::map<std::string, TensorInfo>& tensors,
                      std::uint64_t data_start, std::uint64_t file_size) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (const auto& [name, info] : tensors) ranges.emplace_back(info.offset, info.offset + info.num_bytes);
  std::ranges::sort(ranges);
  std::uint64_t covered = data_start;
  for (const auto& [begin, end] : ranges) {
    if (begin != covered) {
      return bad(path, "tensors " + std::string(begin < covered ? "overlap" : "leave a gap") + " at byte " +
                           std::to_string(begin) + "; the file is damaged");
    }
    covered = end;
  }
  if (covered != file_size) {
    return bad(path, std::to_string(file_size - covered) + " bytes follow the last tensor; the file is damaged");
  }
  return {};
}

void hash_metadata(Hasher& hasher, const std::map<std::string, std::string>& metadata) {
  hasher.update_number(metadata.size() - metadata.count(std::string(kContentHashField)));
  for (const auto& [field, value] : metadata) {
    if (field == kContentHashField) continue;
    hasher.update_text(field);
    hasher.update_text(value);
  }
}

void hash_tensor_head(Hasher& hasher, const std::string& name, Dtype dtype, const Shape& shape) {
  hasher.update_text(name);
  hasher.update_text(dtype_name(dtype));
  hasher.update_number(shape.size());
  for (const std::int64_t dimension : shape) hasher.update_number(static_cast<std::uint64_t>(dimension));
}

// The header's JSON for tensors in the order of `order`.
std::string header_text(const SafetensorsContent& content, const std::vector<const std::string*>& order) {
  auto header = nlohmann::ordered_json::object();
  if (!content.metadata.empty()) header["__metadata__"] = content.metadata;
  std::uint64_t offset = 0;
  for (const std::string* name : order) {
    const TensorParts& tensor = content.tensors.at(*name);
    std::uint64_t bytes = 0;
    for (const auto& part : tensor.parts) bytes += part.size();
    header[*name] = {
        {"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');  // data starts at a multiple of 8
  return text;
}

}  // namespace

std::string_view dtype_name(Dtype dtype) { return entry(dtype).name; }
std::size_t dtype_bytes(Dtype dtype) { return entry(dtype).bytes; }

std::string quote(std::string_view text) {
  constexpr std::size_t kMaxLength = 80;
  std::string out = "'";
  for (const char c : text.substr(0, kMaxLength)) out += c >= ' ' && c <= '~' ? c : '?';
  return out + (text.size() > kMaxLength ? "...'" : "'");
}

std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t dimension : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  return text + "]";
}

SafetensorsFile::SafetensorsFile(FileReader file, std::map<std::string, std::string> metadata,
                                 std::map<std::string, TensorInfo> tensors)
    : file_(std::move(file)), metadata_(std::move(metadata)), tensors_(std::move(tensors)) {}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  OSCAR_ASSIGN(FileReader file, FileReader::open(path));
  std::array<std::byte, kLengthBytes> length_bytes;
  if (file.size() < kLengthBytes)
    return bad(path, "not a safetensors file: it has only " + std::to_string(file.size()) + " bytes");
  OSCAR_TRY(file.read(0, length_bytes));
  const auto length = std::bit_cast<std::uint64_t>(length_bytes);
  if (length > kMaxHeaderBytes) {
    return bad(path, "not a safetensors file: a header of " + std::to_string(length) +
                         " bytes, at most 100000000 are allowed");
  }
  if (length > file.size() - kLengthBytes) {
    return bad(path, "not a safetensors file, or truncated: the header should have " + std::to_string(length) +
                         " bytes, the file has " + std::to_string(file.size()));
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  OSCAR_TRY(file.read(kLengthBytes, std::as_writable_bytes(std::span(text))));
  Result<RawHeader> header = parse_header(text);
  if (!header) return bad(path, "not a safetensors file: " + header.error().message);
  const std::uint64_t data_start = kLengthBytes + length;
  OSCAR_ASSIGN(auto tensors, check_tensors(path, header->tensors, data_start, file.size()));
  OSCAR_TRY(check_coverage(path, tensors, data_start, file.size()));
  return SafetensorsFile(std::move(file), std::move(header->metadata), std::move(tensors));
}

Result<const TensorInfo*> SafetensorsFile::find(const std::string& name, Dtype dtype, const Shape& shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return bad(path(), "tensor " + quote(name) + " is missing");
  const TensorInfo& info = found->second;
  if (info.dtype != dtype || info.shape != shape) {
    return bad(path(), "tensor " + quote(name) + " is " + std::string(dtype_name(info.dtype)) + " " +
                           shape_text(info.shape) + ", expected " + std::string(dtype_name(dtype)) + " " +
                           shape_text(shape));
  }
  return &info;
}

Result<std::vector<std::byte>> SafetensorsFile::read_bytes(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return bad(path(), "tensor " + quote(name) + " is missing");
  std::vector<std::byte> bytes(static_cast<std::size_t>(found->second.num_bytes));
  OSCAR_TRY(file_.read(found->second.offset, bytes));
  return bytes;
}

Result<std::string> SafetensorsFile::content_hash() const {
  Hasher hasher;
  hash_metadata(hasher, metadata_);
  std::vector<std::byte> buffer(kHashBuffer);
  for (const auto& [name, info] : tensors_) {
    hash_tensor_head(hasher, name, info.dtype, info.shape);
    for (std::uint64_t done = 0; done < info.num_bytes;) {
      const auto part = static_cast<std::size_t>(std::min<std::uint64_t>(info.num_bytes - done, kHashBuffer));
      OSCAR_TRY(file_.read(info.offset + done, std::span(buffer).first(part)));
      hasher.update(std::span(buffer).first(part));
      done += part;
    }
  }
  return hasher.hex();
}

std::string content_hash(const SafetensorsContent& content) {
  Hasher hasher;
  hash_metadata(hasher, content.metadata);
  for (const auto& [name, tensor] : content.tensors) {
    hash_tensor_head(hasher, name, tensor.dtype, tensor.shape);
    for (const auto& part : tensor.parts) hasher.update(part);
  }
  return hasher.hex();
}

Status write_safetensors(const SafetensorsContent& content, const std::string& path) {
  std::vector<const std::string*> order;
  for (const auto& [name, tensor] : content.tensors) order.push_back(&name);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](const std::string* name) { return dtype_bytes(content.tensors.at(*name).dtype); });
  const std::string header = header_text(content, order);
  if (header.size() > kMaxHeaderBytes) {
    return make_error(ErrorCode::kInvalidArgument, path + ": the header would have " + std::to_string(header.size()) +
                                                       " bytes, at most 100000000 are allowed");
  }
  OSCAR_ASSIGN(AtomicFile file, AtomicFile::create(path));
  const auto length = std::bit_cast<std::array<std::byte, kLengthBytes>>(static_cast<std::uint64_t>(header.size()));
  OSCAR_TRY(file.write(length));
  OSCAR_TRY(file.write(std::as_bytes(std::span(header))));
  for (const std::string* name : order) {
    for (const auto& part : content.tensors.at(*name).parts) OSCAR_TRY(file.write(part));
  }
  return file.commit();
}

std::string valid_utf8(const std::string& text) {
  // A JSON string is escaped, never shortened, so the parsed text is the replaced one.
  const std::string escaped = nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return nlohmann::json::parse(escaped).get<std::string>();
}

}  // namespace oscar::io
