#include "launch.hpp"

namespace oscar::cuda {

template <int kHeadDim, int kColumnTiles>
cudaError_t launch_decode(const DecodeParams& params, const DecodePlan& plan, cudaStream_t stream);

#define OSCAR_DECODE_INSTANCE(head_dim, tiles) \
  extern template cudaError_t launch_decode<head_dim, tiles>(const DecodeParams&, const DecodePlan&, cudaStream_t);
OSCAR_DECODE_INSTANCE(64, 1)
OSCAR_DECODE_INSTANCE(64, 2)
OSCAR_DECODE_INSTANCE(128, 1)
OSCAR_DECODE_INSTANCE(128, 2)
OSCAR_DECODE_INSTANCE(256, 1)
OSCAR_DECODE_INSTANCE(256, 2)
#undef OSCAR_DECODE_INSTANCE

cudaError_t decode(const DecodeParams& params, const DecodePlan& plan, int head_dim, cudaStream_t stream) {
  const bool one = plan.column_tiles == 1;
  switch (head_dim) {
    case 64: return one ? launch_decode<64, 1>(params, plan, stream) : launch_decode<64, 2>(params, plan, stream);
    case 128: return one ? launch_decode<128, 1>(params, plan, stream) : launch_decode<128, 2>(params, plan, stream);
    case 256: return one ? launch_decode<256, 1>(params, plan, stream) : launch_decode<256, 2>(params, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace oscar::cuda
