#pragma once
// Fresh rows of one layer, from their SET_ROWS until their attention is done. They stay out of the window rows that
// long: the first query of the batch still reads the rows that the ring would lose to the last.

#include <ggml.h>

#include <cstdint>
#include <oscar/cache.hpp>
#include <vector>

#include "layer_cache.hpp"
#include "nodes.hpp"

namespace oscar::ggml {

class Batch {
 public:
  // Starts a batch of the layer: `cell_ids` [num_rows] count cells over all streams. Error kInternal: a cell outside
  // the cache.
  Status begin(LayerCache& layer, const ggml_tensor* cell_ids);
  // Takes the rows [num_rows, num_kv_heads * head_dim] of one side, rounded to F16 as llama.cpp's own cache would hold
  // them.
  void stage(Side side, const ggml_tensor* rows);

  bool empty() const { return layer_ == nullptr; }
  bool accepts(const LayerCache& layer, Side side) const { return layer_ == &layer && !has_[index_of(side)]; }
  bool belongs_to(const LayerCache& layer) const { return layer_ == &layer; }
  int num_rows() const { return static_cast<int>(cells_.size()); }
  int stream(int row) const { return streams_[row]; }
  std::int32_t cell(int row) const { return cells_[row]; }
  void set_position(int row, std::int32_t position) { positions_[row] = position; }
  const std::int32_t* positions() const { return positions_.data(); }

  // Writes the pages, once. Error kBadInput: NaN or infinity.
  Status encode(const Workbench& bench);
  // Writes the pages if that is still to be done, then the window rows, and forgets the batch.
  Status commit(const Workbench& bench);
  void drop() { layer_ = nullptr; }

  // Appends the batch's spans of one stream, ascending; nothing unless both sides are staged.
  void append_spans(int stream, bool always, std::vector<ExactSpan>& spans) const;

 private:
  static constexpr std::size_t index_of(Side side) { return side == Side::kKey ? 0 : 1; }

  LayerCache* layer_ = nullptr;
  bool has_[2] = {false, false};
  bool encoded_ = false;
  std::vector<std::int32_t> streams_, cells_, positions_;  // [num_rows]
  std::vector<float> rows_[2];                             // [num_rows, num_kv_heads, head_dim], halves order
  std::vector<ggml_fp16_t> exact_[2];
  std::vector<float> row_;        // scratch
  std::vector<std::byte> bytes_;  // scratch
};

}  // namespace oscar::ggml
