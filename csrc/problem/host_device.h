#pragma once

#include <cstdint>

// Functions shared by host and device code.
//
// On the host they must have internal linkage. The CPU kernels compile these headers once per
// instruction set. Each object would emit an ordinary inline function under the same name, and the
// linker keeps any one of them: perhaps an AVX-512 body for a machine without AVX-512.
#if defined(__CUDACC__)
#define FASTATTN_FN static __host__ __device__ __forceinline__
#define FASTATTN_RARE_FN FASTATTN_FN
#else
#define FASTATTN_FN [[maybe_unused]] static inline
// Kept out of its callers, whose loops the compiler then sees as if there were none of it.
#define FASTATTN_RARE_FN [[maybe_unused, gnu::noinline]] static
#endif

namespace fastattn {

FASTATTN_FN int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
FASTATTN_FN int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
FASTATTN_FN int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Takes `floats` from a workspace, in pieces of 256 bytes; returns where they begin.
FASTATTN_FN int64_t take(int64_t* used, int64_t floats) {
  const int64_t offset = *used;
  *used += ceil_div(floats, 64) * 64;
  return offset;
}

}  // namespace fastattn
