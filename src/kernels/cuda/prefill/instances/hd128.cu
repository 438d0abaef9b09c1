#include "../launch.cuh"
template cudaError_t oscar::cuda::launch_prefill<128>(const PrefillParams&, const PrefillPlan&, cudaStream_t);
