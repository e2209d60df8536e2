// Powers: 2^x for softmax, e^x for the additive score, and whole powers of 2.
#pragma once

#include "cpu/base/simd.h"

namespace fastattn::FASTATTN_ISA {

// 2^f for |f| <= 1/2: 1 + f times a minimax polynomial of degree 5.
FASTATTN_SIMD Vec exp2_fraction(Vec f) {
  Vec p = splat(1.5353362e-4f);
  p = p * f + splat(1.3398874e-3f);
  p = p * f + splat(9.6184369e-3f);
  p = p * f + splat(5.5503324e-2f);
  p = p * f + splat(2.4022648e-1f);
  p = p * f + splat(6.9314718e-1f);
  return p * f + splat(1.f);
}

// Adding it to |x| < 2^21 rounds x to an integer n, and leaves n + 127 in the lowest bits.
constexpr float kRounder = 12582912.f + 127.f;  // 1.5 * 2^23
// 2^n, n from -127 to 127, given n + kRounder. -127 gives 0.
FASTATTN_SIMD Vec power_of_2(Vec shifted) { return from_bits(bits_of(shifted) << 23); }

// e^x for -87 <= x <= 88; other x are clamped to that range. The error is at most 1.3 ulp for every
// x. exp2(x * log2(e)) would lose |x| ulp, because its argument is rounded. NaN stays NaN. ln 2 is
// split so that n * 0.693359375 is exact without fused multiply-add.
FASTATTN_SIMD Vec exp(Vec x) {
  const Vec clamped = min(splat(88.f), max(splat(-87.f), x));  // operand order lets NaN through
  const Vec shifted = clamped * kLog2e + kRounder, n = shifted - kRounder;
  const Vec rest = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  return exp2_fraction(rest * kLog2e) * power_of_2(shifted);
}

// 2^(x + kOctaves) for the x of a softmax, which is at most a little above 0. tanh.h has x up to
// 125, which are right as well. This saves 6 operations, 9 with AVX-512. 0 gives exactly
// 2^kOctaves, -inf gives exactly 0, NaN stays NaN. A result below 2^-126 may be any number that
// small. The error is at most 1.1 ulp. Where only kBits bits are used, it is 2^-18.4 of the result
// for kBits <= 11, 2^-23.5 for kBits <= 22. kFlushes: the processor flushes denormals to 0.
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
  // Zero instead of denormals: they take 60 ns to make, and slow down what follows.
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
// The largest n with 2^n <= |x| for a normal x; any of -127 to 128 for other x.
FASTATTN_SIMD int64_t exponent_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<int64_t>(bits >> 23 & 0xff) - 127;
}

}  // namespace fastattn::FASTATTN_ISA
