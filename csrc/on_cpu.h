// The CPU as csrc/ops.cpp sees a device.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cpu/kernels.h"

#define FASTATTN_DISPATCH_KEY CPU
#define FASTATTN_OPERATOR(name) #name

namespace fastattn::device {

inline void set_seed(const torch::stable::Tensor& seed, DropoutParams* dropout) {
  dropout->seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed.data_ptr()));
}

inline const char* unsupported(const AttentionParams&) { return nullptr; }

using cpu::backward_workspace_bytes;
using cpu::forward_workspace_bytes;

inline Parallel torch_threads() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t n, void (*body)(void*, int64_t, int64_t), void* ctx) {
            torch::stable::parallel_for(0, n, 1,
                                        [&](int64_t begin, int64_t end) { body(ctx, begin, end); });
          }};
}

// The device that holds a tensor, for the duration of a call: of CPUs there is one.
class Current {
 public:
  explicit Current(const torch::stable::Tensor&) {}
  void forward(const ForwardParams& p) { cpu::forward(p, torch_threads()); }
  void backward(const BackwardParams& p) { cpu::backward(p, torch_threads()); }
};

}  // namespace fastattn::device
