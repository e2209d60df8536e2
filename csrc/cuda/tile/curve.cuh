// Curves, which take a score's place before bias and mask: c tanh(score / c) under a softcap c.
//
// Ratios t = tanh(score / c) stand where scores did. The logit of t is c t: a product with a scale,
// as without a cap (masking.cuh). The gradient of a score is that of its logit times the slope 1 -
// t^2.
//
// The dot product's kernels are compiled with and without a curve (kCurved), because a curve takes
// registers. In the additive ones it is a branch.
#pragma once

#include "cuda/tile/masking.cuh"

namespace fastattn::cuda {

// A ratio tanh x, and 1 - tanh^2 x.
struct Capped {
  float ratio, slope;
};

// tanh x to 4 ulp for every x, however small, and to 1 ulp above 1/2. NaN stays NaN.
//
//   tanh |x| = z / (z + 2) = 1 - 2 / (z + 2)    z = e^2|x| - 1 = 2^n (2^f - 1) + (2^n - 1)
//   1 - tanh^2 x = 4 (z + 1) / (z + 2)^2
//
// The first form serves a small x. The second form rounds well near 1. The slope keeps its digits
// there; it is 0 from |x| = 43 on, where it is below 2^-122, and for NaN: a masked pair stays 0.
// Every fma is spelled out: forward and backward must round a ratio alike.
FASTATTN_DEVICE Capped accurate_tanh(float x) {
  constexpr float kRounder = 12582912.f + 127.f;  // leaves n + 127 in the lowest bits
  const float size = min_nan(fabsf(x), 43.f);
  const float shifted = fmaf(size, 2.f * kLog2e, kRounder);
  const float f = fmaf(size, 2.f * kLog2e, kRounder - shifted);
  float p = fmaf(f, 1.5353362e-4f, 1.3398874e-3f);
  p = fmaf(p, f, 9.6184369e-3f);
  p = fmaf(p, f, 5.5503324e-2f);
  p = fmaf(p, f, 2.4022648e-1f);
  p = fmaf(p, f, 6.9314718e-1f);
  uint32_t bits;
  memcpy(&bits, &shifted, 4);
  bits <<= 23;
  float power;
  memcpy(&power, &bits, 4);
  const float z = fmaf(p * f, power, power - 1.f), reciprocal = rcp_approx(z + 2.f);
  const float slope = fmaf(z, reciprocal, reciprocal) * (4.f * reciprocal);
  return {copysignf(z > 2.f ? fmaf(-2.f, reciprocal, 1.f) : z * reciprocal, x),
          size < 43.f ? slope : 0.f};
}

// What takes a score's place.
FASTATTN_DEVICE float curved(const AttentionParams& p, float s) {
  return is_curved(p) ? accurate_tanh(s * p.cap).ratio : s;
}

// For callers that need no slopes.
FASTATTN_DEVICE void look_away(int, float) {}

// The same of scores that have a curve. Calls look(pair, slope) on the way.
template <int kQuads, typename F = decltype(look_away)>
FASTATTN_DEVICE void curve_scores(const AttentionParams& p, float (&s)[kQuads][4],
                                  F look = look_away) {
#pragma unroll
  for (int n = 0; n < 4 * kQuads; ++n) {
    const Capped capped = accurate_tanh(s[n / 4][n % 4] * p.cap);
    look(n, capped.slope);
    s[n / 4][n % 4] = capped.ratio;
  }
}

}  // namespace fastattn::cuda
