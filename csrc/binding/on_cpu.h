// The CPU as a device of csrc/binding/attention.cpp.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cpu/kernels.h"

#define FASTATTN_DISPATCH_KEY CPU
#define FASTATTN_OPERATOR(name) #name

namespace fastattn::device {

inline void set_seed(const int64_t* seed, DropoutParams* dropout) {
  dropout->seed = static_cast<uint64_t>(*seed);
}

inline const char* unsupported(const AttentionParams&) { return nullptr; }

// Requests huge pages for a result that will be written completely. malloc takes blocks of this
// size from the system at every call. Half of the time of writing them was page faults, one for
// each 4 KiB. Failure is no error.
inline void expect_writes([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kMapped = 32 << 20, kPage = 4096;
  if (bytes < kMapped) return;
  char* const from = static_cast<char*>(data);
  char* const begin = from + (kPage - reinterpret_cast<intptr_t>(from) % kPage) % kPage;
  madvise(begin, static_cast<size_t>((from + bytes - begin) / kPage * kPage), MADV_HUGEPAGE);
#endif
}

using cpu::backward_workspace_bytes;
using cpu::forward_workspace_bytes;

inline Parallel torch_threads() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t n, void (*body)(void*, int64_t, int64_t), void* ctx) {
            torch::stable::parallel_for(0, n, 1,
                                        [&](int64_t begin, int64_t end) { body(ctx, begin, end); });
          }};
}

// Makes the device of a tensor current during a call. There is only one CPU, so it does nothing.
class Current {
 public:
  explicit Current(const torch::stable::Tensor&) {}
  // The params of this thread's last call, for binding/direct.h. Its pointers may dangle.
  template <typename Params>
  static Params& last() {
    static thread_local Params params;
    return params;
  }
  void forward(const ForwardParams& p) { compute(last<ForwardParams>() = p); }
  void backward(const BackwardParams& p) { compute(last<BackwardParams>() = p); }
  static void compute(const ForwardParams& p) { cpu::forward(p, torch_threads()); }
  static void compute(const BackwardParams& p) { cpu::backward(p, torch_threads()); }
};

}  // namespace fastattn::device
