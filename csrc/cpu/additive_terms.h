// The terms of an additive score, sum_d w_d tanh(q_d + k_d), laid out for the loops of
// additive_tile.h: which dim, with which weight, and the range in which the loops are right.
//
// A term is w tanh(q + k) = w - 2 w u with u = 1 / (1 + E F), E = e^2q, F = e^2k. Its weight is
// folded into its denominator, x = c + (c E) F with c = kUnit / w: then w u = kUnit / x.
#pragma once

#include "cpu/scratch.h"

namespace fastattn::FASTATTN_ISA {

// ---- ranges ----
//
// Keys of a tile may be multiplied out like this if |k - c| <= kKeyLimit for all of them (c: a
// centre per dim, subtracted from keys and added to queries). No bound on the queries is needed:
// where q + c > kSaturation + kKeyLimit, tanh is 1 for every key of the tile, and clamping q + c
// there changes nothing but 1 - tanh(kSaturation) = 3.1e-8, half an ulp. On the other side E may
// underflow as it likes: F is finite, and x becomes c.
//
// So 1 <= 1 + E F <= 2^kDepth, kDepth = log2(1 + e^(2 (kSaturation + 2 kKeyLimit))), and with
// weights in [2^-kWeightBits, 1] every |x| lies in [kUnit, kUnit 2^(kDepth + kWeightBits)]: the
// static_assert says that products of two are normal numbers. Other tiles take an exponential of
// q + k an element ("exact" in the code), at a sixth of the speed.
constexpr float kSaturation = 9.f;
constexpr float kKeyLimit = 14.f;     // one in 300,000 normal keys of deviation 3 passes it
constexpr float kMaxExponent = 40.f;  // exact: e^(2x) is clamped to 2^40, where tanh is 1 to 2e-12
constexpr double kDepth = 2 * 1.442695041 * (kSaturation + 2 * kKeyLimit) + 1e-3;
constexpr int kWeightBits = 16;

constexpr int kUnitBits = -60;
constexpr float kUnit = 0x1p-60f;
static_assert(2 * kUnitBits >= -126 && 2 * (kUnitBits + kDepth + kWeightBits) <= 127 &&
              kMaxExponent < kDepth);

// ---- terms ----

// Weights are scaled by a power of two, the heaviest to [1/2, 1). Light ones, below
// 2^-kWeightBits, come first, scaled up by as much once more, so that a product of two
// denominators needs less range. Both kinds are filled up to an even number with the dim D, of
// which the caller makes a term with u = 1.
struct Terms {
  int32_t* dim;
  float* unit;         // kUnit / weight
  float* half;         // per pair: half the weights / kUnit, which makes the sum one of w tanh / 2
  int64_t light, all;  // how many
  float scale;         // of the sum, apart from kUnit: makes it 2 log2(e) sum w tanh / 2
};

FASTATTN_SIMD int64_t terms_capacity(int64_t D) { return round_up(D, 2) + 2; }

FASTATTN_SIMD Terms make_terms(Scratch& scratch, int64_t D) {
  const int64_t capacity = terms_capacity(D);
  int32_t* const dim = scratch.ints(capacity);
  return {dim, scratch.floats(capacity), scratch.floats(capacity / 2), 0, 0, 0.f};
}

constexpr float kLightest = 1.f / (1 << kWeightBits);

// Weights below 2^-32 of the heaviest count as that: 0 must not lose the NaN its dim may hold.
FASTATTN_SIMD float light_weight(float weight) {
  const float scaled = weight * (1 << kWeightBits);
  return __builtin_fabsf(scaled) < kLightest ? __builtin_copysignf(kLightest, scaled) : scaled;
}

// `share` of u in the sum that makes it one of tanh: 1/2, or 1 for a term that is to vanish.
FASTATTN_SIMD void add_term(Terms& terms, int64_t d, float weight, float share) {
  const int64_t n = terms.all++;
  terms.dim[n] = static_cast<int32_t>(d);
  terms.unit[n] = kUnit / weight;
  terms.half[n / 2] = (n % 2 == 0 ? 0.f : terms.half[n / 2]) + share * weight / kUnit;
}

// The heaviest of the weights, NaN if any is not finite.
FASTATTN_SIMD float heaviest_weight(const float* w, int64_t D) {
  float heaviest = 0.f;
  bool finite = true;
  for (int64_t d = 0; d < D; ++d) {
    const float size = __builtin_fabsf(w[d]);
    finite &= size < kInf;
    heaviest = size > heaviest ? size : heaviest;
  }
  return finite ? heaviest : __builtin_nanf("");
}

[[maybe_unused]] static void list_terms(const float* w, int64_t D, Terms& terms) {
  const float heaviest = heaviest_weight(w, D);
  const bool finite = heaviest == heaviest;
  int exponent = 0;
  if (finite) __builtin_frexpf(heaviest, &exponent);
  if (exponent > 126) exponent = 126;  // 2^128 is no float; the range has room for weights up to 4
  // Two steps, since 2^-exponent may be no float either.
  const float first = __builtin_ldexpf(1.f, -exponent / 2);
  const float second = __builtin_ldexpf(1.f, -exponent - -exponent / 2);
  terms.all = 0;
  for (const bool light : {true, false}) {
    for (int64_t d = 0; d < D; ++d) {
      const float weight = finite ? w[d] * first * second : 1.f;
      if ((__builtin_fabsf(weight) < kLightest) != light) continue;
      add_term(terms, d, light ? light_weight(weight) : weight, 0.5f);
    }
    if (terms.all % 2 != 0) add_term(terms, D, kLightest, 1.f);
    if (light) terms.light = terms.all;
  }
  const float power = heaviest == 0.f ? 0.f : __builtin_ldexpf(1.f, exponent);
  terms.scale = 2.f * kLog2e * (finite ? power : heaviest);  // NaN makes every score NaN
}

}  // namespace fastattn::FASTATTN_ISA
