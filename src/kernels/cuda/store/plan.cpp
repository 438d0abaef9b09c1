#include "plan.hpp"

#include <algorithm>
#include <string>

#include "../common/shape_checks.hpp"

namespace oscar::cuda {
namespace {

constexpr int kFewTokens = 16;       // up to these, a warp takes 2 rows instead of 8
constexpr int kTensorHeadDim = 128;  // widest whose matrices fit shared memory
constexpr int kMaxTokens = 1 << 24;  // of a batch
constexpr int kMaxGrid = 65535;      // blocks along y and z

tl::unexpected<Error> bad(const std::string& what) { return make_error(ErrorCode::kInvalidArgument, "store: " + what); }

Status check_side(const StoreParams& params, const StoreShape& shape, const StoreSide& side, const std::string& name) {
  if (side.rows == nullptr) return {};
  const auto required = [&](const void* pointer, const char* field) -> Status {
    if (pointer != nullptr) return {};
    return bad(name + "." + field + " is null; give it, or leave " + name + ".rows null to store nothing of that side");
  };
  OSCAR_TRY(required(side.pages, "pages"));
  OSCAR_TRY(required(side.transform, "transform"));
  OSCAR_TRY(required(side.constants, "constants"));
  if (shape.quantizer == Quantizer::kFeedback) {
    OSCAR_TRY(required(side.feedback, "feedback"));
    OSCAR_TRY(required(side.metric, "metric"));
    OSCAR_TRY(required(side.row_sum, "row_sum"));
    OSCAR_TRY(required(side.inverse_diagonal, "inverse_diagonal"));
  }
  if (side.block_means != nullptr && (params.positions == nullptr || params.num_blocks < 1))
    return bad(name + ".block_means needs positions and num_blocks; num_blocks is " +
               std::to_string(params.num_blocks) + ", positions are " + (params.positions ? "given" : "null"));
  return {};
}

}  // namespace

Result<StorePlan> plan_store(const StoreShape& shape, int num_sms) {
  OSCAR_TRY(check_head_dim("store", shape.head_dim));
  if (shape.num_tokens < 0 || shape.num_tokens > kMaxTokens)
    return bad("num_tokens is " + std::to_string(shape.num_tokens) + "; use 0 to " + std::to_string(kMaxTokens) +
               ", and store a longer prompt in chunks");
  if (shape.num_kv_heads < 1 || shape.num_kv_heads > kMaxGrid / 2)
    return bad("num_kv_heads is " + std::to_string(shape.num_kv_heads) + "; use 1 to " + std::to_string(kMaxGrid / 2));
  if (shape.num_layers < 1 || shape.num_layers > kMaxGrid)
    return bad("num_layers is " + std::to_string(shape.num_layers) + "; use 1 to " + std::to_string(kMaxGrid));
  if (num_sms < 1) return bad("num_sms is " + std::to_string(num_sms));
  StorePlan plan{};
  plan.tensor_cores = !shape.exact && shape.head_dim <= kTensorHeadDim;
  plan.tile_tokens = shape.num_tokens <= kFewTokens && !plan.tensor_cores ? 16 : kStorePageTokens;
  // the tensor-core kernel's first tile may begin up to a page less one token before the batch
  const int lead = plan.tensor_cores && shape.num_tokens > 0 ? plan.tile_tokens - 1 : 0;
  plan.num_tiles = (shape.num_tokens + lead + plan.tile_tokens - 1) / plan.tile_tokens;
  plan.blocks_a_head = plan.num_tiles;
  if (plan.tensor_cores) {
    const int blocks_per_sm = shape.quantizer == Quantizer::kFeedback ? 1 : 2;
    const int tiles_at_once = 4 / blocks_per_sm;
    const int wave = num_sms * blocks_per_sm / (2 * shape.num_kv_heads * shape.num_layers);
    plan.blocks_a_head = std::min(std::max(wave, 1), (plan.num_tiles + tiles_at_once - 1) / tiles_at_once);
  }
  return plan;
}

Status check_store(const StoreParams& params, const StoreShape& shape) {
  const auto multiple = [](std::int64_t value, int of, const char* name) -> Status {
    if (value % of == 0) return {};
    return bad(std::string(name) + " is " + std::to_string(value) + "; it must be a multiple of " + std::to_string(of) +
               ", since rows and pages are read in 16-byte pieces");
  };
  OSCAR_TRY(multiple(params.key_token_stride, 8, "key_token_stride"));
  OSCAR_TRY(multiple(params.key_head_stride, 8, "key_head_stride"));
  OSCAR_TRY(multiple(params.value_token_stride, 8, "value_token_stride"));
  OSCAR_TRY(multiple(params.value_head_stride, 8, "value_head_stride"));
  OSCAR_TRY(multiple(params.window_token_stride, 8, "window_token_stride"));
  OSCAR_TRY(multiple(params.window_head_stride, 8, "window_head_stride"));
  OSCAR_TRY(multiple(params.page_stride_bytes, 16, "page_stride_bytes"));
  OSCAR_TRY(multiple(params.head_stride_bytes, 16, "head_stride_bytes"));
  if (shape.num_tokens > 0 && params.slot_mapping == nullptr)
    return bad("slot_mapping is null; give num_tokens slots, negative for tokens that are not stored");
  if (params.layers != nullptr) return {};
  if (shape.num_layers != 1)
    return bad("num_layers is " + std::to_string(shape.num_layers) +
               " but layers is null; give an array of num_layers structs in device memory");
  OSCAR_TRY(check_side(params, shape, params.layer.key, "key"));
  return check_side(params, shape, params.layer.value, "value");
}

MetricTables metric_tables(const float* metric, int head_dim) {
  MetricTables tables;
  tables.row_sum.assign(static_cast<std::size_t>(head_dim), 0.0f);
  for (int i = 0; i < head_dim; ++i) {
    tables.inverse_diagonal.push_back(1.0f / metric[i * head_dim + i]);
    for (int j = 0; j < head_dim; ++j) tables.row_sum[static_cast<std::size_t>(j)] += metric[i * head_dim + j];
  }
  float partial[8] = {};
  for (int j = 0; j < head_dim; ++j) partial[j % 8] += tables.row_sum[static_cast<std::size_t>(j)];
  tables.total =
      ((partial[0] + partial[4]) + (partial[2] + partial[6])) + ((partial[1] + partial[5]) + (partial[3] + partial[7]));
  return tables;
}

}  // namespace oscar::cuda
