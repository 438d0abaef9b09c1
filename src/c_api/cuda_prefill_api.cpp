#include <oscar/c_api.h>

#include <string>

#include "c_api/cuda_status.hpp"
#include "c_api/history_fields.hpp"
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
  oscar::c_api::copy_history_fields(*c, p);
  p.key_matrix = c->key_matrix;
  p.value_matrix = c->value_matrix;
  p.num_requests = shape->num_requests;
  p.num_tokens = shape->num_tokens;
  p.num_qo_heads = shape->num_qo_heads;
  p.num_kv_heads = shape->num_kv_heads;
  p.sink = shape->sink;
  p.recent = shape->recent;
  p.query_start = c->query_start;
  p.history_lens = c->history_lens;
  p.key_transform = c->key_transform;
  p.value_transform = c->value_transform;
  p.block_means = c->block_means;
  p.num_blocks = c->num_blocks;
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
