// The inner loops of the additive score, and the range in which they are right.
//
//   w tanh(q + k) = w - 2 w u      u = 1 / (1 + E F)      E = e^2q      F = e^2k
//
// E and F come from the prologue: an exponential an element of q and k. A weight is folded into its
// denominator, x = c + (c E) F with c = kUnit / w, so that w u = kUnit / x, and two terms share a
// reciprocal:
//
//   1/x0 + 1/x1 = (x0 + x1) / (x0 x1)      6 instructions, one of them special-function, for two
//                                          elements; 3 loads of 16 bytes for 32
//
// which the special-function unit bounds: 32 elements a clock and SM, twice what one tanh an
// element can reach.
#pragma once

#include "cuda/tile/masking.cuh"

namespace fastattn::cuda {

// ---- ranges ----
//
// Keys of a tile may be multiplied out like this if |k - c| <= kKeyLimit for all of them (c: a
// centre per dim, subtracted from keys and added to queries). Nothing is asked of the queries:
// where q + c > kSaturation + kKeyLimit, tanh is 1 for every key of the tile, and clamping q + c
// there changes nothing but 1 - tanh(kSaturation) = 3.1e-8, half an ulp. On the other side E may
// underflow as it likes: F is finite, and x becomes c. Other tiles take an exponential of q + k an
// element ("direct" in the code).
//
// So 1 <= 1 + E F <= 2^kDepth, kDepth = log2(1 + e^(2 (kSaturation + 2 kKeyLimit))). With weights
// in [2^-kWeightBits, 1], every |x| is a normal number of at least kUnit, and x0 x1 does not
// underflow. It may overflow: its reciprocal is then 0, and what is lost, the larger of the two
// terms, is at most kUnit^2 2^(kDepth + kWeightBits - 126) of the heaviest weight: nothing.
constexpr float kSaturation = 9.f;
constexpr float kKeyLimit = 14.f;     // one in 300,000 normal keys of deviation 3 passes it
constexpr float kMaxExponent = 40.f;  // direct: e^2x is clamped to 2^40, where tanh is 1 to 2e-12
constexpr double kDepth = 2 * 1.442695041 * (kSaturation + 2 * kKeyLimit) + 1e-3;

// Weights are scaled by a power of two, the heaviest to [1/2, 1); lighter ones than 2^-kWeightBits
// count as that (a weight of 0 must not lose the NaN its dim may hold).
constexpr int kWeightBits = 40;
constexpr float kLightest = 0x1p-40f;

constexpr int kUnitBits = -60;
constexpr float kUnit = 0x1p-60f;
constexpr float kPadUnit = 0x1p40f;  // of dims past the last: their terms are 2^-100
static_assert(2 * kUnitBits >= -126 && kUnitBits + kDepth + kWeightBits <= 127 &&
              2 * kUnitBits + kDepth + kWeightBits - 126 < -64 && kMaxExponent < kDepth);

// The same without weights, in the gradients: x = kGradUnit (1 + E F). There tanh = (E F - 1) u is
// wanted where u is tiny, too: products of two are normal numbers, with normal reciprocals.
constexpr int kGradUnitBits = -44;
constexpr float kGradUnit = 0x1p-44f;
static_assert(2 * kGradUnitBits >= -126 && 2 * (kGradUnitBits + kDepth) <= 126);

// ---- scores ----

// Every fma is spelled out: forward and backward, tile or row, must round a score alike, whatever a
// compiler contracts. Their ulp would be everything where scores are huge.

// c (1 + E F), given c E and F or, if kDirect, q and k. NaN stays NaN.
template <bool kDirect>
FASTATTN_DEVICE float denominator(float query, float key, float unit) {
  if constexpr (kDirect) {
    const float exponent = min_nan((query + key) * (2.f * kLog2e), kMaxExponent);
    return fmaf(unit, ex2_approx(exponent), unit);
  } else {
    return fmaf(query, key, unit);
  }
}

// sum + 1 / x0 + 1 / x1.
FASTATTN_DEVICE float add_pair(float sum, float x0, float x1) {
  return fmaf(x0 + x1, rcp_approx(x0 * x1), sum);
}

// acc[i][j] += sum_d 1 / x_ijd over an even number of staged dims.
template <bool kDirect>
FASTATTN_DEVICE void add_terms(const float* queries, const float* keys, const float* units,
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
        acc[r][c] = add_pair(acc[r][c], x0, x1);
      }
  }
}

