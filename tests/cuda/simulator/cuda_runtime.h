// CUDA C++ on the CPU: the parts of the language and runtime that csrc/cuda uses. g++ compiles the
// same .cu files with this folder before CUDA's own headers (-x c++).
//
// Blocks run in turn. The threads of a block are fibers, switched at barriers and warp collectives
// (fibers.h). This is a legal schedule of the kernel. The shim detects mistakes that would show in
// other schedules:
//
// - A barrier or collective that not all of its threads reach: some returned, wait at another one,
//   or are not in the mask. The launch fails and says where the threads are.
// - A missing barrier. Between two barriers, warps and their threads run one after the other, up
//   and down in turn, so that a reader finds the value of another time or none.
// - Shared memory that was never written: every block finds it full of NaN (all bits set), which
//   spreads to each use. The shim does not see a value that is read and then not selected, or
//   values that an earlier phase of the block left there.
// - Reads and writes out of bounds: dynamic shared memory is an allocation of exactly the requested
//   size, and AddressSanitizer knows the fibers' stacks.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define FASTATTN_CUDA_ON_CPU 1

#define __global__
#define __device__
#define __host__
#if defined(__SANITIZE_ADDRESS__)  // inlining instrumented code many times takes minutes to compile
#define __forceinline__ inline
#else
#define __forceinline__ inline __attribute__((always_inline))
#endif
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// The linker finds static shared memory by the section's name, so that it can be wiped.
#define __shared__ static __attribute__((section("cuda_shared")))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using uint3 = dim3;
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// A product that is never fused with a sum.
inline float __fmul_rn(float a, float b) {
  float y = a * b;
  asm("" : "+m"(y));
  return y;
}
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx;  // of the running fiber
extern dim3 blockDim, gridDim;

// ---- barriers and warp collectives ----

namespace cuda_on_cpu {

enum class Op { kBarrier, kBarrierOr, kBarrierAnd, kBarrierCount, kExchange };

// The calling line of source. Threads that wait for each other must wait at the same line.
struct Site {
  const char* file;
  int line;
};
#define CUDA_ON_CPU_HERE Site here = {__builtin_FILE(), __builtin_LINE()}

// Fails the block at an address that is no multiple of `bytes`.
void require_aligned(const void* at, size_t bytes, Site here);

// Waits for the block. Returns the or, the and, or the count of `value`.
int barrier(Op op, int value, Site here);

// Waits for the lanes of `mask`. Returns the value of lane `source`.
uint64_t exchange(unsigned mask, uint64_t value, int source, Site here);

// Waits for the whole warp; all[n] is the value of lane n.
void exchange_all(uint64_t value, uint64_t (&all)[32], Site here);

// The lanes of `mask` whose value is not 0.
unsigned ballot(unsigned mask, bool value, Site here);

int lane();

// The dynamic shared memory of the block.
void* dynamic_shared();

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// ---- what kernels call ----

inline void __syncthreads(CUDA_ON_CPU_HERE) { barrier(Op::kBarrier, 0, here); }
inline int __syncthreads_or(int value, CUDA_ON_CPU_HERE) {
  return barrier(Op::kBarrierOr, value, here);
}
inline int __syncthreads_and(int value, CUDA_ON_CPU_HERE) {
  return barrier(Op::kBarrierAnd, value, here);
}
inline int __syncthreads_count(int value, CUDA_ON_CPU_HERE) {
  return barrier(Op::kBarrierCount, value, here);
}

inline void __syncwarp(unsigned mask = ~0u, CUDA_ON_CPU_HERE) { exchange(mask, 0, lane(), here); }
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, CUDA_ON_CPU_HERE) {
  return from_bits<T>(exchange(mask, to_bits(value), source & 31, here));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, CUDA_ON_CPU_HERE) {
  return from_bits<T>(exchange(mask, to_bits(value), lane() ^ lanes, here));
}
inline unsigned __ballot_sync(unsigned mask, int value, CUDA_ON_CPU_HERE) {
  return ballot(mask, value != 0, here);
}
inline int __any_sync(unsigned mask, int value, CUDA_ON_CPU_HERE) {
  return ballot(mask, value != 0, here) != 0;
}
// Of all lanes of a warp.
template <typename Combine>
int reduce(unsigned mask, int value, Combine combine, Site here) {
  for (int lanes = 16; lanes > 0; lanes /= 2)
    value = combine(value, __shfl_xor_sync(mask, value, lanes, here));
  return value;
}
inline int __reduce_max_sync(unsigned mask, int value, CUDA_ON_CPU_HERE) {
  return reduce(mask, value, [](int a, int b) { return a > b ? a : b; }, here);
}
inline int __reduce_add_sync(unsigned mask, int value, CUDA_ON_CPU_HERE) {
  return reduce(mask, value, [](int a, int b) { return a + b; }, here);
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// ---- the runtime ----

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorLaunchFailure };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaLaunchAttribute {};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace cuda_on_cpu {

extern uint64_t visited_tiles[2];      // by kernels so far: inside the mask, and outside
extern uint64_t masked_tiles;          // whose pairs a group of 128 threads has looked at
extern uint64_t score_tiles[2];        // of additive scores: from factors, and direct
extern int current_gpu;                // 0, but where a guard lives
extern int gpu_of_tensors;             // 0, but where a test chooses another for all of them
extern thread_local bool has_context;  // whether this thread has made a call about kernels

struct DeviceGuard {
  DeviceGuard() { current_gpu = gpu_of_tensors; }
  ~DeviceGuard() { current_gpu = 0; }
};

}  // namespace cuda_on_cpu

// The GPUs that are emulated are of compute capability 9.0, and have two multiprocessors.
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount
};
inline cudaError_t cudaGetDevice(int* device) {
  *device = cuda_on_cpu::current_gpu;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrComputeCapabilityMajor   ? 9
           : which == cudaDevAttrComputeCapabilityMinor ? 0
                                                        : 2;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error);  // of the last launch that failed

namespace cuda_on_cpu {

cudaError_t allow_shared(const void* kernel, int bytes);
cudaError_t run_grid(const void* kernel, const cudaLaunchConfig_t& config,
                     void (*body)(void* context), void* context);

}  // namespace cuda_on_cpu

template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute, int bytes) {
  return cuda_on_cpu::allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  // Every thread gets its own copy of the parameters, as on a GPU.
  auto call = [&] { kernel(Params(args)...); };
  return cuda_on_cpu::run_grid(
      reinterpret_cast<const void*>(kernel), *config,
      [](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
}
