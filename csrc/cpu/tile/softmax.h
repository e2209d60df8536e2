// Online softmax over a row block, in base 2: the state of each row, and one step for a key tile.
//
//   m' = max(m, max_j s_j)      alpha = 2^(u (m - m'))
//   w_j = 2^(u (s_j - m'))      l' = alpha l + sum_j w_j
//
// s are logits and u is their unit (masking.h). m stays as it is unless a weight would exceed
// 2^kSlack.
//
// A row that has met no key has m = -inf and l = 0. It subtracts 0 instead of m, because -inf minus
// -inf is NaN.
#pragma once

#include "cpu/base/exp2.h"
#include "cpu/tile/dropout.h"
#include "cpu/tile/gemm.h"
#include "cpu/tile/masking.h"

namespace fastattn::FASTATTN_ISA {

struct RowState {
  float* m;      // running maximum
  float* l;      // running sums, kWidth partial sums a row; lanes are added up once, at the end
  float* o;      // unnormalised output [rows, o_stride]
  float* alpha;  // what the last tile rescaled a row by
};

// The state of several row blocks, `rows` rows each.
class RowStates {
 public:
  RowStates(Scratch& scratch, int64_t members, int64_t rows, int64_t o_stride)
      : members_(members),
        vector_rows_(round_up(rows, kWidth)),
        tile_size_(row_capacity(rows) * o_stride),
        all_{scratch.floats(members * vector_rows_),
             scratch.floats(members * vector_rows_ * kWidth), scratch.floats(members * tile_size_),
             scratch.floats(members * (vector_rows_ + kWidth))} {}

  void clear() {
    fill(all_.m, members_ * vector_rows_, -kInf);
    fill(all_.l, members_ * vector_rows_ * kWidth, 0.f);
    fill(all_.o, members_ * tile_size_, 0.f);
    fill(all_.alpha, members_ * (vector_rows_ + kWidth), 1.f);
  }
  RowState member(int64_t g) const {
    return {all_.m + g * vector_rows_, all_.l + g * vector_rows_ * kWidth, all_.o + g * tile_size_,
            all_.alpha + g * (vector_rows_ + kWidth)};
  }

