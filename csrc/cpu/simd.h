// The SIMD shim: one vector type and the few operations that the kernels need beyond + - * / and
// comparisons.
//
// Built on the GCC/Clang vector extensions, so the same source serves SSE2, AVX2, AVX-512 and NEON,
// and every width can be tested on any machine (define FASTATTN_VECTOR_WIDTH: the compiler splits
// vectors wider than the hardware). a * b + c contracts to a fused multiply-add wherever the target
// has one (-ffp-contract=fast).
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

#include "common/params.h"

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

#define FASTATTN_SIMD static inline __attribute__((always_inline, unused))
#define FASTATTN_MEMBER inline __attribute__((always_inline))

constexpr int kWidth = FASTATTN_VECTOR_WIDTH;  // floats in a vector
// How many vector registers the hardware has decides the shape of register tiles.
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
typedef uint64_t VecU64 __attribute__((vector_size(kWidth * 8)));

constexpr float kLog2e = 1.44269504088896340736f;
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

FASTATTN_SIMD VecI bits_of(Vec x) { return (VecI)x; }
FASTATTN_SIMD Vec from_bits(VecI x) { return (Vec)x; }

// The second operand where either is NaN, as x86 hardware has it; compilers do not always find that
// out.
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

// a * b + c, rounded once where the hardware can. Asked for by name: no compiler breaks it up, nor
// joins what stands beside it.
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
// a * b, rounded before anything is added to it: where that would contract, the 0 is in its place.
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

// The two halves of a 2-input exchange: lanes of `a` whose index has kBit set change places with
// lanes of `b` whose index has it clear.
template <int kBit, int... kLane>
FASTATTN_SIMD void exchange(Vec& a, Vec& b, std::integer_sequence<int, kLane...>) {
  const Vec low =
      __builtin_shufflevector(a, b, ((kLane & kBit) ? kWidth + (kLane ^ kBit) : kLane)...);
  b = __builtin_shufflevector(a, b, ((kLane & kBit) ? kWidth + kLane : (kLane | kBit))...);
  a = low;
}

// Transposes a kWidth x kWidth block: one exchange a bit of the index.
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
  int64_t words[kWidth / 2], any = 0;
  std::memcpy(words, &x, sizeof(x));
  for (int n = 0; n < kWidth / 2; ++n) any |= words[n];
  return any != 0;
}

// Whether some lane of x is above y; NaN is not.
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

// Folds halves together: a fixed order, so that results do not depend on the compiler.
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

// 2^f for |f| <= 1/2: degree-6 minimax polynomial.
FASTATTN_SIMD Vec exp2_fraction(Vec f) {
  Vec p = splat(1.5353362e-4f);
  p = p * f + splat(1.3398874e-3f);
  p = p * f + splat(9.6184369e-3f);
  p = p * f + splat(5.5503324e-2f);
  p = p * f + splat(2.4022648e-1f);
  p = p * f + splat(6.9314718e-1f);
  return p * f + splat(1.0f);
}

// Adding it to |x| < 2^21 rounds x to an integer n, and leaves n + 127 in the lowest bits.
constexpr float kRounder = 12582912.f + 127.f;  // 1.5 * 2^23
// 2^n, n from -127 to 127, given n + kRounder. -127 gives 0.
FASTATTN_SIMD Vec power_of_2(Vec shifted) { return from_bits(bits_of(shifted) << 23); }

// e^x for -87 <= x <= 88, clamped there; at most 1.3 ulp for every x, where exp2(x * log2(e)) would
// lose |x| ulp to the rounding of its argument. NaN stays NaN. ln 2 is split so that n *
// 0.693359375 is exact without fused multiply-add.
FASTATTN_SIMD Vec exp(Vec x) {
  const Vec clamped = min(splat(88.f), max(splat(-87.f), x));  // operand order lets NaN through
  const Vec shifted = clamped * kLog2e + kRounder, n = shifted - kRounder;
  const Vec rest = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  return exp2_fraction(rest * kLog2e) * power_of_2(shifted);
}

