#include "launch.hpp"

namespace oscar::cuda {

template <int kHeadDim, Quantizer kQuantizer>
cudaError_t launch_store(const StoreParams& params, const StorePlan& plan, cudaStream_t stream);

template <int kHeadDim, Quantizer kQuantizer>
cudaError_t launch_store_tensor(const StoreParams& params, const StorePlan& plan, cudaStream_t stream);

#define OSCAR_STORE_INSTANCES(head_dim)                                                                              \
  extern template cudaError_t launch_store<head_dim, Quantizer::kMinMax>(const StoreParams&, const StorePlan&,       \
                                                                         cudaStream_t);                              \
  extern template cudaError_t launch_store<head_dim, Quantizer::kLeastSquares>(const StoreParams&, const StorePlan&, \
                                                                               cudaStream_t);                        \
  extern template cudaError_t launch_store<head_dim, Quantizer::kFeedback>(const StoreParams&, const StorePlan&,     \
                                                                           cudaStream_t);
OSCAR_STORE_INSTANCES(64)
OSCAR_STORE_INSTANCES(128)
OSCAR_STORE_INSTANCES(256)
#undef OSCAR_STORE_INSTANCES

#define OSCAR_STORE_TENSOR_INSTANCE(head_dim, quantizer)                                                     \
  extern template cudaError_t launch_store_tensor<head_dim, quantizer>(const StoreParams&, const StorePlan&, \
                                                                       cudaStream_t);
OSCAR_STORE_TENSOR_INSTANCE(64, Quantizer::kMinMax)
OSCAR_STORE_TENSOR_INSTANCE(64, Quantizer::kLeastSquares)
OSCAR_STORE_TENSOR_INSTANCE(64, Quantizer::kFeedback)
OSCAR_STORE_TENSOR_INSTANCE(128, Quantizer::kMinMax)
OSCAR_STORE_TENSOR_INSTANCE(128, Quantizer::kLeastSquares)
OSCAR_STORE_TENSOR_INSTANCE(128, Quantizer::kFeedback)
#undef OSCAR_STORE_TENSOR_INSTANCE

namespace {

template <int kHeadDim, Quantizer kQuantizer>
cudaError_t store_instance(const StoreParams& params, const StorePlan& plan, cudaStream_t stream) {
  if constexpr (kHeadDim <= 128) {
    if (plan.tensor_cores) return launch_store_tensor<kHeadDim, kQuantizer>(params, plan, stream);
  }
  return launch_store<kHeadDim, kQuantizer>(params, plan, stream);
}

template <int kHeadDim>
cudaError_t store_width(const StoreParams& params, Quantizer quantizer, const StorePlan& plan, cudaStream_t stream) {
  switch (quantizer) {
    case Quantizer::kMinMax: return store_instance<kHeadDim, Quantizer::kMinMax>(params, plan, stream);
    case Quantizer::kLeastSquares: return store_instance<kHeadDim, Quantizer::kLeastSquares>(params, plan, stream);
    case Quantizer::kFeedback: return store_instance<kHeadDim, Quantizer::kFeedback>(params, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t store(const StoreParams& params, const StoreShape& shape, const StorePlan& plan, cudaStream_t stream) {
  if (plan.num_tiles == 0) return cudaSuccess;
  switch (shape.head_dim) {
    case 64: return store_width<64>(params, shape.quantizer, plan, stream);
    case 128: return store_width<128>(params, shape.quantizer, plan, stream);
    case 256: return store_width<256>(params, shape.quantizer, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace oscar::cuda
