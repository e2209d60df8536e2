// Every instruction for which CUDA C++ has no function, each with its documented meaning in plain
// C++. tests/cuda/simulator defines FASTATTN_CUDA_ON_CPU and runs these kernels on a CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace fastattn::cuda {

#define FASTATTN_DEVICE static __device__ __forceinline__

#if defined(FASTATTN_CUDA_ON_CPU)

// The value of an approximate instruction: one of the floats less than `ulps` from the exact value,
// as its documentation allows. Which one depends on the operand as if at random.
static inline float approximate(float operand, double exact, uint32_t ulps) {
  float value = static_cast<float>(exact);
  uint32_t in, out;
  std::memcpy(&in, &operand, 4);
  std::memcpy(&out, &value, 4);
  const uint32_t exponent = out >> 23 & 0xff;
  if (exponent == 0) return exact < 0 ? -0.f : 0.f;  // .ftz
  if (exponent == 0xff) return value;
  if (std::fabs(value) > std::fabs(exact)) --out;  // the float before the exact value
  out += (in * 2654435761u >> 16) % (2 * ulps) - (ulps - 1);
  std::memcpy(&value, &out, 4);
  return value;
}

static inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

#endif

// 1 / x, to 1 ulp, in one special-function operation. Subnormal x count as 0.
FASTATTN_DEVICE float rcp_approx(float x) {
#if defined(FASTATTN_CUDA_ON_CPU)
  return approximate(x, 1.0 / flush(x), 1);
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 2^x, to 2 ulp, and 1 for x = 0, in one special-function operation. Subnormal results are 0.
FASTATTN_DEVICE float ex2_approx(float x) {
#if defined(FASTATTN_CUDA_ON_CPU)
  return flush(x) == 0.f ? 1.f : approximate(x, std::exp2(static_cast<double>(x)), 2);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// The smaller one; NaN when either is NaN (fminf returns the other).
FASTATTN_DEVICE float min_nan(float a, float b) {
#if defined(FASTATTN_CUDA_ON_CPU)
  return a < b || a != a ? a : b;
#else
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#endif
}

// Returns x, but hides its origin from the compiler. Addresses that depend on it are then computed
// where they are used. Computed ahead of the loops, they would take 100 registers.
FASTATTN_DEVICE int64_t opaque(int64_t x) {
#if !defined(FASTATTN_CUDA_ON_CPU)
  asm("" : "+l"(x));
#endif
  return x;
}

// The same for values that do not change: addresses that depend on x stay in their loop.
FASTATTN_DEVICE int opaque_here(int x) {
#if !defined(FASTATTN_CUDA_ON_CPU)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// ---- 16-bit floats, as their bits ----

FASTATTN_DEVICE float fp16_to_float(uint16_t bits) {
#if defined(FASTATTN_CUDA_ON_CPU)
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return static_cast<float>(x);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
#endif
}

FASTATTN_DEVICE uint16_t float_to_fp16(float x) {
  uint16_t bits;
#if defined(FASTATTN_CUDA_ON_CPU)
  const _Float16 rounded = static_cast<_Float16>(x);
  std::memcpy(&bits, &rounded, 2);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
  return bits;
}

FASTATTN_DEVICE float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float y;
  memcpy(&y, &wide, 4);
  return y;
}

FASTATTN_DEVICE uint16_t float_to_bf16(float x) {
#if defined(FASTATTN_CUDA_ON_CPU)
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#endif
}

// ---- shared memory ----

// The dynamic shared memory of the block, 16-byte aligned.
FASTATTN_DEVICE void* shared_memory() {
#if defined(FASTATTN_CUDA_ON_CPU)
  return cuda_on_cpu::dynamic_shared();
#else
  extern __shared__ float4 fastattn_shared[];
  return fastattn_shared;
#endif
}

}  // namespace fastattn::cuda
