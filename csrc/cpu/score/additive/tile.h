// The inner loops of the additive score on plain fp32 tiles. score.h fills the tiles, and terms.h
// says what a term is. Four terms share a division. Where keys are far apart, two do:
//
//   1/x0 + 1/x1 = (x0 + x1) / (x0 x1)
//
//   for 8 queries, kWidth keys        their 8 sums in registers
//     for 4 terms                     4 rows of F and 4 c in registers, shared by the queries
//       for 8 queries                 4 broadcasts of c E, 4 FMAs, 3 products, 2 sums, 2 to add the
//                                     fractions, 1 division and subtraction
//
// With AVX-512 these are 14 operations and an estimate of a reciprocal. The estimate takes 4 slots,
// and a cycle has 2. So 64 elements take 9 cycles: 29e9 elements/s at 4.06 GHz. Granite Rapids
// reaches 27e9, and 23e9 with two terms per division. With a division instruction in place of the
// estimate, Granite Rapids reaches 12e9.
//
// With AVX2 on the same machine, a division takes 5 cycles, and the other 12 operations take 6:
// 20e9 elements/s. Two terms per division give 13e9.
#pragma once

#include "cpu/score/additive/terms.h"
#include "cpu/tile/strips.h"
#include "problem/mask.h"

namespace fastattn::FASTATTN_ISA {

// ---- scores ----

constexpr int64_t kPanelRows = 16;  // queries of a panel [terms][kPanelRows]: 64 bytes per term

// A tile of keys. Every kWidth keys have a panel [dims][kWidth].
struct KeyPanels {
  const float* data;
  int64_t stride;
};

// c (1 + E F), from c E and F, or from q and k if exact. NaN stays NaN.
template <Range kRange>
FASTATTN_SIMD Vec denominator(Vec query, Vec key, Vec unit) {
  if constexpr (kRange == Range::kExact) {
    const Vec exponent = min(splat(kMaxExponent), (query + key) * (2.f * kLog2e));
    return unit * exp2_weight(exponent) + unit;
  } else {
    return query * key + unit;
  }
}

// A sum of fractions is num / den.
struct Fraction {
  Vec num, den;
};

// The sum of 1 / x over kCount consecutive terms, for kWidth keys and one query.
template <Range kRange, int kCount>
FASTATTN_SIMD Fraction sum_of_terms(const float* e, const Vec* keys, const Vec* units) {
  const auto x = [&](int n) __attribute__((always_inline)) {
    return denominator<kRange>(splat(e[n * kPanelRows]), keys[n], units[n]);
  };
  const Vec x0 = x(0), x1 = x(1);
  const Fraction left = {x0 + x1, x0 * x1};
  if constexpr (kCount == 2) {
    return left;
  } else {
    const Vec x2 = x(2), x3 = x(3);
    const Fraction right = {x2 + x3, x2 * x3};
    return {left.num * right.den + right.num * left.den, left.den * right.den};
  }
}

// Subtracts 1 / x of terms [begin, end) from the sums of kRows queries and kWidth keys.
template <Range kRange, int kRows>
FASTATTN_SIMD void subtract_terms(const Terms& terms, int64_t begin, int64_t end, const float* e,
                                  const float* keys, Vec (&sum)[kRows]) {
  constexpr int kCount = kRange == Range::kNear ? kNearRule.sharing : kFarRule.sharing;
#pragma GCC unroll 1
  for (int64_t n = begin; n < end; n += kCount) {
    Vec key[kCount], unit[kCount];
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
      key[m] = load(keys + terms.dim[n + m] * kWidth);
      unit[m] = splat(terms.unit[n + m]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Fraction f = sum_of_terms<kRange, kCount>(e + n * kPanelRows + r, key, unit);
      sum[r] = minus_quotient(sum[r], f.num, f.den);
    }
  }
}

// Writes s[r][c] for kRows queries and the listed columns. `e` is the column of the first query in
// its panel.
template <Range kRange, int kRows>
static void score_rows(const Terms& terms, const float* e, KeyPanels keys, Columns columns,
                       float* s, int64_t ld) {
  for (int64_t v = 0; v < columns.count(); ++v) {
    const int64_t c = columns.at(v);
    const float* const panel = keys.data + c / kWidth * keys.stride;
    Vec total[kRows] = {};
    for (int64_t n = 0, begin = 0; n < terms.blocks; begin = terms.block_end[n++]) {
      Vec sum[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r] = splat(terms.block_half[n]);
      subtract_terms<kRange>(terms, begin, terms.block_end[n], e, panel, sum);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) total[r] += sum[r] * terms.block_factor[n];
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(s + r * ld + c, total[r] * terms.scale);
  }
}

// ---- gradients ----
//
//   dq_i = 4 w sum_j dS_ij t_ij        dk_j = 4 w sum_i dS_ij t_ij        t = u (1 - u)
//   dw = 2 sum_ij dS_ij (1/2 - u_ij)
//
// t = E F u^2. E is the same for all keys, so E multiplies the finished sum over keys. In the same
// way, F multiplies the finished sum over queries:
//
//   for pairs of dims, kGradRows queries     their sums over keys in registers
//     for keys, kWidth at a time             2 rows of F in registers
//       for the queries                      u of both dims from one reciprocal, g = (dS u) u
//                                            sum += dS (1/2 - u), sum_i += g F, sum_j += g E
//
// An element takes an FMA and half a product for x. The reciprocal takes one operation and half an
// estimate (2 slots). The rest takes 7 operations. With AVX-512 these are 11.5 slots, and a cycle
// has 2: 11.3e9 elements/s at 4.06 GHz. Granite Rapids reaches 10.3e9. AVX2 gives 7.7e9.
//
// A sum of dS u instead of dS (1/2 - u) would save one operation, because dS cancels over a row.
// That sum is less accurate where dw is small. Near u = 1, t = E F u^2 keeps its relative accuracy.
// dS u - g in place of E F g would lose that accuracy.

constexpr int kGradRows = 4;  // 8 are no faster with 32 registers, and slower with 16

// The factor of x in the gradients, so that the product of two x is a normal number. gradient_e_ of
// score.h holds E times this factor.
template <Range kRange>
constexpr float kGradUnit = kRange == Range::kFar ? 0x1p-45f : 1.f;
static_assert(2 * kNearRule.depth() <= 126 && 2 * (kFarRule.depth() - 45) <= 126 &&
              2 * kMaxExponent <= 124);
// Gradients keep E F down to 2^-40, further than scores do: near tanh = -1, t is as small as E F.
constexpr float kGradLeast = 0x1p-15f;
static_assert(kFarRule.least_bits - 15 - 45 >= -126);

// x = kGradUnit (1 + E F). `product` is E F if exact, where E and F do not exist apart; else
// unused.
struct GradTerm {
  Vec x, product;
};

// The result is always finite, because a NaN must not reach masked pairs. A NaN of a kept pair
// reaches the gradients through dS.
template <Range kRange>
FASTATTN_SIMD GradTerm gradient_term(Vec query, Vec key) {
  if constexpr (kRange == Range::kExact) {
    const Vec exponent = min((query + key) * (2.f * kLog2e), splat(kMaxExponent));
    const Vec product = exp2_weight(exponent);
    return {product + 1.f, product};
  } else {
    return {query * key + kGradUnit<kRange>, Vec{}};
  }
}

// One dim of a pair of dims: its queries and keys, and its sums without the factor 4 w.
struct GradDim {
  const float *e, *keys;
  float *grad_e, *grad_keys;
  Vec weight;  // the sum of dS (1/2 - u)
};

// Adds to grad_keys and weight, and writes grad_e. Sums have two levels, and the sum over all pairs
// has three. The levels make the sums several times more accurate.
template <Range kRange, int kRows>
FASTATTN_SIMD void gradient_sums(GradDim (&dims)[2], int64_t stride, const float* ds, int64_t ld,
                                 int64_t cols) {
  constexpr bool kExact = kRange == Range::kExact;
  Vec query[2][kRows] = {}, weight[2] = {};
  for (int64_t c = 0, at = 0; c < cols; c += kWidth, at += stride) {
    const Vec key[2] = {load(dims[0].keys + at), load(dims[1].keys + at)};
    Vec sum[2] = {}, grad[2] = {};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec e[2] = {splat(dims[0].e[r]), splat(dims[1].e[r])};
      const GradTerm t[2] = {gradient_term<kRange>(e[0], key[0]),
                             gradient_term<kRange>(e[1], key[1])};
      const Vec reciprocal = quotient(splat(kGradUnit<kRange>), t[0].x * t[1].x);
      const Vec dsr = load(ds + r * ld + c);
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) {
        const Vec u = reciprocal * t[1 - n].x;
        const Vec g = dsr * u * (kExact ? t[n].product * u : u);
        sum[n] += dsr * (splat(0.5f) - u);
        query[n][r] += kExact ? g : g * key[n];
        grad[n] += kExact ? g : g * e[n];
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      weight[n] += sum[n];
      float* const to = dims[n].grad_keys + at;
      store(to, load(to) + (kExact ? grad[n] : grad[n] * key[n]));
    }
  }
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n) {
    dims[n].weight += weight[n];
    const Vec sums = sums_of<kRows>(query[n]);
    const Vec rows = kExact ? sums : sums * load(dims[n].e);
    std::memcpy(dims[n].grad_e, &rows, kRows * sizeof(float));
  }
}

}  // namespace fastattn::FASTATTN_ISA
