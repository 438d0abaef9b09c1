#include "../launch.cuh"
template cudaError_t oscar::cuda::launch_decode<128, 1>(const DecodeParams&, const DecodePlan&, cudaStream_t);
