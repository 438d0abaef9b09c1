#pragma once
// A row of codes as 16-bit numbers, and back. llama.cpp saves and restores a cache as F16 rows; encoding a decoded row
// again would not give its codes back. So a decoded row carries its codes, parameters and position in the lowest bits
// of its numbers: 3 of 10 mantissa bits at head_dim 64 and 128, an error below 1 %, where 2 bits have cost 30 %. Any
// reader sees an ordinary row; writing it back restores the page to the bit, in another process too.

#include <ggml.h>

#include <cstdint>
#include <oscar/codec.hpp>
#include <vector>

namespace oscar::ggml {

// One side of one token: what its page slots hold.
struct EncodedRow {
  std::vector<std::uint8_t> codes;        // [num_heads, head_dim], one code a byte
  std::vector<RowParameters> parameters;  // [num_heads]
  std::int32_t position = 0;
};

// Writes `encoded` into the lowest bits of rows [num_heads, head_dim]. head_dim at least 16.
void carry(const EncodedRow& encoded, ParameterFormat format, int head_dim, ggml_fp16_t* rows);

// Reads what such rows carry. Any row gives something: the caller must decode it, carry it again and compare.
EncodedRow read_carried(const ggml_fp16_t* rows, ParameterFormat format, int num_heads, int head_dim);

}  // namespace oscar::ggml
