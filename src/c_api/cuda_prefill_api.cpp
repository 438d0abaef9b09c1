#include <oscar/c_api.h>

#include <string>

#include "c_api/cuda_status.hpp"
#include "kernels/cuda/prefill/launch.hpp"
#include "kernels/cuda/prefill/plan.hpp"

namespace {

using oscar::c_api::check_struct_size;
using oscar::c_api::fail;
using oscar::c_api::status_of;
using oscar::cuda::OffsetScale;
using oscar::cuda::PrefillShape;

PrefillShape shape_of(const oscar_prefill_shape& s) {
  return {s.num_requests, s.num_tokens, s.num_qo_heads, s.num_kv_heads, s.head_dim, s.max_pages, s.sink, s.recent};
}

}  // namespace

extern "C" {

int oscar_cuda_prefill_workspace(const oscar_prefill_shape* shape, size_t* bytes) {
  if (const auto status = check_struct_size(*shape, "oscar_prefill_shape"); !status) return fail(status.error());
  const auto plan = oscar::cuda::plan_prefill(shape_of(*shape));
  if (!plan) return fail(plan.error());
  *bytes = static_cast<size_t>(plan->workspace_bytes);
  return 0;
}

int oscar_cuda_prefill(const oscar_prefill_shape* shape, const oscar_prefill_params* c, void* cuda_stream) {
  if (const auto status = check_struct_size(*shape, "oscar_prefill_shape"); !status) return fail(status.error());
  if (const auto status = check_struct_size(*c, "oscar_prefill_params"); !status) return fail(status.error());
  const PrefillShape bounds = shape_of(*shape);
  const auto plan = oscar::cuda::plan_prefill(bounds);
  if (!plan) return fail(plan.error());
  oscar::cuda::PrefillParams p{};
  p.num_requests = shape->num_requests;
  p.num_tokens = shape->num_tokens;
  p.num_qo_heads = shape->num_qo_heads;
  p.num_kv_heads = shape->num_kv_heads;
  p.sink = shape->sink;
  p.recent = shape->recent;
  p.sliding_window = c->sliding_window;
  p.scale = c->scale;
  p.soft_cap = c->soft_cap;
  p.query_start = c->query_start;
  p.history_lens = c->history_lens;
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
  p.key_transform = c->key_transform;
  p.value_transform = c->value_transform;
  p.value_matrix = c->value_matrix;
  p.block_means = c->block_means;
  p.num_blocks = c->num_blocks;
  p.key_offset = reinterpret_cast<const OffsetScale*>(c->key_offset);
  p.value_offset = reinterpret_cast<const OffsetScale*>(c->value_offset);
  p.out = static_cast<__nv_bfloat16*>(c->out);
  p.out_token_stride = c->out_token_stride;
  p.out_head_stride = c->out_head_stride;
  p.lse = c->lse;
  p.workspace = c->workspace;
  if (const auto status = oscar::cuda::check_prefill(p, bounds); !status) return fail(status.error());
  return status_of(oscar::cuda::prefill(p, *plan, shape->head_dim, static_cast<cudaStream_t>(cuda_stream)), "prefill");
}

int oscar_cuda_merge(const oscar_merge_params* c, void* cuda_stream) {
  if (const auto status = check_struct_size(*c, "oscar_merge_params"); !status) return fail(status.error());
  // a row's threads share a block of 256
  if (c->head_dim != 64 && c->head_dim != 128 && c->head_dim != 256)
    return fail({oscar::ErrorCode::kUnsupported,
                 "merge: head_dim is " + std::to_string(c->head_dim) + "; the CUDA kernels serve 64, 128 and 256"});
  oscar::cuda::MergeParams p{};
  p.num_tokens = c->num_tokens;
  p.num_heads = c->num_heads;
  p.head_dim = c->head_dim;
  p.out = static_cast<__nv_bfloat16*>(c->out);
  p.lse = c->lse;
  p.out_token_stride = c->out_token_stride;
  p.out_head_stride = c->out_head_stride;
  p.other = static_cast<const __nv_bfloat16*>(c->other);
  p.other_lse = c->other_lse;
  p.other_token_stride = c->other_token_stride;
  p.other_head_stride = c->other_head_stride;
  p.other_lse_token_stride = c->other_lse_token_stride;
  p.other_lse_head_stride = c->other_lse_head_stride;
  return status_of(oscar::cuda::merge(p, static_cast<cudaStream_t>(cuda_stream)), "merge");
}

}  // extern "C"
