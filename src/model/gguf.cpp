#include "model/gguf.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

namespace oscar::gguf {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF fields are read in place");

enum class ValueType : std::uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// Bytes of a scalar; 0 for strings, arrays and unknown types.
std::uint64_t scalar_bytes(ValueType type) {
  switch (type) {
    case ValueType::kUint8:
    case ValueType::kInt8:
    case ValueType::kBool: return 1;
    case ValueType::kUint16:
    case ValueType::kInt16: return 2;
    case ValueType::kUint32:
    case ValueType::kInt32:
    case ValueType::kFloat32: return 4;
    case ValueType::kUint64:
    case ValueType::kInt64:
    case ValueType::kFloat64: return 8;
    case ValueType::kString:
    case ValueType::kArray: break;
  }
  return 0;
}

constexpr std::uint64_t kMaxKeys = 1 << 16;     // real files have about 50
constexpr std::uint64_t kMaxTensors = 1 << 20;  // the largest mixture-of-experts models have about 100 000
constexpr std::uint64_t kMaxName = 1024;
constexpr std::uint64_t kMaxDimensions = 4;
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMinKeyBytes = 8 + 1 + 4 + 1;         // length, one character, type, one byte
constexpr std::uint64_t kMinTensorBytes = 8 + 1 + 4 + 4 + 8;  // length, one character, dimensions, type, offset

// A name from a file as it may appear in a message.
std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 80)) out += (c >= ' ' && c <= '~') ? c : '?';
  return out;
}

// Reads forward through a stream of known length with its own buffer.
class Reader {
 public:
  Reader(std::istream& in, std::uint64_t size) : in_(in), size_(size) {}

  std::uint64_t position() const { return position_; }
  std::uint64_t remaining() const { return size_ - position_; }

  bool read(void* out, std::uint64_t count) {
    if (count > remaining()) return false;
    auto* to = static_cast<char*>(out);
    while (count > 0) {
      if (begin_ == end_ && !fill()) return false;
      const auto part = std::min<std::uint64_t>(count, end_ - begin_);
      std::memcpy(to, buffer_.data() + begin_, part);
      advance(part);
      to += part;
      count -= part;
    }
    return true;
  }

  bool skip(std::uint64_t count) {
    if (count > remaining()) return false;
    const auto part = std::min<std::uint64_t>(count, end_ - begin_);
    advance(part);
    count -= part;
    if (count == 0) return true;
    in_.seekg(static_cast<std::streamoff>(count), std::ios::cur);
    position_ += count;
    return static_cast<bool>(in_);
  }

  template <typename T>
  std::optional<T> number() {
    T value;
    if (!read(&value, sizeof(T))) return std::nullopt;
    return value;
  }

  std::optional<std::string> string(std::uint64_t length) {
    if (length > remaining()) return std::nullopt;
    std::string text(length, '\0');
    if (!read(text.data(), length)) return std::nullopt;
    return text;
  }

 private:
  void advance(std::uint64_t count) {
    begin_ += count;
    position_ += count;
  }
  bool fill() {
    in_.read(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
    begin_ = 0;
    end_ = static_cast<std::size_t>(in_.gcount());
    if (end_ > 0) in_.clear();  // the last piece of a file is short
    return end_ > 0;
  }

  std::istream& in_;
  std::uint64_t size_;
  std::uint64_t position_ = 0;  // of the next byte handed out
  std::array<char, 64 * 1024> buffer_;
  std::size_t begin_ = 0, end_ = 0;
};

class HeaderParser {
 public:
  HeaderParser(std::istream& in, std::uint64_t file_size, const std::string& path)
      : reader_(in, file_size), file_size_(file_size), path_(path) {}

  Result<Header> parse() {
    Header header;
    OSCAR_TRY(read_preamble(header));
    for (std::uint64_t i = 0; i < num_keys_; ++i) OSCAR_TRY(read_key(header));
    OSCAR_TRY(read_alignment(header));
    for (std::uint64_t i = 0; i < num_tensors_; ++i) OSCAR_TRY(read_tensor(header));
    OSCAR_TRY(place_tensors(header));
    return header;
  }

