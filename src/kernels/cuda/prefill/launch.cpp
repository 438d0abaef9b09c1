#include "launch.hpp"

namespace oscar::cuda {

template <int kHeadDim>
cudaError_t launch_prefill(const PrefillParams& params, const PrefillPlan& plan, cudaStream_t stream);
extern template cudaError_t launch_prefill<64>(const PrefillParams&, const PrefillPlan&, cudaStream_t);
extern template cudaError_t launch_prefill<128>(const PrefillParams&, const PrefillPlan&, cudaStream_t);
extern template cudaError_t launch_prefill<256>(const PrefillParams&, const PrefillPlan&, cudaStream_t);

cudaError_t prefill(const PrefillParams& params, const PrefillPlan& plan, int head_dim, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  switch (head_dim) {
    case 64: return launch_prefill<64>(params, plan, stream);
    case 128: return launch_prefill<128>(params, plan, stream);
    case 256: return launch_prefill<256>(params, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace oscar::cuda
