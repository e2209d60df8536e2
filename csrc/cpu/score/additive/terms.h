// The terms of an additive score, sum_d w_d tanh(q_d + k_d), laid out for the loops of tile.h: the
// dim and the weight of each term. This file also proves the range in which the loops are right.
//
// A term is w tanh(q + k) = w - 2 w u. Here u = 1 / (1 + E F), E = e^2q and F = e^2k. The
// denominator absorbs the weight: x = c + (c E) F with c = unit / w. Then w u = unit / x.
#pragma once

#include "cpu/base/exp2.h"
#include "cpu/base/scratch.h"

namespace fastattn::FASTATTN_ISA {

// A term takes as long as about so many multiply-adds of the dot product (Zen 3).
constexpr int64_t kTanhWork = 8;

// ---- ranges ----
//
// A tile may multiply E and F if |k - c| <= key_limit for all of its keys. The centre c of a dim is
// subtracted from keys and added to queries.
//
// Queries need no bound. Where q + c > kSaturation + key_limit, tanh is 1 for every key of the
// tile, so q + c is clamped there. The clamp changes tanh by at most 1 - tanh(kSaturation) =
// 3.1e-8, half an ulp. Small E become 0 where E F < 2^-25. Then x is c, and no operand is denormal:
// denormal operands take 100 times as long.
//
// So 1 <= 1 + E F <= 2^depth, depth = log2(1 + e^(2 (kSaturation + 2 key_limit))). With weights in
// [2^-weight_bits, 1], every |x| lies in [unit, unit 2^(depth + weight_bits)]. `sharing` terms
// share a division. The static_asserts prove that the product of their x is a normal number, and so
// is its reciprocal.
//
// Near keys let four terms share a division, and far keys two. Other tiles take an exponential of
// q + k per pair and dim ("exact" in the code), at a sixth of the speed.
enum class Range { kNear, kFar, kExact };

struct RangeRule {
  float key_limit;
  int sharing;      // how many terms share a division
  int weight_bits;  // weights below 2^-weight_bits go to the next class
  int unit_bits;    // unit = 2^unit_bits
  int least_bits;   // E < 2^least_bits counts as 0

