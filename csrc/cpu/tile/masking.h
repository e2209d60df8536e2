// The mask and the bias of a tile of scores.
//
// A tile is empty (nothing of it is read), or full (no mask code runs). Others have an interval of
// keys per row, or an addend. The addend is the bias, and -inf where a pair is masked. A mask
// selects -inf and never adds it to NaN, so garbage behind it stays there. A bias that masks
// nothing, and a dense mask alone, are read where they lie.
#pragma once

#include "cpu/base/exp2.h"
#include "cpu/base/pack.h"
#include "cpu/tile/strips.h"
#include "problem/mask.h"

namespace fastattn::FASTATTN_ISA {

// The steps from a score to its logit, before the mask, and from the logit to its weight. Without a
// bias, the logit is the score itself. With a bias, it is natural: rounded once, as a sum.
//
// A weight is 2^(unit (logit - maximum)). The difference of two logits comes first: it is exact
// where a weight counts, however large the logits are. Every sweep takes these steps, so backward
// recomputes exactly the weights that forward summed.
//
// Both steps are linear. A curve takes the scores' place first, tile by tile (curve_scores()).
struct LinearLogit {
  float scale;  // of a score that a bias is added to; 1 in a problem without a bias
  float unit;   // above 0
  FASTATTN_MEMBER Vec operator()(Vec s, Vec addend) const {
    return multiply_add(s, splat(scale), addend);
  }
  FASTATTN_MEMBER Vec exponent(Vec difference) const { return difference * unit; }
  // The gradient of the scaled score (i, c), from dS, the gradient of the logit.
  FASTATTN_MEMBER Vec slope(int64_t, int64_t, Vec ds) const { return ds; }
};

// Likewise of what a curve makes of a score: under a softcap, tanh(score / softcap).
struct CurvedLogit : LinearLogit {
  const float* slopes;  // [rows, ld]
  int64_t ld;
  FASTATTN_MEMBER Vec slope(int64_t i, int64_t c, Vec ds) const {
    return ds * load(slopes + i * ld + c);
  }
};

// Calls f with the logit of a tile that curve_scores() has seen.
template <typename F>
FASTATTN_SIMD void with_logit(LinearLogit logit, const float* slopes, int64_t ld, F f) {
  slopes == nullptr ? f(logit) : f(CurvedLogit{logit, slopes, ld});
}

// What a logit is, in a problem.
struct LogitUnits {
  LinearLogit linear;
  double natural;  // how much 1 of a logit is in the exponent of e
  float saved;     // what is saved of a maximum of 1, a power of 2: the same for every kernel
  float ratio;     // score / softcap of a score of 1, or 0
  bool half;       // whether tensors are of a half type
};

// `scale`: the natural logit of a score of 1; `own`: a factor of this kernel's scores, a power
// of 2.
FASTATTN_SHARED LogitUnits logit_units(const AttentionParams& p, double scale, float own);

// Scores s [rows, ld] become tanh(score / softcap), if there is a softcap. Writes the slopes of
// tanh if there is a place for them. The slope of NaN is 1: such a pair may be masked, where a
// gradient of 0 must stay 0. Half types have fewer bits of both: every pass has the same.
FASTATTN_SHARED void curve_scores(const LogitUnits& units, int64_t rows, int64_t cols, int64_t ld,
                                  float* s, float* slopes);

// How the scores of a tile are masked. kNone, kIntervals and kDense add no bias: a problem with a
// bias has none of these.
enum class Masking { kNone, kBias, kBiasInside, kIntervals, kDense, kAddend };

// All bits set where a dense mask, read from here on, drops a key; else none.
FASTATTN_SIMD VecI dropped_by(const uint8_t* kept) {
  return widen(load_lanes<VecBytes>(kept)) == 0;
}

class MaskTile {
 public:
  MaskTile(const AttentionParams& p, Scratch& scratch, int64_t block_m, int64_t block_n)
      : p_(p),
        block_n_(block_n),
        strips_(scratch, block_m, block_n),
        begin_(scratch.ints(block_m)),
        end_(scratch.ints(block_m)) {
    has_addend_ = p.bias.data != nullptr || has_dense(p.mask);
    addend_ = has_addend_ ? scratch.floats(block_m * block_n) : nullptr;
  }

  // Selects query rows [i0, i0 + rows) of head h.
  void set_rows(int64_t b, int64_t h, int64_t i0, int64_t rows);
  void set_rows(int64_t b, int64_t h, int64_t i0, int64_t rows, KeyRange range) {
    b_ = b, h_ = h, i0_ = i0, rows_ = rows;
    range_ = range;
  }

