// Sums and maxima over lanes and over a block of kThreads threads, always in the same order.
#pragma once

#include "cuda/base/ptx.cuh"

namespace fastattn::cuda {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

FASTATTN_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
FASTATTN_DEVICE int lane() { return static_cast<int>(threadIdx.x % 32); }
FASTATTN_DEVICE int warp() { return static_cast<int>(threadIdx.x / 32); }

constexpr unsigned kAllLanes = ~0u;

FASTATTN_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }  // ignores NaN
FASTATTN_DEVICE float sum_of(float a, float b) { return a + b; }

// Over groups of `lanes` neighbouring lanes, a power of two. All of them get the result.
FASTATTN_DEVICE float lanes_max(float x, int lanes) {
  for (int n = lanes / 2; n > 0; n /= 2) x = max_of(x, __shfl_xor_sync(kAllLanes, x, n));
  return x;
}
FASTATTN_DEVICE float lanes_sum(float x, int lanes) {
  for (int n = lanes / 2; n > 0; n /= 2) x = sum_of(x, __shfl_xor_sync(kAllLanes, x, n));
  return x;
}

// Over the block. `scratch` holds kWarps floats that nothing else uses. All threads get the result.
template <typename Combine>
FASTATTN_DEVICE float combine_warps(float of_warp, float* scratch, Combine combine) {
  __syncthreads();
  if (thread() % 32 == 0) scratch[thread() / 32] = of_warp;
  __syncthreads();
  float x = scratch[0];
  for (int n = 1; n < kWarps; ++n) x = combine(x, scratch[n]);
  return x;
}
FASTATTN_DEVICE float block_max(float x, float* scratch) {
  return combine_warps(lanes_max(x, 32), scratch, [](float a, float b) { return max_of(a, b); });
}
FASTATTN_DEVICE float block_sum(float x, float* scratch) {
  return combine_warps(lanes_sum(x, 32), scratch, [](float a, float b) { return sum_of(a, b); });
}

}  // namespace fastattn::cuda