 private:
  tl::unexpected<Error> bad(const std::string& what) const {
    return make_error(ErrorCode::kBadInput, path_ + ": " + what);
  }
  tl::unexpected<Error> corrupt(const std::string& what) const {
    return bad("corrupt GGUF header: " + what + "; download the file again");
  }
  tl::unexpected<Error> truncated() const {
    return bad("the GGUF header ends beyond the file's " + std::to_string(file_size_) +
               " bytes; the download is incomplete: fetch it again");
  }

  Status read_preamble(Header& header) {
    if (file_size_ == 0) return bad("the file is empty; expected a GGUF model");
    std::array<char, 4> magic{};
    if (!reader_.read(magic.data(), magic.size()) || std::memcmp(magic.data(), "GGUF", 4) != 0) {
      return bad("not a GGUF file (it does not begin with 'GGUF'); convert the model to GGUF first");
    }
    const auto version = reader_.number<std::uint32_t>();
    if (!version) return truncated();
    if (*version == 1 || *version > 3) {
      const bool big_endian = *version > 0 && (*version & 0xFFFF) == 0;
      return make_error(ErrorCode::kUnsupported,
                        path_ + (big_endian ? ": big-endian GGUF; convert it to little endian"
                                            : ": GGUF version " + std::to_string(*version) +
                                                  "; this build reads 2 and 3: convert the model again"));
    }
    if (*version == 0) return corrupt("version 0");
    header.version = *version;
    const auto num_tensors = reader_.number<std::uint64_t>();
    const auto num_keys = reader_.number<std::uint64_t>();
    if (!num_tensors || !num_keys) return truncated();
    if (*num_keys > kMaxKeys) return corrupt(std::to_string(*num_keys) + " metadata keys");
    if (*num_tensors > kMaxTensors) return corrupt(std::to_string(*num_tensors) + " tensors");
    if (*num_keys > reader_.remaining() / kMinKeyBytes || *num_tensors > reader_.remaining() / kMinTensorBytes) {
      return truncated();
    }
    num_keys_ = *num_keys;
    num_tensors_ = *num_tensors;
    return {};
  }

  // A length-prefixed name of 1 to `limit` bytes.
  Result<std::string> read_name(std::uint64_t limit, std::string_view what) {
    const auto length = reader_.number<std::uint64_t>();
    if (!length) return truncated();
    if (*length == 0 || *length > limit) {
      return corrupt("a " + std::string(what) + " of " + std::to_string(*length) + " bytes");
    }
    auto name = reader_.string(*length);
    if (!name) return truncated();
    return *std::move(name);
  }

  Status read_key(Header& header) {
    OSCAR_ASSIGN(const std::string key, read_name(kMaxString, "metadata key"));
    const auto type = reader_.number<std::uint32_t>();
    if (!type) return truncated();
    std::optional<Value> value;
    switch (static_cast<ValueType>(*type)) {
      case ValueType::kString: {
        OSCAR_ASSIGN(value, read_string());
        break;
      }
      case ValueType::kArray: {
        OSCAR_ASSIGN(value, read_array(key));
        break;
      }
      default: {
        OSCAR_ASSIGN(value, read_scalar(static_cast<ValueType>(*type), key));
      }
    }
    if (header.metadata.contains(key)) return corrupt("key '" + printable(key) + "' appears twice");
    if (value) header.metadata.emplace(key, *std::move(value));
    return {};
  }

  Result<std::optional<Value>> read_string() {
    const auto length = reader_.number<std::uint64_t>();
    if (!length) return truncated();
    if (*length > kMaxString) {
      if (!reader_.skip(*length)) return truncated();
      return std::optional<Value>();
    }
    auto text = reader_.string(*length);
    if (!text) return truncated();
    return std::optional<Value>(*std::move(text));
  }