  // Keys outside this interval are masked for every row.
  KeyRange range() const { return range_; }

  // Selects keys [j0, j0 + cols). Returns how many matter; every pair after them is masked. The
  // result is 0 (an empty tile), cols, or a multiple of kWidth. The caller may also use any such
  // number between the result and cols.
  int64_t set_keys(int64_t j0, int64_t cols);

  // Keys of the tile. What masks lie in ends there.
  int64_t cols() const { return cols_; }

  // Whether some pair of the tile is masked.
  bool masked() const { return masked_; }

  // Lists the columns that strips of rows keep, if that saves enough. Whoever calls it then takes
  // no others: sparse().
  void find_strips();
  bool sparse() const { return sparse_; }
  const Strips& strips() const { return strips_; }
  const Strips* lists() const { return sparse_ ? &strips_ : nullptr; }
  // The columns of row i that softmax takes.
  template <Takes kTakes>
  Columns columns(int64_t i, int64_t cols) const {
    if (!sparse_) return strips_.every(cols);
    return kTakes == Takes::kPairs ? strips_.pairs_of_row(i) : strips_.of_row(i);
  }

  // Calls f with the tile's Masking as a compile-time constant.
  template <typename F>
  FASTATTN_MEMBER void with_masking(F f) const {
    switch (masking_) {
      case Masking::kNone:
        return f(std::integral_constant<Masking, Masking::kNone>{});
      case Masking::kBias:
        return f(std::integral_constant<Masking, Masking::kBias>{});
      case Masking::kBiasInside:
        return f(std::integral_constant<Masking, Masking::kBiasInside>{});
      case Masking::kIntervals:
        return f(std::integral_constant<Masking, Masking::kIntervals>{});
      case Masking::kDense:
        return f(std::integral_constant<Masking, Masking::kDense>{});
      case Masking::kAddend:
        return f(std::integral_constant<Masking, Masking::kAddend>{});
    }
  }

  // What the loops over a row need. They hold it by value: a store may change members.
  template <Masking kMasking>
  struct Row {
    const float *addend, *next;  // of this row, and of one that is prefetched
    const uint8_t* kept;
    int32_t begin, end;

    // The logits of columns [c, c + kWidth), from their scores. They are -inf where masked or past
    // the last key; elsewhere the bias is added.
    template <typename Logit>
    FASTATTN_MEMBER Vec operator()(Vec s, Logit logit, int64_t c) const {
      if constexpr (kMasking == Masking::kIntervals) {
        return inside(c) ? s : splat(-kInf);
      } else if constexpr (kMasking == Masking::kDense) {
        return dropped_by(kept + c) ? splat(-kInf) : s;
      } else if constexpr (kMasking == Masking::kBias) {
        return logit(s, load(addend + c));
      } else if constexpr (kMasking == Masking::kBiasInside) {
        return inside(c) ? logit(s, load(addend + c)) : splat(-kInf);
      } else if constexpr (kMasking == Masking::kAddend) {
        const Vec own = load(addend + c);
        return own == splat(-kInf) ? own : logit(s, own);
      } else {
        return s;
      }
    }
    // All bits set where the row keeps the columns [c, c + kWidth), else none.
    FASTATTN_MEMBER VecI keeps(int64_t c) const {
      return (*this)(Vec{}, [](Vec s, Vec) { return s; }, c) == Vec{};
    }
    // For loops that compute: many prefetches at once would hold up the loads behind them.
    FASTATTN_MEMBER void prefetch_next([[maybe_unused]] int64_t c) const {
      if constexpr (kMasking == Masking::kBias) __builtin_prefetch(next + c, 0, 2);
    }
    FASTATTN_MEMBER VecI inside(int64_t c) const {
      const VecI j = iota() + static_cast<int32_t>(c);
      return (j >= begin) & (j < end);
    }
  };
  template <Masking kMasking>
  FASTATTN_MEMBER Row<kMasking> row(int64_t i) const {
    constexpr bool kInside = kMasking == Masking::kIntervals || kMasking == Masking::kBiasInside;
    Row<kMasking> row = {};
    if constexpr (kMasking == Masking::kAddend) row.addend = addend_ + i * pair_stride_;
    if constexpr (kMasking == Masking::kDense) row.kept = kept_ + i * pair_stride_;
    if constexpr (kMasking == Masking::kBias || kMasking == Masking::kBiasInside)
      row.addend = bias_ + i * bias_stride_;
    if constexpr (kMasking == Masking::kBias) row.next = row.addend + rows_ * bias_stride_;
    if constexpr (kInside) row.begin = begin_[i], row.end = end_[i];
    return row;
  }

