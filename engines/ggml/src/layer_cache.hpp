#pragma once
// The quantised cache of one layer: pages and window rows of its streams in llama.cpp's buffer, and their rows as
// llama.cpp would have them. Keys are kept in RoPE-halves order and handed out in llama.cpp's.

#include <ggml.h>

#include <cstdint>
#include <oscar/cache.hpp>
#include <oscar/isa.hpp>
#include <oscar/rotation.hpp>
#include <vector>

#include "carried_row.hpp"
#include "layout.hpp"
#include "nodes.hpp"

namespace oscar::ggml {

// What every layer of a context works with.
struct Workbench {
  Quantizer quantizer = Quantizer::kFeedback;
  Isa isa = Isa::kScalar;
  Executor* executor = nullptr;
  bool encode = true;  // write pages; false: window rows only
};

class LayerCache {
 public:
  struct Stream {
    PagedLayer pages;
    WindowRows windows;
  };

  LayerCache(int index, const LayerLayout& layout) : index_(index), layout_(layout) {}

  // Memory of one side; the layer is ready when both are attached.
  void attach(Side side, std::uint8_t* base);
  // The transforms that pages are written and read with from now on.
  void set_rotation(const LayerRotation& rotation, ParameterFormat format);
  // Learns llama.cpp's channel order from the node that made the keys; later calls return at once. Errors: kUnsupported
  // (an unknown kind of RoPE), kMismatch (not the RoPE of the calibration).
  Status learn_rope(const ggml_tensor* key_rows);

  int index() const { return index_; }
  const LayerLayout& layout() const { return layout_; }
  const RopeSpec& rope() const { return rope_; }
  // Channel of llama.cpp's row for each channel in halves order; empty when they are the same.
  const std::vector<int>& permutation() const { return permutation_; }
  Stream& stream(int index) { return streams_[index]; }

  // F16 rows [num_rows, num_kv_heads, head_dim] of consecutive cells in llama.cpp's channel order: the kept copy where
  // there is one, else decoded from the page and carrying its codes. positions: of those cells.
  void read_rows(Side side, int stream, std::int64_t first_cell, int num_rows, const std::int32_t* positions, Isa isa,
                 ggml_fp16_t* rows);
  // Stores such rows; codes that a row carries are taken over. Keys set their cells' positions: the carried one, else
  // the cell's own index, moved like the last carried one. Error kBadInput: NaN or infinity.
  Status write_rows(Side side, int stream, std::int64_t first_cell, int num_rows, std::int32_t* positions,
                    const Workbench& bench, const ggml_fp16_t* rows);
  // Turns the keys of a stream's cells by shifts [num_cells] positions, to `positions`; exact rows stay exact.
  Status turn_keys(int stream, const std::int32_t* shifts, const std::int32_t* positions, const Workbench& bench);
  // Copies one side of a stream. Keys first, then values; in the other order window rows are lost, which costs accuracy
  // only.
  void copy_stream(Side side, int from, int to);
  // Whether every token in [0, num_tokens) of a stream has a kept row.
  bool keeps(int stream, int num_tokens);
  // Encodes those tokens from their kept rows.
  Status encode_kept_rows(int stream, int num_tokens, const std::int32_t* positions, const Workbench& bench);
  void forget_windows();

  // One row [num_kv_heads, head_dim] between llama.cpp's channel order and ours; values have the same in both.
  void to_halves(Side side, const float* row, float* halves) const;
  void from_halves(Side side, const float* halves, float* row) const;

 private:
  EncodedRow unpack_row(Side side, const Stream& stream, std::int32_t cell, std::int32_t position) const;
  void pack_row(Side side, const Stream& stream, std::int32_t cell, const EncodedRow& encoded) const;
  // In halves order.
  void decode_row(Side side, const EncodedRow& encoded, Isa isa, float* row) const;
  // As llama.cpp sees it.
  void show_row(Side side, const EncodedRow& encoded, Isa isa, ggml_fp16_t* row) const;
  // Takes over the codes that `row` carries, if it does.
  bool take_over(Side side, Stream& stream, std::int32_t cell, Isa isa, const ggml_fp16_t* row, std::int32_t* position);

  int index_;
  LayerLayout layout_;
  const LayerRotation* rotation_ = nullptr;
  std::uint8_t* base_[2] = {nullptr, nullptr};
  std::vector<Stream> streams_;
  bool rope_known_ = false;
  RopeSpec rope_;
  std::vector<int> permutation_;
  std::vector<ExactSpan> spans_;  // scratch
};

}  // namespace oscar::ggml
