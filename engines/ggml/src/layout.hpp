#pragma once
// How one layer's cache tensors are laid out in the buffer, to the byte.
// One side (K or V) of one stream: pages [num_pages, num_kv_heads, half_bytes], then the 16-bit window rows
// [sink + ring, num_kv_heads, head_dim], padded to kAlignment. Streams follow one another.

#include <cstddef>
#include <cstdint>
#include <oscar/cache.hpp>
#include <oscar/ggml.hpp>

namespace oscar::ggml {

inline constexpr std::size_t kAlignment =
    64;  // of the buffer and of every tensor in it: a cache line, a vector register

constexpr std::size_t align_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct LayerLayout {
  int num_kv_heads = 0;
  int head_dim = 0;
  std::int64_t num_cells = 0;  // of one stream
  int num_streams = 0;
  std::int64_t num_pages = 0;                            // of one stream
  std::size_t half_bytes = 0;                            // allocated for one page half of one head
  std::size_t page_bytes = 0;                            // pages of one side and stream
  std::size_t window_bytes = 0;                          // window rows of one side and stream
  std::size_t stream_bytes = 0;                          // both, aligned
  ParameterFormat page_format = ParameterFormat::kLog8;  // as pages are written; half_bytes may allow a larger one
  KvSpec window_spec;  // sink and rows as kept in memory, and the format that was allocated
  int ring_capacity = 0;

  std::size_t side_bytes() const { return stream_bytes * static_cast<std::size_t>(num_streams); }
  int row_width() const { return num_kv_heads * head_dim; }
};

// Whether a layer's cache is kept in 2 bits: full attention, and the rotation has it.
bool is_quantized(const RotationSet& rotation, int layer);

// Layout of a quantised layer. num_cells: cells of one stream, as llama.cpp pads them (a multiple of 256).
LayerLayout plan_layer(const CacheConfig& config, ParameterFormat format, int num_kv_heads, int head_dim,
                       std::int64_t num_cells, int num_streams);

// What the layer adds to a cache's usage.
void add_usage(const LayerLayout& layout, CacheUsage& usage);
// The same for a layer that keeps an F16 cache; `width` = num_kv_heads * head_dim.
void add_delegated_usage(std::int64_t width, std::int64_t num_cells, int num_streams, CacheUsage& usage);

}  // namespace oscar::ggml
