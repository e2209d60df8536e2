// tanh of a softcap, and its slope.
#pragma once

#include "cpu/base/exp2.h"

namespace fastattn::FASTATTN_ISA {

struct TanhAndSlope {
  Vec tanh, slope;
};

// z = e^2|x| - 1 = 2^n (2^f - 1) + (2^n - 1), for sizes |x| up to 43. NaN stays NaN.
FASTATTN_SIMD Vec expm1_twice(Vec size) {
  const Vec shifted = multiply_add(size, splat(2.f * kLog2e), splat(kRounder));
  const Vec f = multiply_add(size, splat(2.f * kLog2e), splat(kRounder) - shifted);
  const Vec power = power_of_2(shifted);
  return multiply_add(product(exp2_slope(f), f), power, power - 1.f);
}
// tanh x to 4 ulp for every x, however small, and to 1 ulp above 1/2.
//
//   tanh |x| = z / (z + 2) = 1 - 2 / (z + 2)
//
// The second form rounds well near 1. The first form serves a small x, for which the second one has
// no digits. 24 operations with AVX-512.
//
// The slope is 1 - tanh^2 x = 4 (z + 1) / (z + 2)^2. The form on the right keeps its digits where
// tanh x is near 1. The slope is 0 from |x| = 43 on, where it is below 2^-122. NaN stays NaN.
FASTATTN_SIMD TanhAndSlope accurate_tanh(Vec x) {
  const Vec size = min(splat(43.f), abs(x));  // operand order lets NaN through
  const Vec z = expm1_twice(size), near_one = z > 2.f ? splat(1.f) : Vec{};
  const Vec part = quotient(splat(2.f), z + 2.f), slope = ((z + 1.f) * part) * part;
  return {copy_sign(near_one + quotient(z > 2.f ? splat(-2.f) : z, z + 2.f), x),
          size < splat(43.f) ? slope : slope - slope};
}

#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
// tanh of u steps is u R(u) for 0 <= u <= 31. Within 1/2 of a whole number n, R is a parabola: the
// one that meets it at the three points where errors are then smallest. From 31 steps on, tanh is
// taken for 1. The parabolas are small enough for two registers a coefficient.
struct TanhTable {
  static constexpr int kLast = 31;
  static constexpr double kStep = 5.5 / kLast;
  float c0[kLast + 1]{}, c1[kLast + 1]{}, c2[kLast + 1]{};

  constexpr TanhTable() {
    constexpr double kAside = 0.4330127018922193;  // a root of the Chebyshev polynomial, over 2
    for (int n = 0; n <= kLast; ++n) {
      const double left = ratio(n - kAside), middle = ratio(n), right = ratio(n + kAside);
      const double bend = (left - 2 * middle + right) / (2 * kAside * kAside);
      const double rise = (right - left) / (2 * kAside);
      c2[n] = static_cast<float>(bend);
      c1[n] = static_cast<float>(rise - 2 * bend * n);
      c0[n] = static_cast<float>(middle - (rise - bend * n) * n);
    }
  }
  // R(u)
  static constexpr double ratio(double u) {
    if (u == 0) return kStep;
    if (u >= kLast) return 1 / u;
    double power = 1, sum = 0;  // e^2x - 1
    for (int n = 1; n < 60; ++n) sum += power *= 2 * kStep * u / n;
    return sum / (sum + 2) / u;
  }
};

// tanh (factor x), off by at most 2^-14.9 of itself, and the slope to as much of 1. Its slope is
// exactly 0 where tanh is taken for 1. 11 operations for tanh, 3 for the slope.
FASTATTN_SIMD TanhAndSlope tanh_of_11_bits(Vec x, float factor) {
  static constexpr TanhTable kTable;
  constexpr float kSteps = static_cast<float>(1 / TanhTable::kStep);
  const Vec steps = x * (factor < __FLT_MAX__ / kSteps ? factor * kSteps : __FLT_MAX__);
  const Vec size = min(splat(TanhTable::kLast), abs(steps));  // operand order lets NaN through
  const auto n = (__m512i)(size + 12582912.f);  // 1.5 * 2^23: the lowest bits are the nearest n
  const auto parabola = [&](const float* c) __attribute__((always_inline)) {
    return (Vec)_mm512_permutex2var_ps((__m512)load(c), n, (__m512)load(c + kWidth));
  };
  const Vec rise = multiply_add(parabola(kTable.c2), size, parabola(kTable.c1));
  const Vec tanh = copy_sign(multiply_add(rise, size, parabola(kTable.c0)) * size, steps);
  return {tanh, splat(1.f) - tanh * tanh};
}
#endif

// tanh (factor x) and its slope, of which the caller uses kBits bits. NaN stays NaN.
template <int kBits>
FASTATTN_SIMD TanhAndSlope tanh_and_slope(Vec x, float factor) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  if constexpr (kBits <= 11) return tanh_of_11_bits(x, factor);
#endif
  return accurate_tanh(product(x, splat(factor)));
}

}  // namespace fastattn::FASTATTN_ISA