  Result<std::optional<Value>> read_array(const std::string& key) {
    const auto type = reader_.number<std::uint32_t>();
    const auto count = reader_.number<std::uint64_t>();
    if (!type || !count) return truncated();
    const auto element = static_cast<ValueType>(*type);
    if (element == ValueType::kString) {
      if (*count > reader_.remaining() / 8) return truncated();
      for (std::uint64_t i = 0; i < *count; ++i) {
        const auto length = reader_.number<std::uint64_t>();
        if (!length || !reader_.skip(*length)) return truncated();
      }
      return std::optional<Value>();
    }
    const std::uint64_t element_bytes = scalar_bytes(element);
    if (element_bytes == 0) {
      return corrupt("key '" + printable(key) + "' is an array of value type " + std::to_string(*type));
    }
    if (*count > reader_.remaining() / element_bytes) return truncated();
    const bool is_float = element == ValueType::kFloat32 || element == ValueType::kFloat64;
    if (is_float || *count > kMaxArray) {
      if (!reader_.skip(*count * element_bytes)) return truncated();
      return std::optional<Value>();
    }
    std::vector<std::int64_t> values;
    values.reserve(*count);
    for (std::uint64_t i = 0; i < *count; ++i) {
      OSCAR_ASSIGN(const Value value, read_scalar(element, key));
      const bool* flag = std::get_if<bool>(&value);
      values.push_back(flag != nullptr ? static_cast<std::int64_t>(*flag) : std::get<std::int64_t>(value));
    }
    return std::optional<Value>(std::move(values));
  }

  template <typename T>
  Result<Value> read_integer() {
    const auto value = reader_.number<T>();
    if (!value) return truncated();
    if constexpr (std::is_same_v<T, std::uint64_t>) {
      constexpr std::uint64_t kMax = std::numeric_limits<std::int64_t>::max();
      return Value(static_cast<std::int64_t>(std::min(*value, kMax)));
    } else {
      return Value(static_cast<std::int64_t>(*value));
    }
  }

  Result<Value> read_scalar(ValueType type, const std::string& key) {
    switch (type) {
      case ValueType::kUint8: return read_integer<std::uint8_t>();
      case ValueType::kInt8: return read_integer<std::int8_t>();
      case ValueType::kUint16: return read_integer<std::uint16_t>();
      case ValueType::kInt16: return read_integer<std::int16_t>();
      case ValueType::kUint32: return read_integer<std::uint32_t>();
      case ValueType::kInt32: return read_integer<std::int32_t>();
      case ValueType::kUint64: return read_integer<std::uint64_t>();
      case ValueType::kInt64: return read_integer<std::int64_t>();
      case ValueType::kBool: {
        const auto value = reader_.number<std::uint8_t>();
        if (!value) return truncated();
        return Value(*value != 0);
      }
      case ValueType::kFloat32: {
        const auto value = reader_.number<float>();
        if (!value) return truncated();
        return Value(static_cast<double>(*value));
      }
      case ValueType::kFloat64: {
        const auto value = reader_.number<double>();
        if (!value) return truncated();
        return Value(*value);
      }
      case ValueType::kString:
      case ValueType::kArray: break;
    }
    return corrupt("key '" + printable(key) + "' has value type " + std::to_string(static_cast<std::uint32_t>(type)));
  }

  Status read_alignment(const Header& header) {
    const auto found = header.metadata.find("general.alignment");
    if (found == header.metadata.end()) return {};
    const auto* value = std::get_if<std::int64_t>(&found->second);
    constexpr std::int64_t kMaxAlignment = 1 << 24;
    if (value == nullptr || *value <= 0 || *value > kMaxAlignment ||
        !std::has_single_bit(static_cast<std::uint64_t>(*value))) {
      return corrupt("general.alignment is not a power of two");
    }
    alignment_ = static_cast<std::uint64_t>(*value);
    return {};
  }

