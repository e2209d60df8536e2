#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cuda/dot/wgmma_choice.h"

namespace fastattn::cuda {
namespace {

constexpr int kMostDevices = 64;
std::atomic<uint64_t> chosen_devices{0};  // a bit a device

int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

// Whether the build has such products. Its other code for the same GPUs, PTX, has empty kernels.
#if defined(FASTATTN_CUDA_ON_CPU) || defined(FASTATTN_HAVE_SM_90A)
constexpr bool kIsBuilt = true;
#else
constexpr bool kIsBuilt = false;
#endif

int attribute(cudaDeviceAttr which) {
  int value = 0;
  cudaDeviceGetAttribute(&value, which, current_device());
  return value;
}

bool is_sm90() {
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

}  // namespace

// As kernels.h declares it.
void choose_wgmma(int64_t device, bool chosen) {
  if (device < 0 || device >= kMostDevices) return;
  const uint64_t bit = uint64_t{1} << device;
  chosen ? chosen_devices.fetch_or(bit) : chosen_devices.fetch_and(~bit);
}

bool wgmma_is_chosen() {
  const char* const path = std::getenv("FASTATTN_CUDA_PATH");
  if (path != nullptr && std::strcmp(path, "wgmma") == 0) return true;
  const uint64_t devices = chosen_devices.load(std::memory_order_relaxed);
  if (devices == 0) return false;
  const int device = current_device();
  return device < kMostDevices && (devices >> device & 1) != 0;
}

bool wgmma_can_run() { return kIsBuilt && is_sm90(); }

int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

}  // namespace fastattn::cuda
