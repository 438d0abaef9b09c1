#include <oscar/c_api.h>
#include <oscar/version.hpp>

#include <cstring>
#include <string>

#include "c_api/cuda_status.hpp"
#include "kernels/cuda/decode/launch.hpp"
#include "kernels/cuda/decode/plan.hpp"

namespace {

using oscar::c_api::fail;

oscar::cuda::DecodeShape shape_of(const oscar_decode_shape& s) {
  return {s.num_requests, s.query_length, s.num_qo_heads, s.num_kv_heads, s.head_dim, s.max_pages};
}

oscar::Result<oscar::cuda::DecodePlan> plan_of(const oscar_decode_shape& shape) {
  OSCAR_TRY(oscar::c_api::check_struct_size(shape, "oscar_decode_shape"));
  int num_sms = shape.num_sms;
  if (num_sms == 0) {
    OSCAR_ASSIGN(num_sms, oscar::c_api::current_device_sms("decode"));
  }
  return oscar::cuda::plan_decode(shape_of(shape), num_sms);
}

}  // namespace

extern "C" {

const char* oscar_last_error(void) { return oscar::c_api::last_error.c_str(); }
const char* oscar_version(void) { return OSCAR_VERSION_STRING; }

int oscar_cuda_page_angles(const float* inverse_frequency, int32_t head_dim, int32_t rotary_dim, int32_t max_pages,
                           float* angles) {
  if (head_dim <= 0 || head_dim % 2 != 0 || rotary_dim < 0 || rotary_dim > head_dim || max_pages < 0)
    return fail({oscar::ErrorCode::kInvalidArgument, "page angles: head_dim " + std::to_string(head_dim) +
                                                         ", rotary_dim " + std::to_string(rotary_dim) + ", max_pages " +
                                                         std::to_string(max_pages)});
  oscar::cuda::fill_page_angles(inverse_frequency, head_dim, rotary_dim, max_pages, angles);
  return 0;
}

int oscar_cuda_decode_workspace(const oscar_decode_shape* shape, size_t* bytes) {
  const auto plan = plan_of(*shape);
  if (!plan) return fail(plan.error());
  *bytes = plan->workspace_bytes;
  return 0;
}

int oscar_cuda_decode(const oscar_decode_shape* shape, const oscar_decode_params* c, void* cuda_stream) {
  const auto plan = plan_of(*shape);
  if (!plan) return fail(plan.error());
  if (const auto status = oscar::c_api::check_struct_size(*c, "oscar_decode_params"); !status)
    return fail(status.error());
  oscar::cuda::DecodeParams p{};
  p.num_requests = shape->num_requests;
  p.query_length = shape->query_length;
  p.num_qo_heads = shape->num_qo_heads;
  p.num_kv_heads = shape->num_kv_heads;
  p.sink = c->sink;
  p.recent = c->recent;
  p.sliding_window = c->sliding_window;
  p.rotary_dim = c->rotary_dim;
  p.scale = c->scale;
  p.soft_cap = c->soft_cap;
  p.seq_lens = c->seq_lens;
  p.q = static_cast<const __nv_bfloat16*>(c->q);
  p.q_token_stride = c->q_token_stride;
  p.q_head_stride = c->q_head_stride;
  p.pages = c->pages;
  p.block_table = c->block_table;
  p.block_table_stride = c->block_table_stride;
  p.page_stride_bytes = c->page_stride_bytes;
  p.head_stride_bytes = c->head_stride_bytes;
  p.window_k = static_cast<const __nv_bfloat16*>(c->window_k);
  p.window_v = static_cast<const __nv_bfloat16*>(c->window_v);
  p.window_table = c->window_table;
  p.window_table_stride = c->window_table_stride;
  p.window_block_stride = c->window_block_stride;
  p.window_token_stride = c->window_token_stride;
  p.window_head_stride = c->window_head_stride;
  p.window_block = c->window_block;
  p.key_matrix = c->key_matrix;
  p.value_matrix = c->value_matrix;
  p.page_mean = c->page_mean;
  p.key_offset = reinterpret_cast<const oscar::cuda::OffsetScale*>(c->key_offset);
  p.value_offset = reinterpret_cast<const oscar::cuda::OffsetScale*>(c->value_offset);
  p.page_angles = reinterpret_cast<const float2*>(c->page_angles);
  p.out = static_cast<__nv_bfloat16*>(c->out);
  p.out_token_stride = c->out_token_stride;
  p.out_head_stride = c->out_head_stride;
  p.lse = c->lse;
  p.workspace = c->workspace;
  p.dependent = c->dependent != 0;
  if (const auto status = oscar::cuda::check_decode(p, shape_of(*shape)); !status) return fail(status.error());
  if (const auto status = oscar::c_api::check_shared_memory(plan->shared_bytes, "decode"); !status)
    return fail(status.error());
  return oscar::c_api::status_of(oscar::cuda::decode(p, *plan, shape->head_dim, static_cast<cudaStream_t>(cuda_stream)),
                                 "decode");
}

}  // extern "C"