 private:
  int64_t members_, vector_rows_, tile_size_;
  RowState all_;
};

// Where the weights of a tile go: in place of its scores. A sink takes kVectors vectors of a row at
// a time, zeros beyond its end, and uses kBits bits of each weight. Weights and their sums in
// RowState are scaled by 2^kOctaves, and are at most 2^kSlack times that. kFlushes is that of
// exp2_weight(). kKeepsScores: row_apart() keeps the scores, so that softmax can repeat the row.
// is_in_place(): row() overwrites them.
struct InPlace {
  static constexpr int kVectors = 1, kBits = 24, kOctaves = 0, kSlack = 8;
  static constexpr bool kFlushes = false;
  static constexpr bool kKeepsScores = false;
  static constexpr bool kSkips = true;  // columns that a list lacks
  float* s;
  int64_t ld;
  FASTATTN_MEMBER InPlace row(int64_t i) const { return {s + i * ld, ld}; }
  FASTATTN_MEMBER void put(int64_t c, const Vec (&w)[1]) const { store(s + c, w[0]); }
};

// Turns a row of scores into logits, in place. Returns a vector whose lanes are maxima of parts
// of the row, without NaN: a NaN shows in the weights.
template <Masking kMasking, typename Logit, typename Taken>
FASTATTN_SIMD Vec mask_row(const MaskTile::Row<kMasking> masked, Logit logit, Taken columns,
                           float* s) {
  Vec top = splat(-kInf);
  const int64_t count = columns.count();
  for (int64_t n = 0; n < count; ++n) {
    const int64_t c = columns.at(n);
    Vec x = load(s + c);
    if constexpr (kMasking != Masking::kNone) {
      x = masked(x, logit, c);
      store(s + c, x);
    }
    top = max(x, top);
  }
  return top;
}

// Turns a row of logits into weights, and adds them to the running sums l. logits(c) returns those
// from column c on. `drop` [cols], if any, multiplies weights after they are summed.
// Returns a vector with one lane at least as large as the largest weight: partial sums if kSlack
// leaves room for them, else maxima.
template <typename Sink, typename Logit, typename Logits, typename Taken>
FASTATTN_SIMD Vec weigh_row(const Sink sink, Logit logit, Logits logits, Taken columns,
                            int64_t cols, float m, float alpha, const float* drop, float* l) {
  constexpr bool kRoom = Sink::kSlack >= 8;
  const int64_t count = columns.count();
  Vec sum{}, top{};
#pragma GCC unroll 2
  for (int64_t n = 0; n < count; n += Sink::kVectors) {
    const int64_t c = columns.at(n);
    Vec w[Sink::kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < Sink::kVectors; ++v) {
      const int64_t at = c + v * kWidth;
      w[v] = v == 0 || at < cols ? exp2_weight<Sink::kBits, Sink::kFlushes, Sink::kOctaves>(
                                       logit.exponent(logits(at) - m))
                                 : Vec{};
      sum += w[v];
      if constexpr (!kRoom) top = max(w[v], top);
      if (drop != nullptr && at < cols) w[v] *= load(drop + at);
    }
    sink.put(c, w);
  }
  store(l, load(l) * alpha + sum);
  return kRoom ? sum : top;
}

// Raises m to the maximum of a row, the largest lane of `top`. Returns what rescales the row's
// sums.
FASTATTN_SIMD float raise_maximum(Vec top, LinearLogit logit, float* m) {
  const float old = *m;
  *m = fold(top, [](Vec a, Vec b) __attribute__((always_inline)) { return max(a, b); });
  // A row that has met no key has nothing to rescale.
  return old == -kInf ? 1.f : exp2_weight(logit.exponent(splat(old - *m)))[0];
}

template <Masking kMasking, typename Sink>
FASTATTN_SIMD auto columns_of(const MaskTile& mask, int64_t i, int64_t cols) {
  if constexpr (Sink::kSkips && kMasking != Masking::kNone && kMasking != Masking::kBias)
    return mask.columns(i, cols);
  else
    return AllColumns{cols};
}

// One step over a tile of scores s [rows, ld], which become weights.
//
// Softmax first tries the running maximum. Only if a weight exceeds 2^kSlack does it search for the
// new maximum and repeat the row. Most rows thus never rescale their sums or search for a maximum.
// A row whose maximum rose in the last tile searches first: biases may rise from key to key. Sinks
// that overwrite the scores always search first.
template <Masking kMasking, typename Logit, typename Sink>
FASTATTN_SIMD void softmax_rows(const MaskTile& mask, const DropoutParams& dropout,
                                const TilePlace& at, const RowState& state, Logit logit, float* s,
                                int64_t ld, float* drop, const Sink& sink) {
  using Row = decltype(sink.row(0));
  float* const alpha = state.alpha;
  // After a failed try, m rises to the true maximum, else the next tile would fail as well.
  const float slack =
      Sink::kKeepsScores ? 0.f : __builtin_fminf(Row::kSlack / logit.unit, __FLT_MAX__);
  for (int64_t i = 0; i < at.rows; ++i) {
    float *const row = s + i * ld, *const l = state.l + i * kWidth, *const m = state.m + i;
    if (dropout.enabled) dropout_row(dropout, at, i, drop);
    const float* const factors = dropout.enabled ? drop : nullptr;
    const auto columns = columns_of<kMasking, Sink>(mask, i, at.cols);
    const auto masked = mask.row<kMasking>(i);
    [[maybe_unused]] constexpr float kMost = 1 << (Row::kSlack + Row::kOctaves);
    if constexpr (Sink::kKeepsScores) {
      const Vec before = load(l);
      const auto logits = [&](int64_t c) __attribute__((always_inline)) {
        return masked(load(row + c), logit, c);
      };
      const auto weigh = [&](const Row& to) __attribute__((always_inline)) {
        return weigh_row(to, logit, logits, columns, at.cols, *m, 1.f, factors, l);
      };
      const bool rises = alpha[i] != 1.f;
      if (*m != -kInf && !rises && !any_above(weigh(sink.row_apart(i)), kMost)) {
        alpha[i] = 1.f;
        if (sink.is_in_place()) store(l, before), weigh(sink.row(i));
        continue;
      }
      store(l, before);
    }
    const Vec top = mask_row<kMasking>(masked, logit, columns, row);
    alpha[i] = any_above(top, *m + slack) ? raise_maximum(top, logit, m) : 1.f;
    const auto logits = [&](int64_t c) __attribute__((always_inline)) { return load(row + c); };
    weigh_row(sink.row(i), logit, logits, columns, at.cols, *m == -kInf ? 0.f : *m, alpha[i],
              factors, l);
  }
}

// Likewise, in place.
FASTATTN_SHARED void softmax_step(const MaskTile& mask, const DropoutParams& dropout,
                                  const TilePlace& at, const RowState& state, LinearLogit logit,
                                  float* s, int64_t ld, float* drop);

#ifdef FASTATTN_SHARED_CODE
FASTATTN_SHARED void softmax_step(const MaskTile& mask, const DropoutParams& dropout,
                                  const TilePlace& at, const RowState& state, LinearLogit logit,
                                  float* s, int64_t ld, float* drop) {
  mask.with_masking([&](auto masking) {
    softmax_rows<masking>(mask, dropout, at, state, logit, s, ld, drop, InPlace{s, ld});
  });
}
#endif  // FASTATTN_SHARED_CODE

// ---- what is saved of a row, and weights recomputed from it ----

// The weight of logit s is 2^(u (s - shift)) * factor: the maximum and 1 / sum, both 0 if a row met
// no key. One log-sum-exp would not be enough. Rounded to fp32, an ordinary one of 10 puts the same
// 4 ulp of error on every weight of its row. One of 1e30 has no bits left for the sum.
struct RowStats {
  float shift, factor;
  float most;  // largest exponent, except for rounding: weights are at most 1
};

FASTATTN_SIMD RowStats row_stats(float m, float l) {
  return l == 0.f ? RowStats{0.f, 0.f, 0.f} : RowStats{m, 1.f / l, 0.f};
}

FASTATTN_SIMD RowStats load_stats(const LogitUnits& units, const float* stats, int64_t row) {
  const float factor = stats[2 * row + 1];
  return {stats[2 * row] / units.saved, factor,
          static_cast<float>(min64(126, 1 - exponent_of(factor)))};
}
FASTATTN_SIMD void store_stats(const RowStats& from, const LogitUnits& units, int64_t row,
                               float* stats) {
  stats[2 * row] = from.shift * units.saved;
  stats[2 * row + 1] = from.factor;
}

FASTATTN_SIMD float natural_lse(const LogitUnits& units, float m, float l) {
  return l == 0.f ? -kInf : static_cast<float>(m * units.natural + __builtin_log(l));
}

// The weight of a masked logit: exactly 0 where s is -inf, even if the row's sum is NaN. The
// exponent is bounded, because scores summed in another order may exceed a huge maximum by a lot.
FASTATTN_SIMD Vec known_weight(Vec s, LinearLogit logit, const RowStats& row) {
  const Vec w = exp2_weight(min(splat(row.most), logit.exponent(s - row.shift))) * row.factor;
  return s == splat(-kInf) ? Vec{} : w;
}

}  // namespace fastattn::FASTATTN_ISA
