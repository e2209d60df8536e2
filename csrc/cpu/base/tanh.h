// tanh of a softcap, and its slope: one for small numbers, one for half types, one for the rest.
#pragma once

#include "cpu/base/exp2.h"

namespace fastattn::FASTATTN_ISA {

struct TanhAndSlope {
  Vec tanh, slope;
};

// tanh x for |x| <= kSmall, to 1 ulp: an odd polynomial, off by 2^-26 of itself. 6 operations for
// tanh, 1 for the slope, which is 1 - tanh^2. NaN stays NaN. Each step is one operation by name, so
// that every loop that has this code inside makes the same bits.
constexpr float kSmall = 0.5f;
FASTATTN_SIMD TanhAndSlope tanh_of_small(Vec x) {
  const Vec square = product(x, x);
  Vec p = splat(1.72414912e-2f);
  p = multiply_add(p, square, splat(-5.30454941e-2f));
  p = multiply_add(p, square, splat(1.33258790e-1f));
  p = multiply_add(p, square, splat(-3.33331439e-1f));
  const Vec tanh = multiply_add(product(p, square), x, x);
  return {tanh, multiply_add(-tanh, tanh, splat(1.f))};
}

// tanh x for |x| >= kSmall, to 3 ulp, is 1 - part, where part = 2 / (e^2|x| + 1). The slope is
// e^2|x| part^2, off by at most |x| 2^-23 of itself, also where tanh x is near 1. It is 0 from |x|
// = 43 on, where it is below 2^-122. 17 operations with AVX-512 for tanh.
FASTATTN_SIMD TanhAndSlope tanh_of_large(Vec x) {
  const Vec size = min(abs(x), splat(43.f));
  const Vec power = exp2_weight<22, true>(size * (2.f * kLog2e));
  const Vec part = quotient(splat(2.f), power + 1.f), slope = (power * part) * part;
  return {copy_sign(splat(1.f) - part, x), size < splat(43.f) ? slope : Vec{}};
}

// tanh x for every x. A lane does not depend on its neighbours. NaN stays NaN.
FASTATTN_SIMD TanhAndSlope accurate_tanh(Vec x) {
  const TanhAndSlope small = tanh_of_small(x), large = tanh_of_large(x);
  const VecI is_large = abs(x) > splat(kSmall);
  return {is_large ? large.tanh : small.tanh, is_large ? large.slope : small.slope};
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

// Calls f with a function of vectors x: tanh (factor x) and its slope. `half`: 11 bits of them are
// used. `small()`: no x is larger than kSmall / factor, NaN aside.
template <typename Small, typename F>
FASTATTN_SIMD void with_tanh(float factor, [[maybe_unused]] bool half, Small small, F f) {
#if defined(__AVX512F__) && FASTATTN_VECTOR_WIDTH == 16
  if (half) return f([&](Vec x) { return tanh_of_11_bits(x, factor); });
#endif
  if (small()) return f([&](Vec x) { return tanh_of_small(product(x, splat(factor))); });
  f([&](Vec x) { return accurate_tanh(product(x, splat(factor))); });
}

}  // namespace fastattn::FASTATTN_ISA
