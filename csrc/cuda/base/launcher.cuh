// Launches kernels one after the other, and stops at the first error.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastattn::cuda {

// Bytes of dynamic shared memory: of a launch, and the most of any launch of the kernel.
struct SharedBytes {
  SharedBytes(size_t always) : now(always), most(always) {}
  SharedBytes(size_t now, size_t most) : now(now), most(most) {}

  size_t now, most;
};

constexpr size_t kSharedByDefault = 48 << 10;  // more has to be asked for

class Launcher {
 public:
  explicit Launcher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  // Lets a kernel have so much shared memory. As all calls about kernels, it also binds this thread
  // to the device's context, which the driver's own functions take for granted.
  template <typename... Params>
  void prepare(void (*kernel)(Params...), size_t bytes) {
    if (error_ == cudaSuccess && bytes > kSharedByDefault)
      error_ = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes));
  }

  // Blocks use grid.x alone, whose limit is 2^31 - 1. The limit of a kernel's shared memory is one
  // for all threads: each of them sets the same, so that none takes away what another needs.
  template <typename... Params, typename... Args>
  void run(void (*kernel)(Params...), int64_t blocks, int threads, SharedBytes shared,
           const Args&... args) {
    if (error_ != cudaSuccess || blocks == 0) return;
    if (blocks > 0x7fffffff) {
      error_ = cudaErrorInvalidValue;
      return;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared.now;
    config.stream = stream_;
    prepare(kernel, shared.most);
    if (error_ == cudaSuccess) error_ = cudaLaunchKernelEx(&config, kernel, args...);
  }

  const char* error() const { return error_ == cudaSuccess ? nullptr : cudaGetErrorString(error_); }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace fastattn::cuda
