#include "../launch.cuh"
template cudaError_t oscar::cuda::launch_store<128, oscar::Quantizer::kMinMax>(const StoreParams&, const StorePlan&,
                                                                               cudaStream_t);
