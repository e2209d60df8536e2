// Launches kernels one after the other, and stops at the first error.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastattn::cuda {

class Launcher {
 public:
  explicit Launcher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  // `shared` may exceed the 48 KiB that every kernel gets. Blocks use grid.x alone, whose limit is
  // 2^31 - 1.
  template <typename... Params, typename... Args>
  void run(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared,
           const Args&... args) {
    if (error_ != cudaSuccess || blocks == 0) return;
    if (blocks > 0x7fffffff) {
      error_ = cudaErrorInvalidValue;
      return;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream_;
    error_ = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared));
    if (error_ == cudaSuccess) error_ = cudaLaunchKernelEx(&config, kernel, args...);
  }

  const char* error() const { return error_ == cudaSuccess ? nullptr : cudaGetErrorString(error_); }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace fastattn::cuda
