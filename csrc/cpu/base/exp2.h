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

// Each x becomes 2^(x + kOctaves). The x of a softmax are at most a little above 0. tanh.h has x up
// to 125, which are right as well. This saves 6 operations, 9 with AVX-512. 0 gives exactly
// 2^kOctaves, -inf gives exactly 0, NaN stays NaN. A result below 2^-126 may be any number that
// small. The error is at most 1.1 ulp. Where only kBits <= 22 bits are used, it is 2^-23.5 of the
// result: fewer terms would do for a weight of 8 bits, but the log-sum-exp adds up the unrounded
// ones. kFlushes: the processor flushes denormals to 0.
//
// Each step is taken for all vectors. One vector after the other would fill the processor's queues
// with instructions that wait for the one before.
template <int kBits, bool kFlushes, int kOctaves, int kCount>
FASTATTN_SIMD void exp2_weights(Vec (&x)[kCount]) {
  constexpr float kUnit = 1 << kOctaves;
  const auto each = [](auto step) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) step(v);
  };
#if defined(__AVX512DQ__) && FASTATTN_VECTOR_WIDTH == 16
  // 2^x = 2^floor(x) 2^f with 0 <= f <= 1; hardware takes floor and f from x in one operation each.
  Vec f[kCount], p[kCount];
  const auto begin = [&](float first) __attribute__((always_inline)) {
    each([&](int v) __attribute__((always_inline)) {
      f[v] = (Vec)_mm512_maskz_reduce_ps(0xffff, (__m512)x[v], _MM_FROUND_TO_NEG_INF);
      p[v] = splat(kUnit * first);
    });
  };
  const auto times_f_plus = [&](float next) __attribute__((always_inline)) {
    each([&](int v) __attribute__((always_inline)) { p[v] = p[v] * f[v] + splat(kUnit * next); });
  };
  if constexpr (kBits <= 22) {
    begin(1.8671305e-3f);
    times_f_plus(9.0170298e-3f);
    times_f_plus(5.5799913e-2f);
    times_f_plus(2.4016444e-1f);
    times_f_plus(6.9315130e-1f);
  } else {
    begin(2.1612918e-4f);
    times_f_plus(1.2467846e-3f);
    times_f_plus(9.675452e-3f);
    times_f_plus(5.5485282e-2f);
    times_f_plus(2.4022931e-1f);
    times_f_plus(6.9314706e-1f);
  }
  times_f_plus(1.f);
  each([&](int v) __attribute__((always_inline)) {
    // Zero instead of denormals: they take 60 ns to make, and slow down what follows.
    const __mmask16 normal =
        kFlushes ? 0xffff : _mm512_cmp_ps_mask((__m512)x[v], (__m512)splat(-126.f), _CMP_NLT_UQ);
    x[v] = (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p[v], (__m512)x[v]);
  });
#else
  each([&](int v) __attribute__((always_inline)) {
    const Vec clamped = max(splat(-127.f), x[v]);
    const Vec shifted = clamped + kRounder;
    x[v] = exp2_fraction(clamped - (shifted - kRounder)) * power_of_2(shifted) * kUnit;
  });
#endif
}
template <int kBits = 24, bool kFlushes = false>
FASTATTN_SIMD Vec exp2_weight(Vec x) {
  Vec all[1] = {x};
  exp2_weights<kBits, kFlushes, 0>(all);
  return all[0];
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
