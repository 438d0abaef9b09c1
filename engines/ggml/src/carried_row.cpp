#include "carried_row.hpp"

#include <bit>

namespace oscar::ggml {
namespace {

// Bits of one head's row besides its codes: parameters and position.
int extra_bits(ParameterFormat format) { return (format == ParameterFormat::kLog8 ? 16 : 64) + 32; }

// Lowest bits of each number that are taken.
int bits_per_number(ParameterFormat format, int head_dim) {
  return (2 * head_dim + extra_bits(format) + head_dim - 1) / head_dim;
}

// A sequence of bits laid over the lowest `depth` bits of a row, plane by plane.
class BitPlanes {
 public:
  BitPlanes(int head_dim) : head_dim_(head_dim) {}

  void put(ggml_fp16_t* row, std::uint64_t value, int count) {
    for (int i = 0; i < count; ++i, ++next_) {
      const ggml_fp16_t bit = static_cast<ggml_fp16_t>(1 << next_ / head_dim_);
      ggml_fp16_t& number = row[next_ % head_dim_];
      number = static_cast<ggml_fp16_t>((value >> i & 1) != 0 ? number | bit : number & ~bit);
    }
  }
  std::uint64_t take(const ggml_fp16_t* row, int count) {
    std::uint64_t value = 0;
    for (int i = 0; i < count; ++i, ++next_) {
      value |= static_cast<std::uint64_t>(row[next_ % head_dim_] >> next_ / head_dim_ & 1) << i;
    }
    return value;
  }
  bool done(int depth) const { return next_ >= depth * head_dim_; }

 private:
  int head_dim_;
  int next_ = 0;
};

}  // namespace

void carry(const EncodedRow& encoded, ParameterFormat format, int head_dim, ggml_fp16_t* rows) {
  const std::uint8_t* code = encoded.codes.data();
  for (const RowParameters& parameters : encoded.parameters) {
    BitPlanes planes(head_dim);
    for (int d = 0; d < head_dim; ++d) planes.put(rows, *code++, 2);
    if (format == ParameterFormat::kLog8) {
      planes.put(rows, static_cast<std::uint8_t>(parameters.scale_code), 8);
      planes.put(rows, static_cast<std::uint8_t>(parameters.offset_code), 8);
    } else {
      planes.put(rows, std::bit_cast<std::uint32_t>(parameters.scale), 32);
      planes.put(rows, std::bit_cast<std::uint32_t>(parameters.zero), 32);
    }
    planes.put(rows, static_cast<std::uint32_t>(encoded.position), 32);
    while (!planes.done(bits_per_number(format, head_dim))) planes.put(rows, 0, 1);  // so that equal rows are equal
    rows += head_dim;
  }
}

EncodedRow read_carried(const ggml_fp16_t* rows, ParameterFormat format, int num_heads, int head_dim) {
  EncodedRow encoded;
  encoded.codes.reserve(static_cast<std::size_t>(num_heads) * head_dim);
  for (int h = 0; h < num_heads; ++h, rows += head_dim) {
    BitPlanes planes(head_dim);
    for (int d = 0; d < head_dim; ++d) encoded.codes.push_back(static_cast<std::uint8_t>(planes.take(rows, 2)));
    RowParameters& parameters = encoded.parameters.emplace_back();
    if (format == ParameterFormat::kLog8) {
      parameters.scale_code = static_cast<std::int8_t>(planes.take(rows, 8));
      parameters.offset_code = static_cast<std::int8_t>(planes.take(rows, 8));
    } else {
      parameters.scale = std::bit_cast<float>(static_cast<std::uint32_t>(planes.take(rows, 32)));
      parameters.zero = std::bit_cast<float>(static_cast<std::uint32_t>(planes.take(rows, 32)));
    }
    encoded.position = static_cast<std::int32_t>(planes.take(rows, 32));
  }
  return encoded;
}

}  // namespace oscar::ggml
