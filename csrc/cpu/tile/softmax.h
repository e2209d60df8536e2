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

// A sink is where the weights of a tile go. It takes kVectors vectors of a row at a time, zeros
// beyond the row's end, and uses kBits bits of each weight. Weights and their sums in RowState are
// scaled by 2^kOctaves, and are at most 2^kSlack times that. kFlushes is that of exp2_weights(). A
// sink with kKeepsScores leaves the scores, so that softmax can repeat a row. If such a sink has
// `over`, its overwriting() gets the weights of all rows at the end.
//
// This one writes them over the scores.
struct InPlace {
  static constexpr bool kKeepsScores = false;
  static constexpr Takes kTakes = Takes::kListed;
  struct Row {
    static constexpr int kVectors = 1, kBits = 24, kOctaves = 0, kSlack = 8;
    static constexpr bool kFlushes = false;
    float* s;
    FASTATTN_MEMBER void put(int64_t c, const Vec* w) const { store(s + c, *w); }
  };
  float* s;
  int64_t ld;
  FASTATTN_MEMBER Row row(int64_t i) const { return {s + i * ld}; }
};

// All columns of a row in a whole tile: of the dot product, and of all scores with AVX-512. The
// compiler knows their number, and makes a row one run of instructions. kGroup vectors of a row are
// weighed side by side.
struct WholeRow {
  static constexpr int64_t kColumns = kWidth == 16 ? 128 : 96;
  static constexpr int kGroup = kVectorRegisters == 32 ? 4 : 2;
  static constexpr int64_t count() { return kColumns / kWidth; }
  static constexpr int64_t at(int64_t n) { return n * kWidth; }
};

// Returns a vector whose lanes are maxima of parts of a row of logits. NaN is left out: it shows in
// the weights. kStores: scores become logits in place.
template <bool kStores, Masking kMasking, typename Logit, typename Taken>
FASTATTN_SIMD Vec maxima_of_row(const MaskTile::Row<kMasking> masked, Logit logit, Taken columns,
                                float* s) {
  Vec top = splat(-kInf);
  const int64_t count = columns.count();
  for (int64_t n = 0; n < count; ++n) {
    const int64_t c = columns.at(n);
    const Vec x = masked(load(s + c), logit, c);
    if constexpr (kStores && kMasking != Masking::kNone) store(s + c, x);
    top = max(x, top);
  }
  return top;
}

// The sum of a row's weights, by lanes, and a bound: its largest lane is at least the largest
// weight. The bound is the sum itself if kSlack leaves room for it, else the maximum, by lanes.
struct RowTotals {
  Vec sum, bound;
};

// Turns a row of logits into weights, and puts these into `to`. logits(c) returns the logits from
// column c on. `drop` [cols], if any, multiplies weights after they are summed.
template <int kGroup, typename Row, typename Logit, typename Logits, typename Taken>
FASTATTN_SIMD RowTotals weigh_row(const Row to, Logit logit, Logits logits, Taken columns,
                                  int64_t cols, float m, const float* drop) {
  constexpr bool kRoom = Row::kSlack >= 8;
  const int64_t count = columns.count();
  Vec sum{}, top{};
  for (int64_t n = 0; n < count; n += kGroup) {
    Vec w[kGroup];
#pragma GCC unroll 4
    for (int v = 0; v < kGroup; ++v) {
      const int64_t c = columns.at(n + v);
      w[v] = v == 0 || c < cols ? logit.exponent(logits(c) - m) : splat(-kInf);
    }
    exp2_weights<Row::kBits, Row::kFlushes, Row::kOctaves>(w);
#pragma GCC unroll 4
    for (int v = 0; v < kGroup; ++v) {
      const int64_t c = columns.at(n + v);
      sum += w[v];
      if constexpr (!kRoom) top = max(w[v], top);
      if (drop != nullptr && (v == 0 || c < cols)) w[v] *= load(drop + c);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kGroup; v += Row::kVectors) to.put(columns.at(n + v), w + v);
  }
  return {sum, kRoom ? sum : top};
}

