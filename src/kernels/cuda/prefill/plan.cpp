#include "plan.hpp"

#include <string>

#include "../common/shape_checks.hpp"
#include "layout.hpp"

namespace oscar::cuda {
namespace {

constexpr int kMaxTokens = 1 << 20, kMaxPages = 1 << 20, kMaxGrid = 65535;

tl::unexpected<Error> bad(const std::string& what) {
  return make_error(ErrorCode::kInvalidArgument, "prefill: " + what);
}

}  // namespace

Result<PrefillPlan> plan_prefill(const PrefillShape& shape) {
  OSCAR_TRY(check_head_dim("prefill", shape.head_dim));
  const auto in_range = [](const char* name, int value, int low, int high) -> Status {
    if (value >= low && value <= high) return {};
    return bad(std::string(name) + " is " + std::to_string(value) + "; use " + std::to_string(low) + " to " +
               std::to_string(high));
  };
  OSCAR_TRY(in_range("num_requests", shape.num_requests, 1, 4096));
  OSCAR_TRY(in_range("num_tokens", shape.num_tokens, 0, kMaxTokens));
  OSCAR_TRY(in_range("num_kv_heads", shape.num_kv_heads, 1, kMaxGrid));
  OSCAR_TRY(in_range("max_pages", shape.max_pages, 1, kMaxPages));
  OSCAR_TRY(in_range("sink", shape.sink, 0, 1 << 16));
  OSCAR_TRY(in_range("recent", shape.recent, 0, 1 << 16));
  if (shape.num_qo_heads < 1 || shape.num_qo_heads % shape.num_kv_heads != 0)
    return bad("num_qo_heads " + std::to_string(shape.num_qo_heads) + " is not a multiple of num_kv_heads " +
               std::to_string(shape.num_kv_heads));
  const std::int64_t group = shape.num_qo_heads / shape.num_kv_heads;
  const auto tiles = [](std::int64_t count, std::int64_t of) { return static_cast<int>((count + of - 1) / of); };
  PrefillPlan plan{};
  plan.tile_keys = prefill_tile_keys(shape.head_dim);
  // every request may end inside a tile
  plan.row_tiles = tiles(shape.num_tokens * group, kPrefillRows) + shape.num_requests - 1;
  plan.sink_tiles = tiles(shape.sink, plan.tile_keys);
  plan.recent_tiles = tiles(shape.recent, plan.tile_keys);
  plan.window_tile_bytes = prefill_window_tile_bytes(shape.head_dim);
  plan.mean_groups = tiles(shape.max_pages, prefill_mean_pages(shape.head_dim));
  const auto align = [](std::int64_t bytes) { return (bytes + 1023) / 1024 * 1024; };
  plan.means_offset = align(std::int64_t{2} * shape.num_tokens * shape.num_qo_heads * shape.head_dim);
  plan.window_offset = plan.means_offset +
                       align(std::int64_t{plan.mean_groups} * shape.num_kv_heads * prefill_means_bytes(shape.head_dim));
  plan.workspace_bytes = plan.window_offset + plan.window_tile_bytes * shape.num_requests * shape.num_kv_heads *
                                                  (plan.sink_tiles + plan.recent_tiles);
  return plan;
}

Status check_prefill(const PrefillParams& params, const PrefillShape& shape) {
  const auto multiple = [](std::int64_t value, int of, const char* name) -> Status {
    if (value % of == 0) return {};
    return bad(std::string(name) + " is " + std::to_string(value) + "; it must be a multiple of " + std::to_string(of) +
               ", since rows and pages are read in 16-byte pieces");
  };
  OSCAR_TRY(multiple(params.q_token_stride, 8, "q_token_stride"));
  OSCAR_TRY(multiple(params.q_head_stride, 8, "q_head_stride"));
  OSCAR_TRY(multiple(params.out_token_stride, 8, "out_token_stride"));
  OSCAR_TRY(multiple(params.out_head_stride, 8, "out_head_stride"));
  OSCAR_TRY(multiple(params.page_stride_bytes, 16, "page_stride_bytes"));
  OSCAR_TRY(multiple(params.head_stride_bytes, 16, "head_stride_bytes"));
  if (reinterpret_cast<std::uintptr_t>(params.workspace) % 1024 != 0)
    return bad("workspace is not aligned to 1024 bytes");
  const auto required = [](const void* pointer, const char* field) -> Status {
    if (pointer != nullptr) return {};
    return bad(std::string(field) + " is null");
  };
  OSCAR_TRY(required(params.workspace, "workspace"));
  OSCAR_TRY(required(params.query_start, "query_start"));
  OSCAR_TRY(required(params.history_lens, "history_lens"));
  OSCAR_TRY(required(params.q, "q"));
  OSCAR_TRY(required(params.pages, "pages"));
  OSCAR_TRY(required(params.block_table, "block_table"));
  OSCAR_TRY(required(params.key_matrix, "key_matrix"));
  OSCAR_TRY(required(params.value_matrix, "value_matrix"));
  OSCAR_TRY(required(params.key_offset, "key_offset"));
  OSCAR_TRY(required(params.value_offset, "value_offset"));
  OSCAR_TRY(required(params.out, "out"));
  OSCAR_TRY(required(params.lse, "lse"));
  if (shape.sink > 0 || shape.recent > 0) {
    OSCAR_TRY(required(params.window_k, "window_k"));
    OSCAR_TRY(required(params.window_v, "window_v"));
    OSCAR_TRY(required(params.window_table, "window_table"));
    OSCAR_TRY(required(params.value_transform, "value_transform"));
    if (params.window_block < 1) return bad("window_block is " + std::to_string(params.window_block));
  }
  if (shape.sink > 0 || shape.recent > 0 || params.block_means != nullptr)
    OSCAR_TRY(required(params.key_transform, "key_transform"));
  if (params.block_means != nullptr && params.num_blocks < 1)
    return bad("num_blocks is " + std::to_string(params.num_blocks) + "; give the blocks of block_means");
  return {};
}

}  // namespace oscar::cuda
