#include "../launch.cuh"
template cudaError_t oscar::cuda::launch_decode<256, 2>(const DecodeParams&, const DecodePlan&, cudaStream_t);
