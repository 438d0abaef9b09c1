#pragma once
// One work item: a tile of query tokens times the query heads of one KV head, over a range of pages.

#include <oscar/attention.hpp>

#include "attention/page_mean.hpp"
#include "attention/visibility.hpp"
#include "attention/workspace.hpp"

namespace oscar::attention {

// What all items of one call share.
struct Call {
  const AttentionPlan& plan;
  const PagedLayer& layer;
  const AttentionParams& params;
  const cpu::AttentionKernels& kernels;
};

class Tile {
 public:
  // `scratch` has ScratchLayout::bytes. Query tokens [first_query, first_query + num_queries). Rows are counted query
  // by query: row = (query - first_query) * gqa_group + head in group.
  Tile(const Call& call, std::byte* scratch, int kv_head, int first_query, int num_queries);

  // Gathers pages [begin, end) into `states`, num_rows() blocks of state_bytes, which it initialises first.
  void run(int begin_page, int end_page, std::byte* states);

  int num_rows() const { return num_queries_ * group_; }
  std::byte* scratch_states() const { return scratch_ + layout_.states_offset; }

 private:
  void load_queries();
  void transform_queries();
  void prefetch_page(int page) const;
  void packed_page(int page, const PageSpan& span, std::uint64_t tokens);
  void exact_page(const PageSpan& span, std::uint64_t tokens);
  void mean_offsets(const PageSpan& span, std::uint64_t tokens);
  cpu::ParameterSource parameter_source(const std::uint8_t* half, const SideRotation& side) const;

  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(scratch_ + offset);
  }
  float* query(int row) const { return at<float>(layout_.queries_offset) + row * dim_; }
  cpu::KeyRow& key_row(int row) const { return at<cpu::KeyRow>(layout_.key_rows_offset)[row]; }
  float* offsets(int row) const { return at<float>(layout_.offsets_offset) + row * kPageTokens; }
  std::int8_t* operand(int row) const {
    return at<std::int8_t>(layout_.operands_offset) + row * cpu::operand_bytes(dim_);
  }
  KeyMasks& masks(int query) const { return at<KeyMasks>(layout_.masks_offset)[query]; }
  RowState& state(int row) const {
    return *reinterpret_cast<RowState*>(states_ + static_cast<std::size_t>(row) * state_bytes(dim_));
  }

  const Call& call_;
  const ScratchLayout layout_;
  std::byte* scratch_;
  std::byte* states_ = nullptr;
  int kv_head_, first_query_, num_queries_, group_, dim_;
  const HeadRotation& head_;
  BlockMeanCursor cursor_;
  bool transformed_ = false;  // queries are turned when the first packed page comes: an exact prefix never pays for it
};

// Merges the states of one row by LSE and writes out and lse. states: num_states pointers to RowState.
void finish_row(const Call& call, int query, int qo_head, std::byte* states, int num_states, std::size_t stride);

}  // namespace oscar::attention