  Status read_tensor(Header& header) {
    Tensor tensor;
    OSCAR_ASSIGN(tensor.name, read_name(kMaxName, "tensor name"));
    const std::string shown = "tensor '" + printable(tensor.name) + "'";
    const auto num_dimensions = reader_.number<std::uint32_t>();
    if (!num_dimensions) return truncated();
    if (*num_dimensions > kMaxDimensions) {
      return corrupt(shown + " has " + std::to_string(*num_dimensions) + " dimensions");
    }
    std::uint64_t num_elements = 1;
    for (std::uint32_t i = 0; i < *num_dimensions; ++i) {
      const auto extent = reader_.number<std::uint64_t>();
      if (!extent) return truncated();
      constexpr std::uint64_t kMaxElements = std::uint64_t{1} << 56;  // times at most 8 bytes stays below 2^63
      if (*extent == 0 || *extent > kMaxElements / num_elements) {
        return corrupt(shown + " has an impossible dimension of " + std::to_string(*extent));
      }
      num_elements *= *extent;
      tensor.shape.push_back(*extent);
    }
    const auto type = reader_.number<std::uint32_t>();
    const auto offset = reader_.number<std::uint64_t>();
    if (!type || !offset) return truncated();
    tensor.type = *type;
    tensor.offset = *offset;
    if (tensor.offset % alignment_ != 0) {
      return corrupt(shown + " is not aligned to " + std::to_string(alignment_) + " bytes");
    }
    const TypeSize size = type_size(tensor.type);
    if (size.block_elements != 0) {
      const std::uint64_t row = tensor.shape.empty() ? 1 : tensor.shape[0];
      if (row % size.block_elements != 0) {
        return corrupt(shown + " has rows of " + std::to_string(row) + " elements, not whole blocks of " +
                       std::to_string(size.block_elements));
      }
      tensor.num_bytes = num_elements / size.block_elements * size.block_bytes;
    }
    std::string name = tensor.name;
    if (!header.tensors.emplace(std::move(name), std::move(tensor)).second) return corrupt(shown + " appears twice");
    return {};
  }

  // Turns offsets into file positions and checks that the file holds every tensor.
  Status place_tensors(Header& header) const {
    const std::uint64_t data = (reader_.position() + alignment_ - 1) / alignment_ * alignment_;
    for (auto& [name, tensor] : header.tensors) {
      const std::uint64_t available = file_size_ > data ? file_size_ - data : 0;
      if (tensor.offset > available || tensor.num_bytes > available - tensor.offset) {
        return bad("tensor '" + printable(name) + "' (" + std::to_string(tensor.num_bytes) + " bytes at offset " +
                   std::to_string(tensor.offset) + " of the data) ends beyond the file's " +
                   std::to_string(file_size_) + " bytes; the download is incomplete: fetch it again");
      }
      tensor.offset += data;
    }
    return {};
  }

  Reader reader_;
  std::uint64_t file_size_;
  const std::string& path_;
  std::uint64_t num_keys_ = 0, num_tensors_ = 0;
  std::uint64_t alignment_ = kDefaultAlignment;
};

}  // namespace

TypeSize type_size(std::uint32_t type) {
  // {elements, bytes} of a block by ggml type number; numbers 4, 5, 31 to 33 and 36 to 38 were withdrawn.
  static constexpr std::array<TypeSize, 43> kTypes = {{
      {1, 4},     {1, 2},    {32, 18},   {32, 20},   {0, 0},     {0, 0},     {32, 22},
      {32, 24},  // F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1
      {32, 34},   {32, 36},  {256, 84},  {256, 110}, {256, 144}, {256, 176}, {256, 210},  // Q8_0 Q8_1 Q2_K .. Q6_K
      {256, 292}, {256, 66}, {256, 74},  {256, 98},  {256, 50},  {32, 18},  // Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL
      {256, 110}, {256, 82}, {256, 136}, {1, 1},     {1, 2},     {1, 4},     {1, 8},
      {1, 8},  // IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64
      {256, 56},  {1, 2},    {0, 0},     {0, 0},     {0, 0},     {256, 54},  {256, 66},  // IQ1_M BF16 - - - TQ1_0 TQ2_0
      {0, 0},     {0, 0},    {0, 0},     {32, 17},   {64, 36},   {128, 18},  {64, 18},   // - - - MXFP4 NVFP4 Q1_0 Q2_0
  }};
  return type < kTypes.size() ? kTypes[type] : TypeSize{};
}

Result<Header> read_header(std::istream& in, std::uint64_t file_size, const std::string& path) {
  return HeaderParser(in, file_size, path).parse();
}

}  // namespace oscar::gguf