// Raises m to the maximum of a row, the largest lane of `top`. Returns what rescales the row's
// sums.
FASTATTN_SIMD float raise_maximum(Vec top, LinearLogit logit, float* m) {
  const float old = *m;
  *m = fold(top, [](Vec a, Vec b) __attribute__((always_inline)) { return max(a, b); });
  // A row that has met no key has nothing to rescale.
  return old == -kInf ? 1.f : exp2_weight(logit.exponent(splat(old - *m)))[0];
}

template <Masking kMasking, Takes kTakes>
FASTATTN_SIMD auto columns_of(const MaskTile& mask, int64_t i, int64_t cols) {
  if constexpr (kTakes != Takes::kAll && kMasking != Masking::kNone && kMasking != Masking::kBias)
    return mask.columns<kTakes>(i, cols);
  else
    return AllColumns{cols};
}

// Calls f(columns, group). columns(i) returns the columns of row i, and `group` of their vectors
// are weighed side by side: kLeast, or more in a whole tile.
template <Masking kMasking, Takes kTakes, int kLeast, typename F>
FASTATTN_SIMD auto with_columns(const MaskTile& mask, int64_t cols, F f) {
  if constexpr (kMasking == Masking::kNone || kMasking == Masking::kBias)
    if (cols == WholeRow::kColumns)
      return f([](int64_t) { return WholeRow(); }, std::integral_constant<int, WholeRow::kGroup>{});
  const auto of_row = [&](int64_t i) __attribute__((always_inline)) {
    return columns_of<kMasking, kTakes>(mask, i, cols);
  };
  return f(of_row, std::integral_constant<int, kLeast>{});
}

// Rows [begin, end) of a tile, kWidth at most. They take each step of softmax together, so that
// what one row waits for overlaps with the work of the others.
struct Band {
  int64_t begin, end, cols;
  float* s;
  int64_t ld;
  const float* drop;  // factors of dropout [end - begin, ld_drop], or nullptr
  int64_t ld_drop;

  // A bit for each row.
  uint32_t all_rows() const { return (2u << (end - begin - 1)) - 1; }
};

// Computes the weights of those rows of a band whose bits `rows` has, and adds them to the sums if
// `adds`. Weights of a row with one above 2^kSlack are not added. Returns the bits of such rows.
// Nothing is called, so that constants are loaded once for all rows.
template <Masking kMasking, typename Logit, typename Sink>
static uint32_t weigh_band(const MaskTile& mask, const Band& band, const RowState& state,
                           Logit logit, const Sink sink, uint32_t rows, bool adds) {
  using Row = decltype(sink.row(0));
  [[maybe_unused]] constexpr float kMost = 1 << (Row::kSlack + Row::kOctaves);
  const int64_t begin = band.begin, count = band.end - begin, cols = band.cols;
  const int64_t ld = band.ld, ld_drop = band.ld_drop;
  float *const scores = band.s + begin * ld, *const sums = state.l + begin * kWidth;
  const float *const alpha = state.alpha + begin, *const drop = band.drop;
  alignas(64) float shifts[kWidth];  // maxima, but not -inf: -inf minus -inf is NaN
  store(shifts, max(load(state.m + begin), splat(-__FLT_MAX__)));
  uint32_t above = 0;
  const auto weigh = [&](auto columns, auto group) __attribute__((always_inline)) {
    for (int64_t n = 0; n < count; ++n) {
      if ((rows >> n & 1) == 0) continue;
      const auto masked = mask.row<kMasking>(begin + n);
      const float* const s = scores + n * ld;
      const auto logits = [&](int64_t c) __attribute__((always_inline)) {
        masked.prefetch_next(c);
        return Sink::kKeepsScores ? masked(load(s + c), logit, c) : load(s + c);
      };
      const RowTotals totals =
          weigh_row<group>(sink.row(begin + n), logit, logits, columns(begin + n), cols, shifts[n],
                           drop == nullptr ? nullptr : drop + n * ld_drop);
      if (Sink::kKeepsScores && any_above(totals.bound, kMost)) {
        above |= 1u << n;
      } else if (adds) {
        store(sums + n * kWidth, load(sums + n * kWidth) * alpha[n] + totals.sum);
      }
    }
  };
  with_columns<kMasking, Sink::kTakes, Row::kVectors>(mask, cols, weigh);
  return above;
}

