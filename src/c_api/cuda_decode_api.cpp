#include <oscar/c_api.h>
#include <oscar/version.hpp>

#include <cstring>
#include <string>

#include "c_api/cuda_status.hpp"
#include "c_api/history_fields.hpp"
#include "kernels/cuda/common/shape_checks.hpp"
#include "kernels/cuda/decode/geometry.hpp"
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

struct Launch {
  oscar::cuda::DecodePlan plan;
  oscar::cuda::DecodeParams params;
};

oscar::Result<Launch> launch_of(const oscar_decode_shape& shape, const oscar_decode_params& c) {
  Launch launch{};
  OSCAR_ASSIGN(launch.plan, plan_of(shape));
  OSCAR_TRY(oscar::c_api::check_struct_size(c, "oscar_decode_params"));
  oscar::cuda::DecodeParams& p = launch.params;
  oscar::c_api::copy_history_fields(c, p);
  p.num_requests = shape.num_requests;
  p.query_length = shape.query_length;
  p.num_qo_heads = shape.num_qo_heads;
  p.num_kv_heads = shape.num_kv_heads;
  p.sink = c.sink;
  p.recent = c.recent;
  p.rotary_dim = c.rotary_dim;
  p.seq_lens = c.seq_lens;
  p.schedule = c.schedule;
  p.key_matrix = static_cast<const std::uint8_t*>(c.key_matrix);
  p.value_matrix = static_cast<const std::uint8_t*>(c.value_matrix);
  p.page_mean = c.page_mean;
  p.page_angles = reinterpret_cast<const float2*>(c.page_angles);
  p.dependent = c.dependent != 0;
  OSCAR_TRY(oscar::cuda::check_decode(p, shape_of(shape)));
  return launch;
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

int oscar_cuda_decode_matrices(const float* matrices, int32_t num_kv_heads, int32_t head_dim, void* out,
                               size_t* bytes) {
  if (num_kv_heads < 1)
    return fail({oscar::ErrorCode::kInvalidArgument,
                 "decode matrices: num_kv_heads is " + std::to_string(num_kv_heads) + "; use 1 or more"});
  if (const auto status = oscar::cuda::check_head_dim("decode matrices", head_dim); !status)
    return fail(status.error());
  if (out != nullptr) oscar::cuda::fill_matrices(matrices, num_kv_heads, head_dim, static_cast<std::uint8_t*>(out));
  *bytes = static_cast<std::size_t>(num_kv_heads) * oscar::cuda::matrix_bytes(head_dim);
  return 0;
}

int oscar_cuda_decode_workspace(const oscar_decode_shape* shape, size_t* workspace_bytes, size_t* schedule_bytes) {
  const auto plan = plan_of(*shape);
  if (!plan) return fail(plan.error());
  *workspace_bytes = plan->workspace_bytes;
  *schedule_bytes = plan->schedule_bytes;
  return 0;
}

int oscar_cuda_decode_schedule(const oscar_decode_shape* shape, const oscar_decode_params* params, void* cuda_stream) {
  const auto launch = launch_of(*shape, *params);
  if (!launch) return fail(launch.error());
  return oscar::c_api::status_of(
      oscar::cuda::schedule(launch->params, launch->plan, static_cast<cudaStream_t>(cuda_stream)), "decode schedule");
}

int oscar_cuda_decode(const oscar_decode_shape* shape, const oscar_decode_params* params, void* cuda_stream) {
  const auto launch = launch_of(*shape, *params);
  if (!launch) return fail(launch.error());
  const cudaError_t error =
      oscar::cuda::decode(launch->params, launch->plan, shape->head_dim, static_cast<cudaStream_t>(cuda_stream));
  if (error != cudaSuccess) {
    if (const auto status = oscar::c_api::check_shared_memory(launch->plan.shared_bytes, "decode"); !status)
      return fail(status.error());
  }
  return oscar::c_api::status_of(error, "decode");
}

}  // extern "C"
