#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cuda/dot/wgmma_choice.h"
#include "problem/mask.h"

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

Shares share_out(const AttentionParams& p, int64_t heads, int64_t tiles, bool may_stay) {
  const int64_t all = heads * tiles, most = attribute(cudaDevAttrMultiProcessorCount);
  const Shares dealt_out = {1, all, all};
  if (!may_stay || keys_vary(p.mask) || all <= most || most == 0) return dealt_out;
  if (tiles == 1 || band_keeps_all(p.mask, p.M, p.N)) return {1, all, most};
  const int64_t pairs = all / 2, room = ceil_div(pairs, most) * most;
  // By an H200's rates, staying saves a pair the time of about 512 keys (0013). So much may be
  // idle: no call that was measured comes near this. Not run on a GPU.
  const bool even = all % 2 == 0 && (room - pairs) * p.N <= 512 * room;
  return even ? Shares{2, pairs, min64(pairs, most)} : dealt_out;
}

}  // namespace fastattn::cuda