  // Whether some kept pair (i, j) has row(i) or key(j).
  template <typename Row, typename Key>
  bool keeps_any(Row row, Key key) const {
    for (int64_t i = 0; i < rows_; ++i)
      for (int64_t c = 0; c < cols_; ++c)
        if ((row(i) || key(c)) && keeps(i, c)) return true;
    return false;
  }

  // Whether the pair of row i and key c of the tile is kept.
  bool keeps(int64_t i, int64_t c) const {
    if (masking_ == Masking::kAddend) return addend_[i * pair_stride_ + c] != -kInf;
    if (masking_ == Masking::kDense) return kept_[i * pair_stride_ + c] != 0;
    return !masked_ || (c >= begin_[i] && c < end_[i]);
  }
  // The same of element (r, k) of a matrix of pairs, by rows or transposed.
  FASTATTN_MEMBER bool keeps(ByRows, int64_t r, int64_t k) const { return keeps(r, k); }
  FASTATTN_MEMBER bool keeps(ByCols, int64_t r, int64_t k) const { return keeps(k, r); }

  // Whether some row keeps key c of the tile.
  bool keeps_key(int64_t c) const;

 private:
  // Those without a body here are in find_masking.h, and nobody but its functions calls them.
  // Of the rows [i0, i1), which are a strip. They return how many vectors are listed.
  inline int64_t list_intervals(int64_t i0, int64_t i1);
  inline int64_t list_kept(int64_t i0, int64_t i1);

  // Sets per-row intervals relative to the tile. Returns where the last one ends, in whole vectors.
  inline int64_t set_intervals();

  // Whether the addend is only a bias that can be read where it lies, and is finite. Absolute
  // values are compared as integers, where infinities and NaN are the largest.
  inline bool look_at_plain_bias();

  // How much of the tile the dense mask keeps. Most tiles of a block mask are all kept or all
  // dropped. This check takes fewer steps than building an addend.
  enum class Kept { kNone, kSome, kAll };
  inline Kept kept_by_mask() const;

  // Whether the dense mask can be read where it lies, and nothing else masks the tile.
  inline bool look_at_plain_mask();

  // Folds bias, dense mask and intervals into the addend, and finds the kind of the tile.
  inline int64_t build_addend(int64_t in_interval);

  // Whether one of the rows [i0, i1) keeps a column of [c, c + kWidth), by addend or dense mask.
  inline bool keeps_some(int64_t i0, int64_t i1, int64_t c) const;

  // Drops trailing vectors of columns that are masked in all rows.
  inline int64_t last_kept(int64_t cols) const;

  inline void put_bias(int64_t i, float* to) const;

  // A NaN that rounding to 16 bits keeps: see words_of().
  FASTATTN_MEMBER static Vec canonical(Vec x) { return x == x ? x : splat(__builtin_nanf("")); }

  // -inf where the dense mask drops a key; elsewhere 0, or (kOver) the value already there.
  template <bool kOver>
  inline void put_keep(int64_t i, float* to) const;

  inline void put_interval(int64_t i, float* to) const;

  // Of all rows of an addend: lanes that no vector keeps, that some pair lacks, and bits of biases.
  struct Seen {
    VecI dropped, masked, biased;
  };
  inline Seen look(const float* row, Seen seen) const;

  const AttentionParams& p_;
  int64_t block_n_;
  bool has_addend_, masked_ = false, sparse_ = false;
  Masking masking_ = Masking::kNone;
  int64_t b_ = 0, h_ = 0, i0_ = 0, rows_ = 0, j0_ = 0, cols_ = 0, bias_stride_ = 0;
  int64_t pair_stride_ = 0;  // of rows of the addend or the dense mask; 0 if all are alike
  KeyRange range_{};
  Strips strips_;
  int32_t *begin_, *end_;
  float* addend_;
  const float* bias_ = nullptr;
  const uint8_t* kept_ = nullptr;
};

// The keys that each row block of a batch entry keeps. Backward meets a block again with every tile
// of keys. Limits that vary by row are then read once a task, and not once a tile.
class RowRanges {
 public:
  RowRanges(const AttentionParams& p, Scratch& scratch, int64_t block_m)
      : p_(p), block_m_(block_m), of_block_(scratch.of<KeyRange>(ceil_div(p.M, block_m))) {}

  void use(int64_t b);

  KeyRange of_block(int64_t block) const { return of_block_[block]; }
  // The union, as an interval.
  KeyRange all() const { return all_; }

 private:
  const AttentionParams& p_;
  int64_t block_m_, b_ = -1;
  KeyRange all_{};
  KeyRange* of_block_;
};

}  // namespace fastattn::FASTATTN_ISA
