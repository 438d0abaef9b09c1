#include "../tensor/launch.cuh"
template cudaError_t oscar::cuda::launch_store_tensor<128, oscar::Quantizer::kMinMax>(const StoreParams&,
                                                                                      const StorePlan&, cudaStream_t);