  constexpr double depth() const;
  // log2 of a bound on E F where E counts as 0.
  constexpr double lost_bits() const {
    return least_bits + 2 * 1.442695041 * static_cast<double>(key_limit);
  }
  constexpr bool holds() const {
    return sharing * unit_bits >= -126 && unit_bits + least_bits >= -126 && lost_bits() <= -25 &&
           sharing * (unit_bits + depth() + weight_bits) <= 126;
  }
  FASTATTN_MEMBER float unit() const { return __builtin_ldexpf(1.f, unit_bits); }
  FASTATTN_MEMBER float least() const { return __builtin_ldexpf(1.f, least_bits); }
};

constexpr float kSaturation = 9.f;
constexpr float kMaxExponent = 40.f;  // exact: e^(2x) is clamped to 2^40, where tanh is 1 to 2e-12
constexpr double RangeRule::depth() const {
  return 2 * 1.442695041 * (kSaturation + 2 * static_cast<double>(key_limit)) + 1e-3;
}

// One in 500,000 keys from a standard normal distribution exceeds the near limit. With standard
// deviation 3, one in 300,000 exceeds the far limit. Exact tiles use the far terms.
constexpr RangeRule kNearRule = {4.75f, 4, 9, -31, -39};
constexpr RangeRule kFarRule = {14.f, 2, 16, -60, -66};
static_assert(kNearRule.holds() && kFarRule.holds() && kMaxExponent < kFarRule.depth());

// ---- terms ----

// A power of two scales all weights, so that the heaviest is in [1/2, 1). Weights below
// 2^-weight_bits form the next class, which is scaled up by 2^weight_bits more, and so on. A
// product of denominators of one class needs less range.
//
// Each class is padded to a multiple of `sharing` with the dim D, whose u the caller makes 1. Each
// class is then cut into blocks, and each block has a sum of its own.
struct Terms {
  int32_t* dim;
  float* unit;         // rule.unit() / weight
  int32_t* block_end;  // per block: one past its last term
  float* block_half;   // per block: sum of w / (2 unit); the loops subtract 1 / x = w u / unit
  float* block_factor;
  int64_t all = 0, blocks = 0;  // the number of terms and of blocks
  double half = 0.;             // of the current block, and what rounding left of those before
  float scale = 0.f;            // makes the sum 2 log2(e) sum w tanh / 2
};

// Blocks are short because one sum over 256 terms would double the error of the output.
constexpr int64_t kBlockTerms = 16;
constexpr int kLightestBits = 32;  // the classes reach down to 2^-32 or less

FASTATTN_SIMD int64_t term_classes(const RangeRule& rule) {
  return (kLightestBits + rule.weight_bits - 1) / rule.weight_bits;
}
FASTATTN_SIMD int64_t terms_capacity(int64_t D, const RangeRule& rule) {
  return D + term_classes(rule) * (rule.sharing - 1);
}

FASTATTN_SIMD Terms make_terms(Scratch& scratch, int64_t D, const RangeRule& rule) {
  const int64_t terms = terms_capacity(D, rule);
  const int64_t blocks = terms / kBlockTerms + term_classes(rule);
  return {scratch.ints(terms), scratch.floats(terms), scratch.ints(blocks), scratch.floats(blocks),
          scratch.floats(blocks)};
}

// Adds a term to the current block, as weight (share - u). `share` is 1/2, which gives tanh / 2.
// For padding, u = 1 and `share` is 1, which gives 0. Where weights are alike, roundings are alike
// too, and add up. So `half` is double, and its terms have the weight that unit[n] was rounded to.
FASTATTN_SIMD void add_term(Terms& terms, int64_t d, float weight, float share, float unit) {
  const int64_t n = terms.all++;
  terms.dim[n] = static_cast<int32_t>(d);
  terms.unit[n] = unit / weight;
  terms.half += static_cast<double>(share) / static_cast<double>(terms.unit[n]);
}

// Ends the current block, if the block has terms.
FASTATTN_SIMD void end_block(Terms& terms, float factor) {
  const int64_t begin = terms.blocks == 0 ? 0 : terms.block_end[terms.blocks - 1];
  if (terms.all == begin) return;
  const float half = static_cast<float>(terms.half);
  terms.block_end[terms.blocks] = static_cast<int32_t>(terms.all);
  terms.block_half[terms.blocks] = half;
  terms.block_factor[terms.blocks] = factor;
  terms.half -= static_cast<double>(half);
  ++terms.blocks;
}

// The largest |w|, or NaN if some weight is not finite.
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

// Lists the terms of class c. `weigh(d)` is the scaled weight of dim d, less than 1 in size. Times
// `up`, the sizes of the class are in [2^-weight_bits, 1). The last class also has all lighter
// weights, which count as 2^-weight_bits.
template <typename Weigh>
FASTATTN_SIMD void list_class(Weigh weigh, int64_t D, int64_t c, const RangeRule& rule,
                              Terms& terms) {
  const float up = __builtin_ldexpf(1.f, static_cast<int>(c) * rule.weight_bits);
  const float lightest = __builtin_ldexpf(1.f, -rule.weight_bits);
  const bool last = c + 1 == term_classes(rule);
  const float factor = 4.f * rule.unit() / up;
  int64_t listed = 0;
  terms.half = 0.;
  const auto add = [&](int64_t d, float weight, float share) {
    if (listed % kBlockTerms == 0) end_block(terms, factor);
    add_term(terms, d, weight, share, rule.unit());
    ++listed;
  };
  for (int64_t d = 0; d < D; ++d) {
    const float weight = weigh(d) * up, size = __builtin_fabsf(weight);
    if (size >= 1.f || (size < lightest && !last)) continue;
    add(d, size < lightest ? __builtin_copysignf(lightest, weight) : weight, 0.5f);
  }
  while (listed % rule.sharing != 0) add(D, lightest, 1.f);
  end_block(terms, factor);
}

[[maybe_unused]] static void list_terms(const float* w, int64_t D, const RangeRule& rule,
                                        Terms& terms) {
  const float heaviest = heaviest_weight(w, D);
  const bool finite = heaviest == heaviest;
  int exponent = 0;
  if (finite) __builtin_frexpf(heaviest, &exponent);
  // The scaling takes two steps, because 2^-exponent may not be a float.
  const float first = __builtin_ldexpf(1.f, -exponent / 2);
  const float second = __builtin_ldexpf(1.f, -exponent - -exponent / 2);
  const auto weigh = [&](int64_t d) { return finite ? w[d] * first * second : 0.5f; };
  terms.all = terms.blocks = 0;
  for (int64_t c = 0; c < term_classes(rule); ++c) list_class(weigh, D, c, rule, terms);
  // 2^exponent may not be a float either, so block_factor has a factor of 4.
  const float power = heaviest == 0.f ? 0.f : __builtin_ldexpf(2.f * kLog2e, exponent - 2);
  terms.scale = finite ? power : heaviest;  // NaN makes every score NaN
}

}  // namespace fastattn::FASTATTN_ISA
