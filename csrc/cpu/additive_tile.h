// The inner loops of the additive score on plain fp32 tiles; score_additive.h fills the tiles,
// additive_terms.h says what a term is. Two terms share a division:
//
//   1/x0 + 1/x1 = (x0 + x1) / (x0 x1)
//
//   for 8 queries, kWidth keys        their 8 sums in registers
//     for pairs of terms              2 rows of F and 2 c in registers, shared by the queries
//       for 8 queries                 2 broadcasts of c E, 2 FMAs, 1 product, 4 sums, 1 division
//
// 16 elements on a vector of 8 are thus bound by the division on Zen 3: 3.4 cycles, 15e9
// elements/s at 3.15 GHz. Four terms to a division are 9 FMAs and no faster there, with larger
// rounding errors and less range; an estimated reciprocal with a Newton step takes 4 slots of the
// FMA pipes where a division takes 2.
#pragma once

#include "common/mask.h"
#include "cpu/additive_terms.h"
#include "cpu/direct.h"

namespace fastattn::FASTATTN_ISA {

// ---- scores ----

constexpr int64_t kPanelRows = 16;  // queries of a panel [terms][kPanelRows]: a cache line a term

// A tile of keys: a panel [dims][kWidth] for every kWidth keys.
struct KeyPanels {
  const float* data;
  int64_t stride;
};

// c (1 + E F), given c E and F or, if kExact, q and k. NaN stays NaN.
template <bool kExact>
FASTATTN_SIMD Vec denominator(Vec query, Vec key, Vec unit) {
  if constexpr (kExact) {
    const Vec exponent = min(splat(kMaxExponent), (query + key) * (2.f * kLog2e));
    return unit * exp2_weight(exponent) + unit;
  } else {
    return query * key + unit;
  }
}

// Adds the terms [begin, end) of kRows queries and kWidth keys.
template <bool kExact, int kRows>
FASTATTN_SIMD void add_terms(const Terms& terms, int64_t begin, int64_t end, const float* e,
                             const float* keys, Vec (&sum)[kRows]) {
#pragma GCC unroll 1
  for (int64_t n = begin; n < end; n += 2) {
    const Vec key0 = load(keys + terms.dim[n] * kWidth);
    const Vec key1 = load(keys + terms.dim[n + 1] * kWidth);
    const Vec unit0 = splat(terms.unit[n]), unit1 = splat(terms.unit[n + 1]);
    const Vec half = splat(terms.half[n / 2]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec x0 = denominator<kExact>(splat(e[n * kPanelRows + r]), key0, unit0);
      const Vec x1 = denominator<kExact>(splat(e[(n + 1) * kPanelRows + r]), key1, unit1);
      sum[r] += half - (x0 + x1) / (x0 * x1);
    }
  }
}

// s[r][0, cols) for kRows queries; `e` is the column of the first of them in its panel. Sums have
// two levels, for 7% of the time: one sum over 128 pairs doubled the error of the output.
template <bool kExact, int kRows>
static void score_rows(const Terms& terms, const float* e, KeyPanels keys, int64_t cols, float* s,
                       int64_t ld) {
  constexpr int64_t kTogether = 16;
  for (int64_t c = 0; c < cols; c += kWidth) {
    const float* const panel = keys.data + c / kWidth * keys.stride;
    Vec total[kRows] = {};
    for (int64_t n = 0, end; n < terms.all; n = end) {
      const int64_t last = n < terms.light ? terms.light : terms.all;
      end = n + kTogether < last ? n + kTogether : last;
      const float factor = n < terms.light ? 1.f / (1 << kWeightBits) : 1.f;
      Vec sum[kRows] = {};
      add_terms<kExact>(terms, n, end, e, panel, sum);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) total[r] += sum[r] * factor;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(s + r * ld + c, total[r] * kUnit * terms.scale);
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

// ---- one query ----

// As in decoding: an exponential a pair then costs no more than one a key, and keys are read where
// they lie, vectorised over d. Two vectors of terms share a division. Everything is filled up with
// zeros to a multiple of 2 kWidth.
struct DirectQuery {
  const float* q;     // [D]
  const float* w;     // [D]
  const float* half;  // [D / 2]: half the weights of the two vectors
};

// w tanh / 2 of dims [d, d + 2 kWidth), in the lanes of one vector.
FASTATTN_SIMD Vec direct_terms(const DirectQuery& query, int64_t d, Vec key0, Vec key1) {
  const Vec one = splat(1.f);
  const Vec x0 = denominator<true>(load(query.q + d), key0, one);
  const Vec x1 = denominator<true>(load(query.q + d + kWidth), key1, one);
  const Vec num = load(query.w + d) * x1 + load(query.w + d + kWidth) * x0;
  return load(query.half + d / 2) - num / (x0 * x1);
}

// s[j] = 2 log2(e) sum_d terms, for keys.rows rounded up to kWidth.
template <DType kType>
static void direct_scores(const DirectQuery& query, const Matrix& keys, float* s) {
  const int64_t whole = keys.cols / (2 * kWidth) * (2 * kWidth);
  for (int64_t j = 0; j < keys.rows; j += kWidth) {
    Vec sums[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) {  // past the last key: the last key again
      const int64_t row = keys.offset + min64(j + lane, keys.rows - 1) * keys.stride_r;
      Vec sum{};
      for (int64_t d = 0; d < whole; d += 2 * kWidth)
        sum += direct_terms(query, d, load_as<kType>(keys.data, row + d),
                            load_as<kType>(keys.data, row + d + kWidth));
      if (whole < keys.cols)
        sum += direct_terms(
            query, whole, load_columns<kType>(keys.data, row + whole, keys.cols - whole),
            load_columns<kType>(keys.data, row + whole + kWidth, keys.cols - whole - kWidth));
      sums[lane] = sum;
    }
    store(s + j, sums_of(sums) * (2.f * kLog2e));
  }
}

// ---- gradients ----
//
//   dq_i = 4 w sum_j dS_ij t_ij        dk_j = 4 w sum_i dS_ij t_ij        t = u (1 - u)
//   dw = sum_ij dS_ij (1 - 2 u_ij)
//
//   for pairs of dims, kGradRows queries
//     for keys, kWidth at a time      u and 1 - u of both dims, from one division, to a buffer
//     for keys, kWidth at a time      z = dS u (1 - u) from the buffer; dw += dS tanh, dq += z in
//                                     registers, dk += z in its tile in the L1 cache
//
// Two loops, because one chain of 34 cycles from E to the sums, 20 operations wide, fills the
// schedulers of Zen 3: 10.4 cycles for two dims on kWidth keys, where these take 5.2 + 4.2. 1 - u
// is computed as E F u, which keeps its relative accuracy where tanh is near -1; v - v u would save
// an operation, but is 4 times less accurate there than PyTorch's 1 - tanh^2.

constexpr int kGradRows = kWidth / 2;  // two dims of them fill one vector of sums
constexpr int kGradVecs = 4;  // of the buffer, for a query and kWidth keys: u0 u1 1-u0 1-u1

// Here x = kGradUnit (1 + E F), unweighted, and 1 / x0 = x1 / (x0 x1). What u multiplies comes out
// over kGradUnit.
constexpr int kGradUnitBits = -44;
constexpr float kGradUnit = 0x1p-44f;
static_assert(2 * kGradUnitBits >= -126 && 2 * (kGradUnitBits + kDepth) <= 126);

// kGradUnit E F. Always finite: a NaN has its place in dS, and must not reach masked pairs.
template <bool kExact>
FASTATTN_SIMD Vec gradient_product(Vec query, Vec key) {
  if constexpr (kExact) {
    const Vec exponent = min((query + key) * (2.f * kLog2e), splat(kMaxExponent));
    return exp2_weight(exponent) * kGradUnit;
  } else {
    return query * key;
  }
}

template <bool kExact>
FASTATTN_SIMD void gradient_reciprocals(const float* e, KeyPanels keys, int64_t cols, float* to) {
  for (int64_t c = 0; c < cols; c += kWidth) {
    const float* const panel = keys.data + c / kWidth * keys.stride;
    const Vec key0 = load(panel), key1 = load(panel + kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kGradRows; ++r) {
      const Vec a0 = gradient_product<kExact>(splat(e[r]), key0);
      const Vec a1 = gradient_product<kExact>(splat(e[r + kPanelRows]), key1);
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

// Adds to grad_keys, panels of keys, and to `weight`; returns the gradients of the queries: lane r
// of the first dim, lane kGradRows + r of the second. Sums over queries have two levels, which
// makes them several times more accurate.
FASTATTN_SIMD Vec gradient_sums(const float* from, const float* ds, int64_t ld, int64_t cols,
                                float* grad_keys, int64_t stride, Vec (&weight)[2]) {
  Vec query[2 * kGradRows] = {};
  Vec w0{}, w1{};
  for (int64_t c = 0; c < cols; c += kWidth) {
    Vec key0{}, key1{};
#pragma GCC unroll 8
    for (int r = 0; r < kGradRows; ++r) {
      const Vec dsr = load(ds + r * ld + c);
      const Vec u0 = load(from), u1 = load(from + kWidth);
      const Vec rest0 = load(from + 2 * kWidth), rest1 = load(from + 3 * kWidth);
      const Vec z0 = dsr * u0 * rest0, z1 = dsr * u1 * rest1;
      w0 += dsr * (rest0 - u0 * kGradUnit);  // tanh = (1 - u) - u: dS cancels over a row, not u dS
      w1 += dsr * (rest1 - u1 * kGradUnit);
      query[r] += z0;
      query[r + kGradRows] += z1;
      key0 = r == 0 ? z0 : key0 + z0;
      key1 = r == 0 ? z1 : key1 + z1;
      from += kGradVecs * kWidth;
    }
    store(grad_keys, load(grad_keys) + key0);
    store(grad_keys + kWidth, load(grad_keys + kWidth) + key1);
    grad_keys += stride;
  }
  weight[0] += w0;
  weight[1] += w1;
  return sums_of(query);
}

}  // namespace fastattn::FASTATTN_ISA
