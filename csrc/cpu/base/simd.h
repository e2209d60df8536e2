// The SIMD layer: one vector type, and the few operations beyond + - * / and comparisons that the
// kernels need.
//
// Built on the GCC/Clang vector extensions: the same source serves SSE2, AVX2, AVX-512 and NEON.
// FASTATTN_VECTOR_WIDTH sets another width for tests; the compiler splits vectors wider than the
// hardware. a * b + c becomes a fused multiply-add where the target has one (-ffp-contract=fast).
//
// Everything lives in fastattn::<isa>, because each kernel file is compiled once per instruction
// set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "problem/params.h"

#ifndef FASTATTN_ISA
#define FASTATTN_ISA baseline
#endif
#ifndef FASTATTN_VECTOR_WIDTH
#if defined(__AVX512F__)
#define FASTATTN_VECTOR_WIDTH 16
#elif defined(__AVX__)
#define FASTATTN_VECTOR_WIDTH 8
#else
#define FASTATTN_VECTOR_WIDTH 4
#endif
#endif

namespace fastattn::FASTATTN_ISA {
#ifndef FASTATTN_SIMD
#define FASTATTN_SIMD static inline __attribute__((always_inline, unused))
#define FASTATTN_MEMBER inline __attribute__((always_inline))
#endif

constexpr int kWidth = FASTATTN_VECTOR_WIDTH;  // floats in a vector
// The number of vector registers decides the shape of register tiles.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t VecI __attribute__((vector_size(kWidth * 4)));
typedef uint32_t VecU __attribute__((vector_size(kWidth * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(kWidth * 2)));  // bits of bf16 or fp16
typedef int8_t VecBytes __attribute__((vector_size(kWidth)));
typedef int8_t WideBytes __attribute__((vector_size(kWidth * 4)));
typedef uint64_t VecU64 __attribute__((vector_size(kWidth * 8)));

constexpr double kLog2eExact = 1.4426950408889634;
constexpr float kLog2e = static_cast<float>(kLog2eExact);
constexpr float kInf = __builtin_inff();

FASTATTN_SIMD Vec splat(float x) { return x - Vec{}; }
FASTATTN_SIMD VecU splat_u(uint32_t x) { return x - VecU{}; }

template <typename T, typename Lane>
FASTATTN_SIMD T load_lanes(const Lane* from) {
  T out;
  std::memcpy(&out, from, sizeof(T));
  return out;
}
FASTATTN_SIMD Vec load(const float* from) { return load_lanes<Vec>(from); }
FASTATTN_SIMD void store(float* to, Vec x) { std::memcpy(to, &x, sizeof(x)); }

// Sign-extends. Written out where GCC converts lane by lane.
FASTATTN_SIMD VecI widen(VecBytes x) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (VecI)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)x);
#elif defined(__AVX2__) && FASTATTN_VECTOR_WIDTH == 8
  return (VecI)_mm256_cvtepi8_epi32(__m128i{(int64_t)x});
#else
  return __builtin_convertvector(x, VecI);
#endif
}

FASTATTN_SIMD VecI bits_of(Vec x) { return (VecI)x; }
FASTATTN_SIMD Vec from_bits(VecI x) { return (Vec)x; }

// If either operand is NaN, the result is the second one, as on x86 hardware. The intrinsics are
// for compilers that do not find this out.
FASTATTN_SIMD Vec max(Vec a, Vec b) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX__) && FASTATTN_VECTOR_WIDTH == 8
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
FASTATTN_SIMD Vec min(Vec a, Vec b) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (Vec)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX__) && FASTATTN_VECTOR_WIDTH == 8
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
FASTATTN_SIMD Vec abs(Vec x) { return from_bits(bits_of(x) & 0x7fffffff); }
FASTATTN_SIMD Vec copy_sign(Vec size, Vec sign) {  // of a size that is not negative
  return from_bits(bits_of(size) | (bits_of(sign) & ~0x7fffffff));
}

