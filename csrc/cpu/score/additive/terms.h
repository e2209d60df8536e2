// The terms of an additive score, sum_d w_d tanh(q_d + k_d), laid out for the loops of
// tile.h: which dim, with which weight, and the range in which the loops are right.
//
// A term is w tanh(q + k) = w - 2 w u with u = 1 / (1 + E F), E = e^2q, F = e^2k. Its weight is
// folded into its denominator, x = c + (c E) F with c = unit / w: then w u = unit / x.
#pragma once

#include "cpu/base/exp2.h"
#include "cpu/base/scratch.h"

namespace fastattn::FASTATTN_ISA {

// ---- ranges ----
//
// Keys of a tile may be multiplied out like this if |k - c| <= key_limit for all of them (c: a
// centre per dim, subtracted from keys and added to queries). No bound on the queries is needed:
// where q + c > kSaturation + key_limit, tanh is 1 for every key of the tile, and clamping q + c
// there changes nothing but 1 - tanh(kSaturation) = 3.1e-8, half an ulp. On the other side small E
// become 0 where E F < 2^-25: x is c then, and no operand is denormal, which takes 100 times as
// long.
//
// So 1 <= 1 + E F <= 2^depth, depth = log2(1 + e^(2 (kSaturation + 2 key_limit))), and with
// weights in [2^-weight_bits, 1] every |x| lies in [unit, unit 2^(depth + weight_bits)]: the
// static_asserts say that products of as many as share a division are normal numbers, and so are
// their reciprocals. Near keys let four terms share one, far ones two; the rest take an exponential
// of q + k an element ("exact" in the code), at a sixth of the speed.
enum class Range { kNear, kFar, kExact };

struct RangeRule {
  float key_limit;
  int sharing;      // terms that share a division
  int weight_bits;  // lighter weights are a class of their own
  int unit_bits;    // unit = 2^unit_bits
  int least_bits;   // E < 2^least_bits counts as 0

  constexpr double depth() const;
  // Of E F where E counts as 0.
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

// One in 500,000 keys from a normal distribution passes the near limit, of deviation 3 one in
// 300,000 the far one. Exact tiles use the far terms.
constexpr RangeRule kNearRule = {4.75f, 4, 9, -31, -39};
constexpr RangeRule kFarRule = {14.f, 2, 16, -60, -66};
static_assert(kNearRule.holds() && kFarRule.holds() && kMaxExponent < kFarRule.depth());

// ---- terms ----

// Weights are scaled by a power of two, the heaviest to [1/2, 1). Those below 2^-weight_bits are
// scaled up by as much once more, and again, so that a product of denominators needs less range.
// Each such class is filled up to a multiple of `sharing` with the dim D, of which the caller makes
// a term with u = 1, and cut into blocks that are summed apart.
struct Terms {
  int32_t* dim;
  float* unit;         // rule.unit() / weight
  int32_t* block_end;  // per block: its last term, exclusive
  float* block_half;   // half its weights / unit, which makes the sum one of w tanh / 2
  float* block_factor;
  int64_t all, blocks;  // how many
  float scale;          // of the sum: makes it 2 log2(e) sum w tanh / 2
};

// One sum over 256 terms would double the error of the output.
constexpr int64_t kBlockTerms = 16;
constexpr int kLightestBits = 32;  // weights below 2^-32 of the heaviest count as that

FASTATTN_SIMD int64_t term_classes(const RangeRule& rule) {
  return (kLightestBits + rule.weight_bits - 1) / rule.weight_bits;
}
FASTATTN_SIMD int64_t terms_capacity(int64_t D, const RangeRule& rule) {
  return D + term_classes(rule) * (rule.sharing - 1);
}

FASTATTN_SIMD Terms make_terms(Scratch& scratch, int64_t D, const RangeRule& rule) {
  const int64_t terms = terms_capacity(D, rule);
  const int64_t blocks = terms / kBlockTerms + term_classes(rule);
  return {scratch.ints(terms),
          scratch.floats(terms),
          scratch.ints(blocks),
          scratch.floats(blocks),
          scratch.floats(blocks),
          0,
          0,
          0.f};
}

// `share` of u in the sum that makes it one of tanh: 1/2, or 1 for a term that is to vanish.
FASTATTN_SIMD void add_term(Terms& terms, int64_t d, float weight, float share, float unit) {
  const int64_t n = terms.all++;
  terms.dim[n] = static_cast<int32_t>(d);
  terms.unit[n] = unit / weight;
  terms.block_half[terms.blocks] += share * weight / unit;
}

// Ends the current block, if it has any terms.
FASTATTN_SIMD void end_block(Terms& terms, float factor) {
  const int64_t begin = terms.blocks == 0 ? 0 : terms.block_end[terms.blocks - 1];
  if (terms.all == begin) return;
  terms.block_end[terms.blocks] = static_cast<int32_t>(terms.all);
  terms.block_factor[terms.blocks] = factor;
  ++terms.blocks;
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

// The terms of one class of weights, which are in [0, 1) times 2^bits, as `weigh(d)` gives them.
template <typename Weigh>
FASTATTN_SIMD void list_class(Weigh weigh, int64_t D, int64_t c, const RangeRule& rule,
                              Terms& terms) {
  const float up = __builtin_ldexpf(1.f, static_cast<int>(c) * rule.weight_bits);
  const float lightest = __builtin_ldexpf(1.f, -rule.weight_bits);
  const bool last = c + 1 == term_classes(rule);
  const float factor = 4.f * rule.unit() / up;
  int64_t listed = 0;
  const auto add = [&](int64_t d, float weight, float share) {
    if (listed % kBlockTerms == 0) {
      end_block(terms, factor);
      terms.block_half[terms.blocks] = 0.f;
    }
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
  // Two steps, since 2^-exponent may be no float.
  const float first = __builtin_ldexpf(1.f, -exponent / 2);
  const float second = __builtin_ldexpf(1.f, -exponent - -exponent / 2);
  const auto weigh = [&](int64_t d) { return finite ? w[d] * first * second : 0.5f; };
  terms.all = terms.blocks = 0;
  for (int64_t c = 0; c < term_classes(rule); ++c) list_class(weigh, D, c, rule, terms);
  // 2^exponent may be no float either: a factor of 4 is in block_factor.
  const float power = heaviest == 0.f ? 0.f : __builtin_ldexpf(2.f * kLog2e, exponent - 2);
  terms.scale = finite ? power : heaviest;  // NaN makes every score NaN
}

}  // namespace fastattn::FASTATTN_ISA
