// The inner loops of the additive score on plain fp32 tiles; score_additive.h fills the tiles.
//
// A term is one w tanh(q + k) = w - 2 w u with u = 1 / (1 + E F), E = e^2q, F = e^2k. Its weight is folded into its
// denominator, x = c + (c E) F with c = unit / w, so that w u = unit / x and a sum of terms is a sum of reciprocals,
// which share divisions:
//
//   1/x1 + 1/x2 = (x1 + x2) / (x1 x2) = n / p        n1/p1 + n2/p2 = (n1 p2 + n2 p1) / (p1 p2)
//
//   for 8 queries, kWidth keys               8 sums in registers
//     for fractions of 4 (or 2) terms        4 rows of F and 4 c in registers, shared by the queries
//       for 8 queries                        4 broadcasts of c E, 9 multiplications or FMAs, 4 additions, 1 division
//
// A fraction of 4 on kWidth keys is thus at least 4.5 cycles on hardware with two FMA pipes, in practice the throughput
// of 9 FMAs and a division together: 5.5 cycles on Zen 3, or 18e9 elements/s at 3.15 GHz.
#pragma once

#include "cpu/scratch.h"

namespace fastattn::FASTATTN_ISA {

// ---- ranges ----
//
// What a product of denominators can hold depends on how large the keys are. A tile whose keys satisfy |k - c| <= kLimit
// (c: a centre per dim, subtracted from keys and added to queries) is in range. No bound on the queries is needed: where
// q + c > kSaturation + kLimit, tanh is 1 for every key of the tile, and clamping q + c there changes nothing but
// 1 - tanh(kSaturation) = 3.1e-8, half an ulp. Below, E may underflow as it likes: F is finite and x becomes c.
//
// So 1 <= 1 + E F <= 2^kDepth with kDepth = log2(1 + e^(2 (kSaturation + 2 kLimit))), and with weights in
// [2^-kWeightBits, 1] every |x| lies in [kUnit, kUnit 2^(kDepth + kWeightBits)]; numerators have one factor less than
// denominators. The static_asserts say that products of kShare such factors stay normal numbers.
constexpr float kSaturation = 9.f;
constexpr int kWeightBits = 8;

constexpr double depth_of(double limit) { return 2 * 1.442695041 * (kSaturation + 2 * limit) + 1e-3; }

struct NearRange {
  static constexpr bool kExact = false;
  static constexpr int kShare = 4;
  static constexpr float kLimit = 4.9f;
  static constexpr int kUnitBits = -31;
  static constexpr double kDepth = depth_of(kLimit);
};
struct FarRange {
  static constexpr bool kExact = false;
  static constexpr int kShare = 2;
  static constexpr float kLimit = 11.5f;
  static constexpr int kUnitBits = -50;
  static constexpr double kDepth = depth_of(kLimit);
};
// Anything goes, infinities and NaN in a key included: one exponential of q + k an element.
struct AnyRange {
  static constexpr bool kExact = true;
  static constexpr int kShare = 2;
  static constexpr int kUnitBits = -30;
  static constexpr float kMaxExponent = 40.f;  // e^(2x) is clamped to 2^40: tanh is 1 to 2e-12
  static constexpr double kDepth = kMaxExponent + 1e-3;
};

template <typename Range>
constexpr bool forward_fits() {
  return Range::kShare * Range::kUnitBits >= -126 &&
         Range::kShare * (Range::kUnitBits + Range::kDepth + kWeightBits) <= 127;
}
static_assert(forward_fits<NearRange>() && forward_fits<FarRange>() && forward_fits<AnyRange>());

template <typename Range>
constexpr float unit_of() {
  return 1.f / static_cast<float>(int64_t{1} << -Range::kUnitBits);
}

// c + (c E) F, given c E; or c (1 + e^(2 (q + k))), given q. NaN stays NaN.
template <typename Range>
FASTATTN_SIMD Vec denominator(Vec query, Vec key, Vec unit) {
  if constexpr (Range::kExact) {
    const Vec exponent = min(splat(Range::kMaxExponent), (query + key) * (2.f * kLog2e));
    return unit * exp2_weight(exponent) + unit;
  } else {
    return query * key + unit;
  }
}

// ---- scores ----

constexpr int64_t kPanelRows = 16;  // queries of a panel [terms][kPanelRows]: one cache line a term

// The terms of a score: which dim, with which weight. Weights of similar size form segments, so that products of their
// denominators need little range: relative to the largest, segment b holds weights in [2^(-8 (b + 1)), 2^(-8 b)), scaled
// to [2^-8, 1); the sum is scaled from one segment to the next.
struct Terms {
  static constexpr int kMaxSegments = 5;
  struct Segment {
    int64_t end;    // past its last term; a multiple of 4
    float rescale;  // of the sum so far
  };
  int32_t* dim;
  float* weight;  // signed, within the segment
  float* unit;    // unit_of<Range>() / weight
  float* half;    // per fraction: half its weights, over unit_of<Range>(); makes it a sum of tanh/2
  Segment segment[kMaxSegments];
  int segments;
  float scale;  // of the whole sum, apart from unit_of<Range>()
};

struct Fraction {
  Vec num, den;
};
FASTATTN_SIMD Fraction add_reciprocals(Vec a, Vec b) { return {a + b, a * b}; }
FASTATTN_SIMD Fraction add_fractions(Fraction a, Fraction b) {
  return {a.num * b.den + b.num * a.den, a.den * b.den};
}

template <int kShare>
FASTATTN_SIMD Vec sum_of_reciprocals(const Vec (&x)[kShare]) {
  Fraction sum = add_reciprocals(x[0], x[1]);
  if constexpr (kShare == 4) sum = add_fractions(sum, add_reciprocals(x[2], x[3]));
  return sum.num / sum.den;
}

// A tile of keys: one panel [dims][kWidth] a vector of keys.
struct KeyPanels {
  const float* data;
  int64_t stride;
};

// s[r][0, cols) for kRows queries; `e` is the column of the first of them in its panel.
template <typename Range, int kRows>
static void score_rows(const Terms& terms, const float* e, KeyPanels keys, int64_t cols, float* s, int64_t ld) {
  constexpr int kShare = Range::kShare;
  for (int64_t c = 0; c < cols; c += kWidth) {
    const float* const panel = keys.data + c / kWidth * keys.stride;
    Vec sum[kRows] = {};
    int64_t n = 0;
    for (int g = 0; g < terms.segments; ++g) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r] *= terms.segment[g].rescale;
#pragma GCC unroll 1
      for (; n < terms.segment[g].end; n += kShare) {
        Vec key[kShare], unit[kShare];
#pragma GCC unroll 4
        for (int t = 0; t < kShare; ++t) {
          key[t] = load(panel + terms.dim[n + t] * kWidth);
          unit[t] = splat(terms.unit[n + t]);
        }
        const Vec half = splat(terms.half[n / kShare]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          Vec x[kShare];
#pragma GCC unroll 4
          for (int t = 0; t < kShare; ++t)
            x[t] = denominator<Range>(splat(e[(n + t) * kPanelRows + r]), key[t], unit[t]);
          sum[r] = (sum[r] + half) - sum_of_reciprocals<kShare>(x);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(s + r * ld + c, sum[r] * unit_of<Range>() * terms.scale);
  }
}

// ---- gradients ----
//
//   dq_i = 4 w sum_j dS_ij t_ij    dk_j = 4 w sum_i dS_ij t_ij    dw = sum_ij dS_ij (1 - 2 u_ij)    t = u (1 - u)
//
//   for pairs of dims, kGradRows queries
//     for the keys of the tile, kWidth at a time     u and 1 - u of both dims, from one division, to a buffer
//     for the keys of the tile, kWidth at a time     v = dS u, z = v (1 - u) from the buffer; dw += v; dq, dk += z:
//                                                    dq and dw in registers, dk in its tile in the L1 cache
//
// Two loops, because a chain of 34 cycles from E to the sums, 20 operations wide, fills the schedulers of Zen 3 and runs
// at 10.4 cycles for two dims on kWidth keys; these take 5.2 + 3.7. 1 - u is computed as E F u, which keeps its relative
// accuracy where tanh is near -1; v - v u would save an operation, but is 4 times less accurate there than PyTorch's
// 1 - tanh^2.

constexpr int kGradRows = kWidth / 2;  // two dims of them fill one vector of sums

// x = kGradUnit (1 + E F); a pair of reciprocals is x1 / (x0 x1), x0 / (x0 x1). Sums come out divided by kGradUnit.
constexpr int kGradUnitBits = -30;
constexpr float kGradUnit = 0x1p-30f;
template <typename Range>
constexpr bool gradient_fits() {
  return 2 * kGradUnitBits >= -126 && 2 * (kGradUnitBits + Range::kDepth) <= 126;
}
static_assert(gradient_fits<NearRange>() && gradient_fits<FarRange>() && gradient_fits<AnyRange>());

// kGradUnit E F. Always finite: a NaN has its place in dS, and must not reach pairs that are masked.
template <typename Range>
FASTATTN_SIMD Vec gradient_product(Vec query, Vec key) {
  if constexpr (Range::kExact) {
    const Vec exponent = min((query + key) * (2.f * kLog2e), splat(Range::kMaxExponent));
    return exp2_weight(exponent) * kGradUnit;
  } else {
    return query * key;
  }
}

// Lane l of the result is the sum of the lanes of x[l].
template <int kBit = 1>
FASTATTN_SIMD Vec sums_of(Vec* x) {
  if constexpr (kBit == kWidth) {
    return x[0];
  } else {
#pragma GCC unroll 8
    for (int n = 0; n < kWidth / 2 / kBit; ++n) {
      exchange<kBit>(x[2 * n], x[2 * n + 1], std::make_integer_sequence<int, kWidth>{});
      x[n] = x[2 * n] + x[2 * n + 1];
    }
    return sums_of<2 * kBit>(x);
  }
}

constexpr int kGradVecs = 4;  // of the buffer, a query and vector of keys: u and 1 - u of two dims

// Two neighbouring dims of kGradRows queries and a tile of keys.
template <typename Range>
FASTATTN_SIMD void gradient_reciprocals(const float* e, KeyPanels f, int64_t cols, float* to) {
  for (int64_t c = 0; c < cols; c += kWidth) {
    const float* const panel = f.data + c / kWidth * f.stride;
    const Vec key0 = load(panel), key1 = load(panel + kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kGradRows; ++r) {
      const Vec a0 = gradient_product<Range>(splat(e[r]), key0);
      const Vec a1 = gradient_product<Range>(splat(e[r + kPanelRows]), key1);
      const Vec x0 = a0 + kGradUnit, x1 = a1 + kGradUnit;
      const Vec reciprocal = 1.f / (x0 * x1);
      const Vec y0 = reciprocal * x1, y1 = reciprocal * x0;
      store(to, y0);
      store(to + kWidth, y1);
      store(to + 2 * kWidth, a0 * y0);
      store(to + 3 * kWidth, a1 * y1);
      to += kGradVecs * kWidth;
    }
  }
}

// Adds to grad_f, a KeyPanels of two dims, and to `weight`; returns the gradients of the queries: lane r of the first
// dim, lane kGradRows + r of the second.
FASTATTN_SIMD Vec gradient_sums(const float* from, const float* ds, int64_t ld, int64_t cols, float* grad_f,
                                int64_t f_stride, Vec (&weight)[2]) {
  Vec query[2 * kGradRows] = {};
  Vec w0 = weight[0], w1 = weight[1];
  for (int64_t c = 0; c < cols; c += kWidth) {
    Vec key0 = load(grad_f), key1 = load(grad_f + kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kGradRows; ++r) {
      const Vec dsr = load(ds + r * ld + c);
      const Vec v0 = dsr * load(from), v1 = dsr * load(from + kWidth);
      const Vec z0 = v0 * load(from + 2 * kWidth), z1 = v1 * load(from + 3 * kWidth);
      w0 += v0;
      w1 += v1;
      query[r] += z0;
      query[r + kGradRows] += z1;
      key0 += z0;
      key1 += z1;
      from += kGradVecs * kWidth;
    }
    store(grad_f, key0);
    store(grad_f + kWidth, key1);
    grad_f += f_stride;
  }
  weight[0] = w0;
  weight[1] = w1;
  return sums_of(query);
}

}  // namespace fastattn::FASTATTN_ISA