// The sum as a score in base 2. Rounded here, whatever follows: contracted with a subtraction, the
// largest of huge scores would differ from the maximum that was made of it.
FASTATTN_DEVICE float scaled_score(float sum, float scale) { return __fmul_rn(sum * kUnit, scale); }

// ---- gradients ----
//
// With t = u (1 - u) = (1 - tanh^2) / 4 = E F u^2, whose relative accuracy is kept at both ends:
//
//   dq_id = 4 w_d E_id sum_j dS_ij F_jd u_ijd^2      dk_jd = 4 w_d F_jd sum_i dS_ij E_id u_ijd^2
//   dw_d = sum_ij dS_ij tanh_ijd
//
// One loop serves both: a thread owns kOwn rows (i or j) x kOwn dims in registers and runs over the
// other side, four at a time. With y0 = x1 / (x0 x1) = u0 / kGradUnit and dS kept times kGradUnit,
// one factor u comes out as it is, and the other meets kGradUnit again in E: no power of it is
// left.

using OwnTile = float[kOwn][kOwn];  // [row][dim]

FASTATTN_DEVICE int own_row0() { return thread() / kDimGroups * kOwn; }
FASTATTN_DEVICE int own_dim0() { return thread() % kDimGroups * kOwn; }

// kGradUnit E F; always finite: a NaN has its place in dS, and must not reach masked pairs.
template <bool kDirect>
FASTATTN_DEVICE float gradient_product(float own, float other) {
  if constexpr (kDirect) {
    return ex2_approx(fminf((own + other) * (2.f * kLog2e), kMaxExponent)) * kGradUnit;
  } else {
    return own * other;
  }
}

// dS of own rows r and of four others from `n` on: ds[r][s].
template <bool kOwnKeys>
FASTATTN_DEVICE void load_ds(const float* tile, int n, float (&ds)[kOwn][4]) {
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    float row[4];
    unpack4(kOwnKeys ? load4(tile, n + x, own_row0()) : load4(tile, own_row0() + x, n), row);
#pragma unroll
    for (int y = 0; y < 4; ++y) (kOwnKeys ? ds[y][x] : ds[x][y]) = row[y];
  }
}

// Adds to acc[r][d] the sum over `count` of the other side of dS u y times F (of the queries'
// gradient) or kGradUnit E (of the keys'), to be multiplied by what is owned; where tiles are
// direct, of dS u y kGradUnit E F = dS t. The queries' one also adds kGradUnit dS tanh to
// weight[d]: (E F - 1) u is accurate relative to tanh, where 1 - 2 u is not. `ds`: kGradUnit dS, a
// tile [i][j].
template <bool kDirect, bool kOwnKeys>
FASTATTN_DEVICE void add_gradient(const OwnTile& own, const float* others, const float* ds,
                                  int count, OwnTile& acc, float (&weight)[kOwn]) {
#pragma unroll 1
  for (int n = 0; n < count; n += 4) {
    float other[kOwn][4], pair[kOwn][4];  // [dim][s], dS[row][s]
#pragma unroll
    for (int d = 0; d < kOwn; ++d) unpack4(load4(others, own_dim0() + d, n), other[d]);
    load_ds<kOwnKeys>(ds, n, pair);
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int r = 0; r < kOwn; ++r)
#pragma unroll
        for (int d = 0; d < kOwn; d += 2) {
          const float a0 = gradient_product<kDirect>(own[r][d], other[d][s]);
          const float a1 = gradient_product<kDirect>(own[r][d + 1], other[d + 1][s]);
          const float x0 = a0 + kGradUnit, x1 = a1 + kGradUnit;
          const float reciprocal = rcp_approx(x0 * x1);
          const float y0 = reciprocal * x1, y1 = reciprocal * x0;
          const float z0 = pair[r][s] * y0, z1 = pair[r][s] * y1;
          acc[r][d] += z0 * y0 * (kDirect ? a0 : other[d][s]);
          acc[r][d + 1] += z1 * y1 * (kDirect ? a1 : other[d + 1][s]);
          if constexpr (!kOwnKeys) {
            weight[d] += z0 * (a0 - kGradUnit);
            weight[d + 1] += z1 * (a1 - kGradUnit);
          }
        }
  }
}

}  // namespace fastattn::cuda
