// Softcap: c tanh(score / c) in place of a score, before bias and mask.
//
// Ratios t = tanh(score / c) stand where scores did, and the logit of t is c t: a product with a
// scale, as without a cap. The gradient of a score is that of its logit times the slope 1 - t^2.
#pragma once

#include "cuda/tile/masking.cuh"

namespace fastattn::cuda {

// tanh x to 4 ulp for every x, however small; NaN stays NaN. 1 - 2 / (1 + e^2x) would lose what x
// is less than 1.
//
//   tanh |x| = z / (z + 2)    z = e^2|x| - 1 = 2^n (2^f - 1) + (2^n - 1)    polynomial: |f| <= 1/2
//
// Every fma is spelled out: forward and backward must round a ratio alike.
FASTATTN_DEVICE float accurate_tanh(float x) {
  constexpr float kRounder = 12582912.f + 127.f;  // leaves n + 127 in the lowest bits
  const float size = min_nan(fabsf(x), 10.f);
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
  const float z = fmaf(p * f, power, power - 1.f);
  return copysignf(z * rcp_approx(z + 2.f), x);
}

// What makes logits in base 2 of the scores of the dot product, or of their ratios.
FASTATTN_DEVICE float logit_scale(const AttentionParams& p) {
  return (p.softcap == 0.f ? p.scale : p.softcap) * kLog2e;
}

// Scores become ratios. `unit`: what makes natural scores of them.
template <int kQuads>
FASTATTN_DEVICE void cap_scores(const AttentionParams& p, float unit, float (&s)[kQuads][4]) {
  const float factor = unit / p.softcap;
#pragma unroll
  for (int n = 0; n < 4 * kQuads; ++n) s[n / 4][n % 4] = accurate_tanh(s[n / 4][n % 4] * factor);
}

// 0 where the ratio is NaN: what is masked stays 0 times it.
FASTATTN_DEVICE float cap_slope(float t) { return 1.f - fminf(t * t, 1.f); }
template <int kQuads>
FASTATTN_DEVICE void multiply_slopes(const float (&ratios)[kQuads][4], float (&ds)[kQuads][4]) {
#pragma unroll
  for (int n = 0; n < 4 * kQuads; ++n) ds[n / 4][n % 4] *= cap_slope(ratios[n / 4][n % 4]);
}

}  // namespace fastattn::cuda
