#include <oscar/c_api.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "c_api/cuda_status.hpp"
#include "kernels/cuda/store/launch.hpp"

namespace {

using oscar::c_api::fail;
using oscar::cuda::StoreLayer;
using oscar::cuda::StoreSide;

// The kernel reads arrays of the C struct from device memory as its own.
static_assert(sizeof(oscar_store_layer) == sizeof(StoreLayer) && std::is_trivially_copyable_v<StoreLayer>);
static_assert(offsetof(oscar_store_side, transform) == offsetof(StoreSide, transform));
static_assert(offsetof(oscar_store_side, constants) == offsetof(StoreSide, constants));
static_assert(offsetof(oscar_store_side, block_means) == offsetof(StoreSide, block_means));
static_assert(OSCAR_QUANTIZER_MIN_MAX == static_cast<int>(oscar::Quantizer::kMinMax));
static_assert(OSCAR_QUANTIZER_LEAST_SQUARES == static_cast<int>(oscar::Quantizer::kLeastSquares));
static_assert(OSCAR_QUANTIZER_FEEDBACK == static_cast<int>(oscar::Quantizer::kFeedback));

oscar::Status check_sizes(const oscar_store_shape& shape, const oscar_store_params& params) {
  const auto bad = [](const std::string& what) {
    return oscar::make_error(oscar::ErrorCode::kInvalidArgument, "store: " + what);
  };
  OSCAR_TRY(oscar::c_api::check_struct_size(shape, "oscar_store_shape"));
  OSCAR_TRY(oscar::c_api::check_struct_size(params, "oscar_store_params"));
  if (shape.quantizer < OSCAR_QUANTIZER_MIN_MAX || shape.quantizer > OSCAR_QUANTIZER_FEEDBACK)
    return bad("quantizer is " + std::to_string(shape.quantizer) + "; use OSCAR_QUANTIZER_..., 0 to 2");
  if (params.layer == nullptr && params.device_layers == nullptr)
    return bad("layer and device_layers are both null; give one of them");
  return {};
}

}  // namespace

extern "C" {

int oscar_store_metric_tables(const float* metric, int32_t head_dim, float* row_sum, float* inverse_diagonal,
                              float* total) {
  const oscar::cuda::MetricTables tables = oscar::cuda::metric_tables(metric, head_dim);
  std::copy(tables.row_sum.begin(), tables.row_sum.end(), row_sum);
  std::copy(tables.inverse_diagonal.begin(), tables.inverse_diagonal.end(), inverse_diagonal);
  *total = tables.total;
  return 0;
}

int oscar_cuda_store(const oscar_store_shape* c_shape, const oscar_store_params* c, void* cuda_stream) {
  if (const auto status = check_sizes(*c_shape, *c); !status) return fail(status.error());
  const oscar::cuda::StoreShape shape{c_shape->num_tokens,
                                      c_shape->num_layers,
                                      c_shape->num_kv_heads,
                                      c_shape->head_dim,
                                      static_cast<oscar::Quantizer>(c_shape->quantizer),
                                      c_shape->exact != 0};
  const auto num_sms = oscar::c_api::current_device_sms("store");
  if (!num_sms) return fail(num_sms.error());
  const auto plan = oscar::cuda::plan_store(shape, *num_sms);
  if (!plan) return fail(plan.error());
  oscar::cuda::StoreParams p{};
  p.num_tokens = shape.num_tokens;
  p.num_layers = shape.num_layers;
  p.num_kv_heads = shape.num_kv_heads;
  p.num_blocks = c->num_blocks;
  p.slot_mapping = c->slot_mapping;
  p.positions = c->positions;
  p.window_slots = c->window_slots;
  p.key_token_stride = c->key_token_stride;
  p.key_head_stride = c->key_head_stride;
  p.value_token_stride = c->value_token_stride;
  p.value_head_stride = c->value_head_stride;
  p.page_stride_bytes = c->page_stride_bytes;
  p.head_stride_bytes = c->head_stride_bytes;
  p.window_token_stride = c->window_token_stride;
  p.window_head_stride = c->window_head_stride;
  p.layers = reinterpret_cast<const StoreLayer*>(c->device_layers);
  if (p.layers == nullptr) std::memcpy(&p.layer, c->layer, sizeof p.layer);
  if (const auto status = oscar::cuda::check_store(p, shape); !status) return fail(status.error());
  return oscar::c_api::status_of(oscar::cuda::store(p, shape, *plan, static_cast<cudaStream_t>(cuda_stream)), "store");
}

}  // extern "C"