// One step over a tile of scores s [rows, ld], which become weights.
//
// Sinks that keep the scores first try the running maximum. Only if a weight exceeds 2^kSlack do
// they search for the new maximum and repeat the row. Most rows thus never rescale their sums or
// search for a maximum. A row that has met no key searches first. So does a row whose maximum rose
// in the last tile: biases may rise from key to key. Sinks that overwrite the scores always search.
template <Masking kMasking, typename Logit, typename Sink>
FASTATTN_SIMD void softmax_rows(const MaskTile& mask, const DropoutParams& dropout,
                                const TilePlace& at, const RowState& state, Logit logit, float* s,
                                int64_t ld, float* drop, const Sink sink) {
  using Row = decltype(sink.row(0));
  constexpr bool kKeeps = Sink::kKeepsScores;
  // The second of a pair may be past the last key.
  constexpr Takes kSearched = Sink::kTakes == Takes::kAll ? Takes::kAll : Takes::kListed;
  float *const m = state.m, *const alpha = state.alpha;
  Band band = {
      0, 0, at.cols, s, ld, dropout.enabled ? drop : nullptr, round_up(at.cols, 4 * kWidth)};
  // How far a logit may exceed m before m rises. After a failed try m rises to the true maximum,
  // else the next tile would fail as well.
  const float slack = kKeeps ? 0.f : __builtin_fminf(Row::kSlack / logit.unit, __FLT_MAX__);
  // Returns what rescales the sums of row i.
  const auto search = [&](int64_t i) __attribute__((always_inline)) {
    const Vec top = with_columns<kMasking, kSearched, 1>(
        mask, at.cols, [&](auto columns, auto) __attribute__((always_inline)) {
          return maxima_of_row<!kKeeps>(mask.row<kMasking>(i), logit, columns(i), s + i * ld);
        });
    return any_above(top, m[i] + slack) ? raise_maximum(top, logit, m + i) : 1.f;
  };
  for (int64_t i0 = 0; i0 < at.rows; i0 = band.end) {
    band.begin = i0, band.end = min64(at.rows, i0 + kWidth);
    if (dropout.enabled)
      for (int64_t i = i0; i < band.end; ++i)
        dropout_row(dropout, at, i, drop + (i - i0) * band.ld_drop);
    const VecI must_search = (load(m + i0) == splat(-kInf)) | (load(alpha + i0) != splat(1.f));
    if (!kKeeps || any_lane(must_search))
      for (int64_t i = i0; i < band.end; ++i)
        alpha[i] = !kKeeps || m[i] == -kInf || alpha[i] != 1.f ? search(i) : 1.f;
    const auto weigh = [&](const auto into, uint32_t rows, bool adds) {
      return weigh_band<kMasking>(mask, band, state, logit, into, rows, adds);
    };
    if constexpr (kKeeps) {
      const uint32_t above = weigh(sink, band.all_rows(), !sink.over);
      if (above == 0 && !sink.over) continue;
      for (int64_t i = i0; i < band.end; ++i)
        if (above >> (i - i0) & 1) alpha[i] *= search(i);
      sink.over ? weigh(sink.overwriting(), band.all_rows(), true) : weigh(sink, above, true);
    } else {
      weigh(sink, band.all_rows(), true);
    }
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
