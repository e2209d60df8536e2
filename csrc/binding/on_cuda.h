// CUDA GPUs as a device of csrc/binding/attention.cpp. In the tests, the CPU takes the GPU's place.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/kernels.h"

#ifdef FASTATTN_CUDA_ON_CPU
#include <cuda_runtime.h>
#endif

// The tests define it as CPU, together with FASTATTN_CUDA_ON_CPU.
#ifndef FASTATTN_DISPATCH_KEY
#define FASTATTN_DISPATCH_KEY CUDA
#endif
#define FASTATTN_OPERATOR(name) "cuda_" #name

#ifndef FASTATTN_CUDA_ON_CPU
// From libtorch_cuda, part of its stable ABI. A header declares it only if torch was built for
// CUDA, which the torch at build time need not be.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace fastattn::device {

// The kernels read the seed: nothing waits for the GPU, and a captured graph sees a new seed.
inline void set_seed(const int64_t* seed, DropoutParams* dropout) { dropout->seed_ptr = seed; }

inline void expect_writes(void*, int64_t) {}

using cuda::backward_workspace_bytes;
using cuda::forward_workspace_bytes;
using cuda::unsupported;

// Makes the device of a tensor current while it lives; kernels run on that device's current stream.
class Current {
 public:
#ifdef FASTATTN_CUDA_ON_CPU
  explicit Current(const torch::stable::Tensor&) {}
#else
  explicit Current(const torch::stable::Tensor& t) : guard_(t.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream_));
  }
#endif
  void forward(const ForwardParams& p) { check(cuda::forward(p, stream_)); }
  void backward(const BackwardParams& p) { check(cuda::backward(p, stream_)); }

 private:
  static void check(const char* error) {
    STD_TORCH_CHECK(error == nullptr, "fastattn: CUDA: ", error);
  }

#ifdef FASTATTN_CUDA_ON_CPU
  cuda_on_cpu::DeviceGuard guard_;
#else
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

}  // namespace fastattn::device
