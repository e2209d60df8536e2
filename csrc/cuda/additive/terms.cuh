// The inner loops of the additive score, and the range in which the loops are right.
//
//   w tanh(q + k) = w - 2 w u      u = 1 / (1 + E F)      E = e^2q      F = e^2k
//
// The prologue computes E and F, with one exponential per element of q and k. The denominator
// absorbs the weight: x = c + (c E) F with c = kUnit / w. Then w u = kUnit / x. Two terms share a
// reciprocal:
//
//   1/x0 + 1/x1 = (x0 + x1) / (x0 x1)      6 instructions for two elements, one of them on the
//                                          special-function unit; 3 loads of 16 bytes for 32
//
// The special-function unit bounds this loop: 32 elements per clock and SM. A loop with one tanh
// per element can reach half of that.
#pragma once

#include "cuda/tile/masking.cuh"

namespace fastattn::cuda {

// ---- ranges ----
//
// A tile may multiply E and F if |k - c| <= kKeyLimit for all of its keys. The centre c of a dim is
// subtracted from keys and added to queries. Other tiles take an exponential of q + k per pair and
// dim ("direct" in the code).
//
// Queries need no bound. Where q + c > kSaturation + kKeyLimit, tanh is 1 for every key of the
// tile, so q + c is clamped there. The clamp changes tanh by at most 3.1e-8 =
// 1 - tanh(kSaturation), half an ulp. E may underflow: F is finite, so x becomes c.
//
// So 1 <= 1 + E F <= 2^kDepth, kDepth = log2(1 + e^(2 (kSaturation + 2 kKeyLimit))). With weights
// in [2^-kWeightBits, 1], every |x| is a normal number of at least kUnit, and x0 x1 does not
// underflow. x0 x1 may overflow. Then its reciprocal is 0, and both terms are lost. The larger term
// is at most kUnit^2 2^(kDepth + kWeightBits - 126) of the heaviest weight, which is negligible.
constexpr float kSaturation = 9.f;
constexpr float kKeyLimit = 14.f;     // one in 300,000 normal keys of deviation 3 exceeds 14
constexpr float kMaxExponent = 40.f;  // direct: e^2x is clamped to 2^40, where tanh is 1 to 2e-12
constexpr double kDepth = 2 * 1.442695041 * (kSaturation + 2 * kKeyLimit) + 1e-3;

// A power of two scales all weights of a head, so that the heaviest is in [1/2, 1). Weights below
// 2^-kWeightBits count as 2^-kWeightBits. So does a weight of 0, because a NaN in its dim must not
// be lost.
constexpr int kWeightBits = 40;
constexpr float kLightest = 0x1p-40f;

constexpr int kUnitBits = -60;
constexpr float kUnit = 0x1p-60f;
constexpr float kPadUnit = 0x1p40f;  // of dims past the last, whose terms are 2^-100
static_assert(2 * kUnitBits >= -126 && kUnitBits + kDepth + kWeightBits <= 127 &&
              2 * kUnitBits + kDepth + kWeightBits - 126 < -64 && kMaxExponent < kDepth);

// The unit of x in the gradients, where x has no weight: x = kGradUnit (1 + E F). The gradients
// need tanh = (E F - 1) u even where u is tiny. So the product of two x must be a normal number,
// with a normal reciprocal.
constexpr int kGradUnitBits = -44;
constexpr float kGradUnit = 0x1p-44f;
static_assert(2 * kGradUnitBits >= -126 && 2 * (kGradUnitBits + kDepth) <= 126);

// ---- scores ----

// Every fma is written out, so that the compiler does not choose which products to contract. All
// kernels must round a score alike: forward and backward, tile and row. Where scores are huge, a
// difference of one ulp would change the weights completely.

// c (1 + E F), from c E and F, or from q and k if kDirect. NaN stays NaN.
template <bool kDirect>
FASTATTN_DEVICE float denominator(float query, float key, float unit) {
  if constexpr (kDirect) {
    const float exponent = min_nan((query + key) * (2.f * kLog2e), kMaxExponent);
    return fmaf(unit, ex2_approx(exponent), unit);
  } else {
    return fmaf(query, key, unit);
  }
}

// sum - 1 / x0 - 1 / x1.
FASTATTN_DEVICE float subtract_pair(float sum, float x0, float x1) {
  return fmaf(-(x0 + x1), rcp_approx(x0 * x1), sum);
}

// acc[i][j] -= sum_d 1 / x_ijd over an even number of staged dims. A sum that begins with half of
// all weights ends as sum_d w tanh / 2. One that begins with 0 cancels later.
template <bool kDirect>
FASTATTN_DEVICE void subtract_terms(const float* queries, const float* keys, const float* units,
                                    int dims, Fragment& acc) {
#pragma unroll 1
  for (int d = 0; d < dims; d += 2) {
    float q0[kRows], q1[kRows], k0[kCols], k1[kCols];
    load_rows(queries, d, q0);
    load_rows(queries, d + 1, q1);
    load_cols(keys, d, k0);
    load_cols(keys, d + 1, k1);
    const float2 unit = *reinterpret_cast<const float2*>(units + d);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const float x0 = denominator<kDirect>(q0[r], k0[c], unit.x);
        const float x1 = denominator<kDirect>(q1[r], k1[c], unit.y);
        acc[r][c] = subtract_pair(acc[r][c], x0, x1);
      }
  }
}

