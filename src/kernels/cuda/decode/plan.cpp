#include "plan.hpp"

#include <algorithm>
#include <string>

namespace oscar::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t align_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// These mirror DecodeConfig (config.hpp), which static_asserts that they agree where it is instantiated.
std::size_t prepared_bytes(int head_dim, int column_tiles) {
  const std::size_t rows = 4 * column_tiles, steps = head_dim / 32;
  return column_tiles * steps * 2 * 32 * 4 + rows * 16;
}
std::size_t partial_bytes(int head_dim, int column_tiles) {
  const std::size_t rows = 4 * column_tiles;
  return rows * head_dim * 4 + rows * 8;
}
std::size_t shared_bytes(int head_dim, int column_tiles, int num_warps, int num_requests) {
  const std::size_t rows = 4 * column_tiles, stage = 32 * head_dim + 256;
  const std::size_t body = num_warps * 2 * stage + num_warps * rows * head_dim * 4 + num_warps * 64 * 20 +
                           num_warps * rows * 8 + num_warps * 2 * 8;
  return (body + 127) / 128 * 128 + sizeof(int) * (num_requests + 1);
}

}  // namespace

Result<DecodePlan> plan_decode(const DecodeShape& shape, int num_sms) {
  const auto bad = [](const std::string& what) { return make_error(ErrorCode::kInvalidArgument, "decode: " + what); };
  if (shape.head_dim != 64 && shape.head_dim != 128 && shape.head_dim != 256)
    return make_error(ErrorCode::kUnsupported, "decode: head_dim is " + std::to_string(shape.head_dim) +
                                                   "; the CUDA kernels serve 64, 128 and 256; use the CPU library");
  if (shape.num_requests < 1 || shape.num_requests > 4096)
    return bad("num_requests is " + std::to_string(shape.num_requests) + "; use 1 to 4096");
  if (shape.query_length < 1 || shape.query_length > 8)
    return bad("query_length is " + std::to_string(shape.query_length) + "; use 1 to 8, or prefill");
  if (shape.num_kv_heads < 1 || shape.num_qo_heads % shape.num_kv_heads != 0)
    return bad("num_qo_heads " + std::to_string(shape.num_qo_heads) + " is not a multiple of num_kv_heads " +
               std::to_string(shape.num_kv_heads));
  if (shape.max_pages < 1 || shape.max_pages > (1 << 20))
    return bad("max_pages is " + std::to_string(shape.max_pages) + "; give the pages of the longest sequence");
  if (num_sms < 1) return bad("num_sms is " + std::to_string(num_sms));
  const int rows = shape.num_qo_heads / shape.num_kv_heads * shape.query_length;
  DecodePlan plan{};
  plan.column_tiles = rows <= 4 ? 1 : 2;
  plan.row_groups = (rows + 4 * plan.column_tiles - 1) / (4 * plan.column_tiles);
  plan.num_warps = shape.head_dim == 256 ? 8 : 12;
  plan.num_blocks = num_sms;
  const std::size_t units = static_cast<std::size_t>(shape.num_requests) * shape.num_kv_heads * plan.row_groups;
  // more units a block only where one each would not be resident at once
  plan.units_per_block = static_cast<int>((units + 8 * num_sms - 1) / (8 * num_sms));
  plan.prepared_bytes = align_up(units * prepared_bytes(shape.head_dim, plan.column_tiles));
  plan.max_pages = shape.max_pages;
  plan.term_bytes = align_up(units * shape.max_pages * 4 * plan.column_tiles * sizeof(float));
  // a piece per segment (INT2 and window of each unit) and one more per block boundary
  plan.partial_bytes = align_up((2 * units + plan.num_blocks) * partial_bytes(shape.head_dim, plan.column_tiles));
  plan.workspace_bytes = plan.prepared_bytes + plan.term_bytes + plan.partial_bytes;
  plan.shared_bytes = shared_bytes(shape.head_dim, plan.column_tiles, plan.num_warps, shape.num_requests);
  return plan;
}

Status check_decode(const DecodeParams& params, const DecodeShape& shape) {
  const auto bad = [](const std::string& what) { return make_error(ErrorCode::kInvalidArgument, "decode: " + what); };
  if (params.window_block <= 0 || params.window_block % kWindowTokens != 0)
    return bad("window_block is " + std::to_string(params.window_block) + "; it must be a multiple of 8");
  if (params.sink < 0 || params.recent < params.query_length)
    return bad("sink " + std::to_string(params.sink) + ", recent " + std::to_string(params.recent) +
               ": sink must not be negative and recent at least query_length");
  if (params.num_angle_blocks < shape.max_pages)
    return bad("the angle table has " + std::to_string(params.num_angle_blocks) + " blocks, max_pages is " +
               std::to_string(shape.max_pages));
  if (params.rotary_dim < 0 || params.rotary_dim > shape.head_dim || params.rotary_dim % 2 != 0)
    return bad("rotary_dim is " + std::to_string(params.rotary_dim) + "; it must be even and at most head_dim");
  return {};
}

}  // namespace oscar::cuda