// a * b + c, rounded once where the hardware can. An intrinsic keeps the compiler from splitting it
// or fusing it with its neighbours.
FASTATTN_SIMD Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && FASTATTN_VECTOR_WIDTH == 8
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__) && FASTATTN_VECTOR_WIDTH == 4
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
// a * b, rounded before anything is added. Adding 0 takes the place of the addition that would
// fuse.
FASTATTN_SIMD Vec product(Vec a, Vec b) {
#if defined(__FMA__) || defined(__aarch64__)
  return multiply_add(a, b, Vec{});
#else
  return a * b;
#endif
}

// Lane 0 .. kWidth-1.
FASTATTN_SIMD VecI iota() {
  VecI out;
  for (int lane = 0; lane < kWidth; ++lane) out[lane] = lane;
  return out;
}

// ---- movement between lanes ----

// One half each of a 2-input exchange: lanes of `a` whose index has kBit set swap with lanes of `b`
// whose index has kBit clear.
template <int kBit, int... kLane>
FASTATTN_SIMD void exchange(Vec& a, Vec& b, std::integer_sequence<int, kLane...>) {
  const Vec low =
      __builtin_shufflevector(a, b, ((kLane & kBit) ? kWidth + (kLane ^ kBit) : kLane)...);
  b = __builtin_shufflevector(a, b, ((kLane & kBit) ? kWidth + kLane : (kLane | kBit))...);
  a = low;
}

// Transposes a kWidth x kWidth block, with one exchange per bit of the index.
template <int kBit = 1>
FASTATTN_SIMD void transpose(Vec (&rows)[kWidth]) {
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r)
    if (!(r & kBit))
      exchange<kBit>(rows[r], rows[r | kBit], std::make_integer_sequence<int, kWidth>{});
  if constexpr (2 * kBit < kWidth) transpose<2 * kBit>(rows);
}

// a0 b0 a1 b1 ...: a gets the first half of that sequence, b the second.
template <int... kLane>
FASTATTN_SIMD void interleave(Vec& a, Vec& b, std::integer_sequence<int, kLane...>) {
  const Vec low = __builtin_shufflevector(a, b, ((kLane & 1) * kWidth + kLane / 2)...);
  b = __builtin_shufflevector(a, b, ((kLane & 1) * kWidth + kLane / 2 + kWidth / 2)...);
  a = low;
}
// Likewise x0 y0 z0 w0 x1 y1 z1 w1 ... of four.
FASTATTN_SIMD void interleave4(Vec (&x)[4]) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
  interleave(x[0], x[2], lanes);  // even columns of the first and second half
  interleave(x[1], x[3], lanes);  // odd columns
  interleave(x[0], x[1], lanes);
  interleave(x[2], x[3], lanes);
}

FASTATTN_SIMD bool any_lane(VecI x) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX__) && FASTATTN_VECTOR_WIDTH == 8
  return _mm256_testz_si256((__m256i)x, (__m256i)x) == 0;
#else
  int64_t words[kWidth / 2], any = 0;
  std::memcpy(words, &x, sizeof(x));
  for (int n = 0; n < kWidth / 2; ++n) any |= words[n];
  return any != 0;
#endif
}

// True if some lane of x exceeds y. A NaN lane does not.
FASTATTN_SIMD bool any_above(Vec x, float y) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return _mm512_cmp_ps_mask((__m512)x, (__m512)splat(y), _CMP_GT_OQ) != 0;
#elif defined(__AVX__) && FASTATTN_VECTOR_WIDTH == 8
  return _mm256_movemask_ps((__m256)(x > splat(y))) != 0;
#else
  return any_lane(x > splat(y));
#endif
}

// Lane l gets lane l ^ kBit.
template <int kBit, int... kLane>
FASTATTN_SIMD Vec swap_lanes(Vec x, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(x, x, (kLane ^ kBit)...);
}