// The sum as a score. The unit is kUnit, or 1 for the gaussian score. __fmul_rn rounds the product
// here, whatever follows. If the compiler contracted the product with a subtraction, the largest of
// huge scores would differ from the maximum made from the same score.
FASTATTN_DEVICE float scaled_score(float sum, float unit, float scale) {
  return __fmul_rn(sum * unit, scale);
}

// ---- gradients ----
//
// With t = u (1 - u) = (1 - tanh^2) / 4 = E F u^2. The last form keeps its relative accuracy near
// tanh = -1 and near tanh = 1.
//
//   dq_id = 4 w_d E_id sum_j dS_ij F_jd u_ijd^2      dk_jd = 4 w_d F_jd sum_i dS_ij E_id u_ijd^2
//   dw_d = sum_ij dS_ij tanh_ijd
//
// One loop serves dq, dk and dw. A thread owns kOwnDims dims of kOwnKeys keys, in registers. It
// runs over the queries, four at a time. Two dims share a reciprocal, so that no pair depends on
// another: y0 = x1 / (x0 x1) = u0 / kGradUnit. The stored dS has a factor kGradUnit, which cancels
// that of one y. E has another kGradUnit, which cancels that of the other y. The result has no
// power of kGradUnit left.

using OwnTile = float[kOwnDims][kOwnKeys];
using Quads = float[kOwnDims][4];  // of four queries

FASTATTN_DEVICE int own_group() { return thread() / kOwnLanes; }
FASTATTN_DEVICE int own_key0() { return own_group() * kOwnKeys; }
// The first of the dims. Those of eight neighbouring lanes are 4 apart: in different banks.
FASTATTN_DEVICE int own_dim0(int lane) { return lane % 8 * 4 + lane / 8 % 2 * kOwnDims; }

// kGradUnit E F. The result is always finite, because a NaN must not reach masked pairs. A NaN of a
// kept pair reaches the gradients through dS.
template <bool kDirect>
FASTATTN_DEVICE float gradient_product(float own, float other) {
  if constexpr (kDirect) {
    return ex2_approx(fminf((own + other) * (2.f * kLog2e), kMaxExponent)) * kGradUnit;
  } else {
    return own * other;
  }
}

// dS of own key k and four queries. Four rows of a tile share a permutation, and so an address.
FASTATTN_DEVICE void load_ds(const float* ds, int key0, int k, int i, float (&pair)[4]) {
  const float* const rows = ds + tile_index(key0 + k / 4 * 4, i);
  unpack4(*reinterpret_cast<const float4*>(rows + k % 4 * kTile), pair);
}

// Adds the sums over own keys to dq of queries [i, i + 4), and the sums over these to dk. `ds`
// holds kGradUnit dS, as a tile [j][i].
//
//   dq        sum of dS u y F              the caller multiplies by kGradUnit E
//   dk        sum of dS u y kGradUnit E    the caller multiplies by F
//   kDirect   sum of dS u y kGradUnit E F = sum of dS t
//
// Adds kGradUnit dS tanh to `weight`, as kGradUnit dS (E F - 1) u. This form is accurate relative
// to tanh, and 1 - 2 u is not.
template <bool kDirect>
FASTATTN_DEVICE void add_gradient(const OwnTile& own, int key0, const Quads& other, const float* ds,
                                  int i, OwnTile& of_keys, Quads& of_queries,
                                  float (&weight)[kOwnDims]) {
#pragma unroll
  for (int k = 0; k < kOwnKeys; ++k) {
    float pair[4];
    load_ds(ds, key0, k, i, pair);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      float a[kOwnDims], x[kOwnDims];
#pragma unroll
      for (int d = 0; d < kOwnDims; ++d) {
        a[d] = gradient_product<kDirect>(own[d][k], other[d][s]);
        x[d] = a[d] + kGradUnit;
      }
      const float reciprocal = rcp_approx(x[0] * x[1]);
#pragma unroll
      for (int d = 0; d < kOwnDims; ++d) {
        const float y = reciprocal * x[1 - d], z = pair[s] * y;
        const float g = kDirect ? z * y * a[d] : z * y;
        of_queries[d][s] += kDirect ? g : g * own[d][k];
        of_keys[d][k] += kDirect ? g : g * other[d][s];
        weight[d] += z * (a[d] - kGradUnit);
      }
    }
  }
}
static_assert(kOwnDims == 2);

}  // namespace fastattn::cuda
