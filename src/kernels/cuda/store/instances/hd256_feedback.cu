#include "../launch.cuh"
template cudaError_t oscar::cuda::launch_store<256, oscar::Quantizer::kFeedback>(const StoreParams&, const StorePlan&,
                                                                                 cudaStream_t);
