#include "io/safetensors_header.hpp"

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

namespace oscar::io {
namespace {

constexpr std::size_t kMaxRank = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

// Events of nlohmann's parser. A header is {name: {dtype, shape, data_offsets}, "__metadata__": {text: text}}.
class HeaderEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  RawHeader header;
  std::string reason;

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kBeforeRoot: place_ = Place::kRoot; return true;
      case Place::kTensorObject: place_ = Place::kTensor; return true;
      case Place::kMetadataObject: place_ = Place::kMetadata; return true;
      default: return refuse("an object");
    }
  }

  bool end_object() override {
    if (place_ == Place::kRoot) {
      place_ = Place::kAfterRoot;
      return true;
    }
    if (place_ == Place::kTensor && seen_ != (kDtype | kShape | kOffsets)) {
      return stop("tensor " + quote(name_) + " lacks dtype, shape or data_offsets");
    }
    place_ = Place::kRoot;
    return true;
  }

  bool key(string_t& text) override {
    if (place_ == Place::kRoot) return root_key(text);
    if (place_ == Place::kMetadata) {
      field_ = text;
      place_ = Place::kMetadataValue;
      return header.metadata.contains(text) ? stop("metadata field " + quote(text) + " occurs twice") : true;
    }
    const unsigned field = text == "dtype" ? kDtype : text == "shape" ? kShape : text == "data_offsets" ? kOffsets : 0U;
    if (field == 0) return stop("tensor " + quote(name_) + " has the unknown field " + quote(text));
    if ((seen_ & field) != 0) return stop("field " + quote(text) + " of tensor " + quote(name_) + " occurs twice");
    seen_ |= field;
    place_ = field == kDtype ? Place::kDtypeValue : field == kShape ? Place::kShapeArray : Place::kOffsetsArray;
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::kMetadataValue) {
      header.metadata.emplace(std::move(field_), std::move(text));
      place_ = Place::kMetadata;
      return true;
    }
    if (place_ != Place::kDtypeValue) return refuse("a text");
    tensor_->dtype = std::move(text);
    place_ = Place::kTensor;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::kShapeArray) {
      place_ = Place::kShape;
    } else if (place_ == Place::kOffsetsArray) {
      place_ = Place::kOffsets;
    } else {
      return refuse("an array");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && tensor_->data_offsets.size() != 2) {
      return stop("data_offsets of tensor " + quote(name_) + " are not two numbers");
    }
    place_ = Place::kTensor;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return refuse("a number");
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max())) {
      return stop("tensor " + quote(name_) + " has the impossible size " + std::to_string(value));
    }
    std::vector<std::int64_t>& list = place_ == Place::kShape ? tensor_->shape : tensor_->data_offsets;
    if (list.size() >= kMaxRank) return stop("tensor " + quote(name_) + " has more than 8 dimensions");
    list.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool number_integer(number_integer_t value) override {
    return refuse("the negative number " + std::to_string(value));
  }
  bool number_float(number_float_t, const string_t& text) override { return refuse("the number " + quote(text)); }
  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool binary(binary_t&) override { return refuse("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return stop("the header is not JSON at its byte " + std::to_string(position));
  }

 private:
  enum class Place {
    kBeforeRoot,
    kRoot,
    kAfterRoot,
    kMetadataObject,
    kMetadata,
    kMetadataValue,
    kTensorObject,
    kTensor,
    kDtypeValue,
    kShapeArray,
    kShape,
    kOffsetsArray,
    kOffsets,
  };
  enum Field : unsigned { kDtype = 1, kShape = 2, kOffsets = 4 };

  bool root_key(const std::string& text) {
    if (text == kMetadataKey) {
      if (std::exchange(metadata_seen_, true)) return stop("__metadata__ occurs twice");
      place_ = Place::kMetadataObject;
      return true;
    }
    const auto [entry, is_new] = header.tensors.try_emplace(text);
    if (!is_new) return stop("tensor " + quote(text) + " occurs twice");
    name_ = text;
    tensor_ = &entry->second;
    seen_ = 0;
    place_ = Place::kTensorObject;
    return true;
  }

  bool stop(std::string text) {
    reason = std::move(text);
    return false;
  }
  bool refuse(const std::string& what) { return stop("the header has " + what + " where none belongs"); }

  Place place_ = Place::kBeforeRoot;
  bool metadata_seen_ = false;
  std::string name_;   // of the current tensor
  std::string field_;  // of the current metadata entry
  RawTensor* tensor_ = nullptr;
  unsigned seen_ = 0;
};

}  // namespace

Result<RawHeader> parse_header(std::string_view json) {
  HeaderEvents events;
  if (!nlohmann::json::sax_parse(json, &events)) return make_error(ErrorCode::kBadInput, std::move(events.reason));
  return std::move(events.header);
}

}  // namespace oscar::io