// 2^(x + kOctaves) for x that is at most a little above 0, as softmax has it: 6 operations less, 9
// with AVX-512. 0 gives exactly 2^kOctaves, -inf exactly 0; results below 2^-126 are anything of
// that size, NaN stays NaN. Off by at most 1.1 ulp, or by 2^-18.4 of the result where only
// kBits <= 11 bits of it will be used, 2^-23.5 where kBits <= 22. kFlushes: the processor is set to
// make denormals 0.
template <int kBits = 24, bool kFlushes = false, int kOctaves = 0>
FASTATTN_SIMD Vec exp2_weight(Vec x) {
  constexpr float kUnit = 1 << kOctaves;
#if defined(__AVX512DQ__) && FASTATTN_VECTOR_WIDTH == 16
  // 2^x = 2^floor(x) 2^f with 0 <= f <= 1; hardware takes floor and f from x in one operation each.
  const Vec f = (Vec)_mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEG_INF);
  Vec p;
  if constexpr (kBits <= 11) {
    p = splat(kUnit * 1.3426688e-2f);
    p = p * f + splat(kUnit * 5.2242469e-2f);
    p = p * f + splat(kUnit * 2.4128021e-1f);
    p = p * f + splat(kUnit * 6.9304484e-1f);
  } else if constexpr (kBits <= 22) {
    p = splat(kUnit * 1.8671305e-3f);
    p = p * f + splat(kUnit * 9.0170298e-3f);
    p = p * f + splat(kUnit * 5.5799913e-2f);
    p = p * f + splat(kUnit * 2.4016444e-1f);
    p = p * f + splat(kUnit * 6.9315130e-1f);
  } else {
    p = splat(kUnit * 2.1612918e-4f);
    p = p * f + splat(kUnit * 1.2467846e-3f);
    p = p * f + splat(kUnit * 9.675452e-3f);
    p = p * f + splat(kUnit * 5.5485282e-2f);
    p = p * f + splat(kUnit * 2.4022931e-1f);
    p = p * f + splat(kUnit * 6.9314706e-1f);
  }
  p = p * f + splat(kUnit);
  if constexpr (kFlushes) return (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);
  // Zero instead of denormals, which would slow down what follows and take 60 ns to make.
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
#else
  const Vec clamped = max(splat(-127.f), x);
  const Vec shifted = clamped + kRounder;
  return exp2_fraction(clamped - (shifted - kRounder)) * power_of_2(shifted) * kUnit;
#endif
}

// 2^n, |n| <= 126.
FASTATTN_SIMD float two_to(int64_t n) {
  const auto bits = static_cast<uint32_t>(n + 127) << 23;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}
// The largest n with 2^n <= |x|, where x is a normal number; one of -127 to 128 for others.
FASTATTN_SIMD int64_t exponent_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<int64_t>(bits >> 23 & 0xff) - 127;
}

// ---- division ----
//
// AVX-512 divides a vector in 11 (Granite Rapids) to 16 cycles, where an estimate of 14 bits and a
// Newton step take 6 of its 2 slots a cycle for arithmetic. Narrower vectors have an estimate of 12
// bits or fewer, and divide in 3.5 to 5 cycles, less than the two steps needed. Divisors d are
// 2^-126 <= |d| <= 2^126; NaN stays NaN.

#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
FASTATTN_SIMD Vec reciprocal_estimate(Vec x) {
  return (Vec)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);
}

// n / d, to 1 ulp.
FASTATTN_SIMD Vec quotient(Vec n, Vec d) {
  const Vec estimate = reciprocal_estimate(d), q = n * estimate;
  return q + q * (splat(1.f) - d * estimate);
}
// a - n / d, with a quotient of 1.5 ulp that is not rounded.
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

// ---- half precision: arithmetic is fp32 everywhere, so these are only loads and stores ----

// Zero-extends; spelled out where compilers take the long way.
FASTATTN_SIMD VecU widen(VecHalf x) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (VecU)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);
#elif defined(__AVX2__) && FASTATTN_VECTOR_WIDTH == 8
  return (VecU)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, VecU);
#endif
}

FASTATTN_SIMD Vec bf16_to_float(VecHalf x) { return (Vec)(widen(x) << 16); }

