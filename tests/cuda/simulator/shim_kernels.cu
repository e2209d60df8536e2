// Small kernels, right and wrong: what the shim can run, and which mistakes it finds.
#include <cuda_runtime.h>

#include "cuda/tile/curve.cuh"
#include "products.h"

namespace {

// Sums 64 numbers; `mistake` plants one.
enum Mistake : int {
  kNone,
  kNoBarrier,        // others are read before they have written
  kNoBarrierBefore,  // a value is overwritten before others have read it
  kBarrierInBranch,  // half of the threads wait
  kReturnEarly,      // one thread leaves, the others wait
  kTwoBarriers,      // all wait, half of them elsewhere
  kLanesMissing,     // a shuffle among lanes that do not all come
  kUnwritten,        // the last element is never written
  kPastTheEnd,       // one element past the input
  kPastShared        // one element past the shared memory
};
constexpr int kThreads = 64;

__global__ void __launch_bounds__(kThreads) sum_kernel(const float* in, float* out, int mistake) {
  __shared__ float last[1];
  float* const values = static_cast<float*>(cuda_on_cpu::dynamic_shared());
  const int n = static_cast<int>(threadIdx.x);
  if (mistake == kReturnEarly && n == 3) return;
  if (!(mistake == kUnwritten && n == kThreads - 1))
    values[n] = in[blockIdx.x * kThreads + n + (mistake == kPastTheEnd ? 1 : 0)];
  if (mistake == kPastShared && n == 0) values[kThreads] = 0.f;
  if (mistake == kBarrierInBranch && n < 32) __syncthreads();
  if (mistake == kTwoBarriers) {
    if (n < 32) {
      __syncthreads();
    } else {
      __syncthreads_or(0);
    }
  }
  if (mistake != kNoBarrier && mistake != kBarrierInBranch) __syncthreads();

  const float neighbours = values[(n + 1) % kThreads] + values[(n + kThreads - 1) % kThreads];
  if (mistake != kNoBarrierBefore) __syncthreads();
  values[n] = neighbours * 0.5f;
  __syncthreads();

  float sum = values[n];
  if (mistake == kLanesMissing && n % 2 == 0) {
    sum += __shfl_xor_sync(~0u, sum, 16);
  } else if (mistake != kLanesMissing) {
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  if (n == 32) last[0] = sum;
  const int all = __syncthreads_count(sum == sum);
  const unsigned even = __ballot_sync(~0u, n % 2 == 0);
  if (n == 0) out[blockIdx.x] = all == kThreads && even == 0x55555555u ? sum + last[0] : -1.f;
}

}  // namespace

extern "C" const char* shim_sum(const float* in, float* out, unsigned blocks, int mistake,
                                int64_t bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  const cudaError_t error = cudaLaunchKernelEx(&config, sum_kernel, in, out, mistake);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Ratios and slopes of a softcap.
extern "C" void shim_tanh(const float* x, float* ratio, float* slope, int64_t n) {
  for (int64_t at = 0; at < n; ++at) {
    const fastattn::cuda::Capped capped = fastattn::cuda::accurate_tanh(x[at]);
    ratio[at] = capped.ratio, slope[at] = capped.slope;
  }
}

// c + sum_k x_k y_k of 16 products.
extern "C" float shim_sum_products(float c, const float* x, const float* y) {
  return cuda_on_cpu::add_products(true, c, x, y);
}

// Approximate reciprocals and powers of 2.
extern "C" void shim_approximate(const float* x, float* reciprocal, float* power, int64_t n) {
  for (int64_t at = 0; at < n; ++at) {
    reciprocal[at] = fastattn::cuda::rcp_approx(x[at]);
    power[at] = fastattn::cuda::ex2_approx(x[at]);
  }
}
