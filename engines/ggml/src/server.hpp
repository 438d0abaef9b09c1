#pragma once
// Serves the operations of a graph on the quantised layers of one KV buffer: storing rows, attention, context shift.

#include <ggml.h>

#include <cstdint>
#include <map>
#include <oscar/attention.hpp>
#include <vector>

#include "batch.hpp"
#include "context_cache.hpp"
#include "layer_cache.hpp"
#include "nodes.hpp"
#include "simulated_rows.hpp"

namespace oscar::ggml {

class Server {
 public:
  explicit Server(ContextCache& cache) : cache_(cache) {}

  // Once the size of the cache is known.
  void resize(std::int64_t num_cells, int num_streams);
  // Absolute positions of the tokens in a stream's cells [num_cells]; a cell that was never written has its own index.
  std::int32_t* positions(int stream) { return positions_.data() + num_cells_ * stream; }
  std::int64_t positions_bytes() const { return static_cast<std::int64_t>(positions_.size() * sizeof(std::int32_t)); }

  Status store_rows(LayerCache& layer, Side side, const ggml_tensor* node);  // SET_ROWS
  Status attend_to(LayerCache& layer, ggml_tensor* node);                    // FLASH_ATTN_EXT
  Status turn_keys(LayerCache& layer, const ggml_tensor* node);              // ROPE in place
  // Simulates tokens [first, last) of stream 0 again; the cache holds `last` tokens.
  Status simulate(LayerCache& layer, const Simulation& simulation, int first, int last);
  Status finish_batch();  // before anything else touches rows
  void forget();          // the cache was cleared

  Workbench workbench() const;

 private:
  Status learn_positions(const ggml_tensor* key_rows);
  Result<const std::uint64_t*> visible_words(const ggml_tensor* mask, int stream);
  void gather_spans(LayerCache& layer, int stream, std::int64_t num_keys);
  // Puts the layer's batch into its rows before it is read: a simulated cache reads nothing else.
  Status settle_simulated(LayerCache& layer);
  void attend_simulated(LayerCache& layer, const AttentionParams& params, void* workspace);
  const float* queries_in_halves_order(const LayerCache& layer, const ggml_tensor* q, const std::byte* data);

  ContextCache& cache_;
  std::int64_t num_cells_ = 0;
  std::vector<std::int32_t> positions_;  // [num_streams, num_cells], of all layers

  Batch batch_;
  // Every layer is stored into once in an evaluation of the graph: a second time means that a new one began.
  std::uint64_t evaluation_ = 1, shift_ = 1, applied_shift_ = 0;
  std::map<int, std::uint64_t> stored_in_, turned_in_;  // by layer
  bool positions_known_ = false;                        // of this evaluation's batch
  std::vector<std::int32_t> batch_positions_;           // [num_rows] of this evaluation

  // What a mask shows, for all layers that share it.
  struct Visibility {
    const ggml_tensor* mask = nullptr;
    const void* data = nullptr;
    std::uint64_t evaluation = 0;
    std::int64_t words_per_query = 0;
    std::vector<std::uint64_t> words;  // [streams, queries, words_per_query]
  };
  Visibility visibility_;
  std::map<int, SimulatedRows> simulated_;  // by layer
  SplitVisibility split_;                   // of evaluation split_at_
  std::uint64_t split_at_ = 0;
  SimulatedAttention simulated_attention_;
  AttentionPlan plan_;
  // Scratch, kept between calls.
  std::vector<std::byte> bytes_, mask_bytes_, workspace_;
  std::vector<ExactSpan> window_spans_, batch_spans_, spans_;
  std::vector<float> queries_;
};

}  // namespace oscar::ggml