// Round to nearest even; NaN keeps its sign and becomes quiet.
FASTATTN_SIMD VecHalf float_to_bf16(Vec x) {
  const VecU bits = (VecU)x;
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecU nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(x == x ? rounded : nan, VecHalf);
}

FASTATTN_SIMD Vec fp16_to_float(VecHalf x) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif defined(__F16C__) && FASTATTN_VECTOR_WIDTH == 8
  return (Vec)_mm256_cvtph_ps((__m128i)x);
#else
  // Shift exponent and mantissa into place, then multiply by 2^112: denormals come out right by the
  // multiplication.
  const VecU wide = widen(x);
  const VecU sign = (wide & 0x8000u) << 16;
  const VecU magnitude = (wide & 0x7fffu) << 13;
  const VecU finite = (VecU)((Vec)magnitude * splat(0x1p112f));
  const VecU special = magnitude | 0x7f800000u;  // inf and NaN
  return (Vec)(((wide & 0x7c00u) == 0x7c00u ? special : finite) | sign);
#endif
}

FASTATTN_SIMD VecHalf float_to_fp16(Vec x) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  return (VecHalf)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__) && FASTATTN_VECTOR_WIDTH == 8
  return (VecHalf)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const VecU bits = (VecU)x;
  const VecU sign = (bits >> 16) & 0x8000u;
  const Vec magnitude = abs(x);
  const VecU mag_bits = (VecU)magnitude;
  // Normal results: rebias the exponent and round to nearest even on the 13 bits that go.
  const VecU normal = (mag_bits - 0x38000000u + 0xfffu + ((mag_bits >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 2^-1 aligns the mantissa so that the hardware rounds it.
  const VecU denormal = (VecU)(magnitude + splat(0.5f)) - 0x3f000000u;
  const VecU finite = magnitude < splat(0x1p-14f) ? denormal : normal;
  const VecU overflow = splat_u(0x7c00u);
  const VecU in_range = magnitude >= splat(65520.f) ? overflow : finite;
  return __builtin_convertvector((x == x ? in_range : splat_u(0x7e00u)) | sign, VecHalf);
#endif
}

// Loads kWidth elements of any supported dtype as floats; stores likewise.
template <DType kType>
FASTATTN_SIMD Vec load_as(const void* base, int64_t offset) {
  if constexpr (kType == DType::kFloat32) {
    return load(static_cast<const float*>(base) + offset);
  } else {
    const VecHalf half = load_lanes<VecHalf>(static_cast<const uint16_t*>(base) + offset);
    return kType == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
  }
}
template <DType kType>
FASTATTN_SIMD void store_as(void* base, int64_t offset, Vec x) {
  if constexpr (kType == DType::kFloat32) {
    store(static_cast<float*>(base) + offset, x);
  } else {
    const VecHalf half = kType == DType::kBFloat16 ? float_to_bf16(x) : float_to_fp16(x);
    std::memcpy(static_cast<uint16_t*>(base) + offset, &half, sizeof(half));
  }
}

// One element, through a vector so that the conversion exists once.
template <DType kType>
FASTATTN_SIMD float load_one(const void* base, int64_t offset) {
  if constexpr (kType == DType::kFloat32) {
    return static_cast<const float*>(base)[offset];
  } else {
    VecHalf half{};
    half[0] = static_cast<const uint16_t*>(base)[offset];
    return (kType == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half))[0];
  }
}
template <DType kType>
FASTATTN_SIMD void store_one(void* base, int64_t offset, float x) {
  if constexpr (kType == DType::kFloat32) {
    static_cast<float*>(base)[offset] = x;
  } else {
    const Vec wide = splat(x);
    static_cast<uint16_t*>(base)[offset] =
        (kType == DType::kBFloat16 ? float_to_bf16(wide) : float_to_fp16(wide))[0];
  }
}

// Calls f with the dtype as a compile-time constant.
template <typename F>
FASTATTN_SIMD void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(std::integral_constant<DType, DType::kFloat32>{});
    case DType::kBFloat16:
      return f(std::integral_constant<DType, DType::kBFloat16>{});
    case DType::kFloat16:
      return f(std::integral_constant<DType, DType::kFloat16>{});
  }
}

}  // namespace fastattn::FASTATTN_ISA
