#include "../launch.cuh"
template cudaError_t oscar::cuda::launch_prefill<256>(const PrefillParams&, const PrefillPlan&, cudaStream_t);