// Folds halves together, in a fixed order, so that results do not depend on the compiler.
template <int kBit = kWidth / 2, typename Op>
FASTATTN_SIMD float fold(Vec x, Op op) {
  if constexpr (kBit == 0) {
    return x[0];
  } else {
    return fold<kBit / 2>(op(x, swap_lanes<kBit>(x, std::make_integer_sequence<int, kWidth>{})),
                          op);
  }
}
FASTATTN_SIMD float sum_lanes(Vec x) {
  return fold(x, [](Vec a, Vec b) __attribute__((always_inline)) { return a + b; });
}
FASTATTN_SIMD float max_lanes(Vec x) {  // NaN in any lane gives NaN
  return fold(x,
              [](Vec a, Vec b) __attribute__((always_inline)) { return a != a ? a : max(a, b); });
}

// Lane l of the result is the sum of the lanes of x[l % kCount].
template <int kCount, int kBit = 1>
FASTATTN_SIMD Vec sums_of(Vec* x) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
  if constexpr (kBit == kWidth) {
    return x[0];
  } else {
#pragma GCC unroll 8
    for (int n = 0; n < kCount / 2 / kBit; ++n) {
      exchange<kBit>(x[2 * n], x[2 * n + 1], lanes);
      x[n] = x[2 * n] + x[2 * n + 1];
    }
    if (kBit >= kCount) x[0] += swap_lanes<kBit>(x[0], lanes);
    return sums_of<kCount, 2 * kBit>(x);
  }
}

// ---- loops ----

// Calls f(row, count) for blocks of kMost rows, which is 8 or 4. The rest are at most one block
// each of 4, 2 and 1 rows. `count` is a compile-time constant.
template <int kMost, typename F>
FASTATTN_SIMD void in_row_blocks(int64_t rows, F f) {
  int64_t r = 0;
  for (; r + kMost <= rows; r += kMost) f(r, std::integral_constant<int, kMost>{});
  if constexpr (kMost == 8)
    if (rows & 4) f(r, std::integral_constant<int, 4>{}), r += 4;
  if (rows & 2) f(r, std::integral_constant<int, 2>{}), r += 2;
  if (rows & 1) f(r, std::integral_constant<int, 1>{});
}

// ---- division ----
//
// AVX-512 divides a vector in 11 (Granite Rapids) to 16 cycles. A 14-bit estimate and a Newton step
// are 6 operations, 2 a cycle. Narrower vectors have estimates of at most 12 bits, and would need
// two steps; dividing takes 3.5 to 5 cycles, which is less. Divisors d: 2^-126 <= |d| <= 2^126. NaN
// stays NaN.

#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
FASTATTN_SIMD Vec reciprocal_estimate(Vec x) {
  return (Vec)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);
}

// n / d, to 1 ulp.
FASTATTN_SIMD Vec quotient(Vec n, Vec d) {
  const Vec estimate = reciprocal_estimate(d), q = n * estimate;
  return q + q * (splat(1.f) - d * estimate);
}
// a - n / d. The quotient has an error of 1.5 ulp and is not rounded.
FASTATTN_SIMD Vec minus_quotient(Vec a, Vec n, Vec d) {
  const Vec estimate = reciprocal_estimate(d);
  return a - (n * estimate) * (splat(2.f) - d * estimate);
}
#else
FASTATTN_SIMD Vec quotient(Vec n, Vec d) { return n / d; }
FASTATTN_SIMD Vec minus_quotient(Vec a, Vec n, Vec d) { return a - n / d; }
#endif

// High and low halves of the 64-bit products a * m, for counter-based random numbers.
struct WideProduct {
  VecU high, low;
};
FASTATTN_SIMD WideProduct multiply_wide(VecU a, uint32_t m) {
#if defined(__AVX2__) && FASTATTN_VECTOR_WIDTH == 8
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(m));
  const __m256i even = _mm256_mul_epu32((__m256i)a, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
  return {(VecU)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
          (VecU)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
#else
  const VecU64 product = __builtin_convertvector(a, VecU64) * m;
  return {__builtin_convertvector(product >> 32, VecU), __builtin_convertvector(product, VecU)};
#endif
}

}  // namespace fastattn::FASTATTN_ISA
