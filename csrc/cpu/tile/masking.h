// The mask and the bias of a tile of scores.
//
// A tile is empty (nothing of it is read) or full (no mask code runs), or it has an interval of
// keys per row, or an addend. The addend is the bias, and -inf where a pair is masked. A mask
// selects -inf and never adds it to NaN, so garbage behind it stays there. A bias that masks
// nothing is read where it lies.
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
// Both steps are linear. A softcap makes ratios of scores first, tile by tile (cap_scores()).
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

// Likewise of t = tanh(score / softcap), which stands where its score did.
struct CappedLogit : LinearLogit {
  const float* slopes;  // [rows, ld]
  int64_t ld;
  FASTATTN_MEMBER Vec slope(int64_t i, int64_t c, Vec ds) const {
    return ds * load(slopes + i * ld + c);
  }
};

// Calls f with the logit of a tile that cap_scores() has seen.
template <typename F>
FASTATTN_SIMD void with_logit(LinearLogit logit, const float* slopes, int64_t ld, F f) {
  slopes == nullptr ? f(logit) : f(CappedLogit{logit, slopes, ld});
}

// What a logit is, in a problem.
struct LogitUnits {
  LinearLogit linear;
  double natural;  // how much 1 of a logit is in the exponent of e
  float saved;     // what is saved of a maximum of 1, a power of 2: the same for every kernel
  float ratio;     // score / softcap of a score of 1, or 0
};

// `scale`: the natural logit of a score of 1; `own`: a factor of this kernel's scores, a power
// of 2.
[[maybe_unused]] static LogitUnits logit_units(const AttentionParams& p, double scale, float own) {
  constexpr double kLog2eExact = 1.4426950408889634, kLeast = __FLT_MIN__, kMost = __FLT_MAX__;
  const bool capped = p.softcap != 0.f, biased = p.bias.data != nullptr;
  const double cap = static_cast<double>(p.softcap);
  const double natural = capped ? cap : scale / static_cast<double>(own);
  const double ratio = scale / static_cast<double>(own) / cap;
  // A unit of 0 would make NaN of -inf, a ratio of 0 would be none, and an infinite one NaN of 0.
  const double unit = (natural < kLeast ? kLeast : natural) * kLog2eExact;
  return {biased ? LinearLogit{static_cast<float>(natural), kLog2e}
                 : LinearLogit{1.f, static_cast<float>(unit)},
          biased ? 1. : natural, biased || capped ? 1.f : 1.f / own,
          capped ? static_cast<float>(ratio < kLeast  ? kLeast
                                      : ratio < kMost ? ratio
                                                      : kMost)
                 : 0.f};
}

// Scores s [rows, ld] become tanh(score / softcap), if there is a softcap. Writes the slopes of
// tanh if there is a place for them. The slope of NaN is 1: such a pair may be masked, where a
// gradient of 0 must stay 0.
[[maybe_unused]] __attribute__((noinline)) static void cap_scores(const LogitUnits& units,
                                                                  int64_t rows, int64_t cols,
                                                                  int64_t ld, float* s,
                                                                  float* slopes) {
  if (units.ratio == 0.f) return;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t at = i * ld; at < i * ld + cols; at += kWidth) {
      const TanhAndSlope of = tanh_and_slope(product(load(s + at), splat(units.ratio)));
      if (slopes != nullptr) store(slopes + at, min(of.slope, splat(1.f)));  // 1 of NaN
      store(s + at, of.tanh);
    }
}

// How the scores of a tile are masked. kNone and kIntervals add no bias: a problem with a bias has
// neither.
enum class Masking { kNone, kBias, kBiasInside, kIntervals, kAddend };

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
  void set_rows(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    set_rows(b, h, i0, rows, tile_range(p_.mask, p_.N, b, i0, i0 + rows));
  }
  void set_rows(int64_t b, int64_t h, int64_t i0, int64_t rows, KeyRange range) {
    b_ = b, h_ = h, i0_ = i0, rows_ = rows;
    range_ = range;
  }

  // Keys outside this interval are masked for every row.
  KeyRange range() const { return range_; }

  // Selects keys [j0, j0 + cols). Returns how many matter; every pair after them is masked. The
  // result is 0 (an empty tile), cols, or a multiple of kWidth. The caller may also use any such
  // number between the result and cols.
  int64_t set_keys(int64_t j0, int64_t cols) {
    sparse_ = false;
    if (range_.begin >= j0 + cols || range_.end <= j0) return 0;
    j0_ = j0, cols_ = cols;
    const int64_t in_interval = set_intervals();
    if (in_interval == 0) return 0;
    masking_ = masked_ || cols % kWidth != 0 ? Masking::kIntervals : Masking::kNone;
    if (!has_addend_) return in_interval;
    if (p_.bias.data != nullptr)
      return look_at_plain_bias() ? in_interval : build_addend(in_interval);
    const Kept kept = kept_by_mask();
    if (kept == Kept::kNone) return 0;
    return kept == Kept::kAll ? in_interval : build_addend(in_interval);
  }

  // Whether some pair of the tile is masked.
  bool masked() const { return masked_; }

  // Lists the columns that strips of rows keep, if that saves enough. Whoever calls it then takes
  // no others: sparse().
  void find_strips() {
    if (!masked_ || (masking_ == Masking::kAddend && addend_stride_ == 0)) return;
    int64_t listed = 0, all = 0;
    for (int64_t i = 0; i < rows_; i += kStripRows) {
      const int64_t end = min64(rows_, i + kStripRows);
      listed += masking_ == Masking::kAddend ? list_addend(i, end) : list_intervals(i, end);
      all += AllColumns{cols_}.count();
    }
    sparse_ = 8 * listed <= 7 * all;
  }
  bool sparse() const { return sparse_; }
  const Strips& strips() const { return strips_; }
  // The columns of row i that softmax takes.
  Columns columns(int64_t i, int64_t cols) const {
    return sparse_ ? strips_.of_row(i) : strips_.every(cols);
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
      case Masking::kAddend:
        return f(std::integral_constant<Masking, Masking::kAddend>{});
    }
  }

  // The logits of row i, columns [c, c + kWidth), from their scores. They are -inf where masked or
  // past the last key; elsewhere the bias is added.
  template <Masking kMasking, typename Logit>
  FASTATTN_MEMBER Vec apply(Vec s, Logit logit, int64_t i, int64_t c) const {
    if constexpr (kMasking == Masking::kIntervals) {
      return inside(i, c) ? s : splat(-kInf);
    } else if constexpr (kMasking == Masking::kBias) {
      // The rows after these come next, and arrive while these are computed.
      __builtin_prefetch(bias_ + (i + rows_) * bias_stride_ + c, 0, 2);
      return logit(s, plain_bias(i, c));
    } else if constexpr (kMasking == Masking::kBiasInside) {
      return inside(i, c) ? logit(s, plain_bias(i, c)) : splat(-kInf);
    } else if constexpr (kMasking == Masking::kAddend) {
      const Vec addend = load(addend_ + i * addend_stride_ + c);
      return addend == splat(-kInf) ? addend : logit(s, addend);
    } else {
      return s;
    }
  }

  // Whether some kept pair (i, j) has row(i) or key(j).
  template <typename Row, typename Key>
  bool keeps_any(Row row, Key key) const {
    for (int64_t i = 0; i < rows_; ++i)
      for (int64_t c = 0; c < cols_; ++c)
        if ((row(i) || key(c)) && keeps(i, c)) return true;
    return false;
  }

  // Whether some row keeps key c of the tile.
  bool keeps_key(int64_t c) const {
    if (!masked_) return true;
    for (int64_t i = 0; i < rows_; ++i)
      if (keeps(i, c)) return true;
    return false;
  }

 private:
  bool keeps(int64_t i, int64_t c) const {
    if (masking_ == Masking::kAddend) return addend_[i * addend_stride_ + c] != -kInf;
    return !masked_ || (c >= begin_[i] && c < end_[i]);
  }

  // Of a tile whose bias is read where it lies.
  FASTATTN_MEMBER Vec plain_bias(int64_t i, int64_t c) const {
    return load(bias_ + i * bias_stride_ + c);
  }

  // Of the rows [i0, i1), which are a strip. They return how many vectors are listed.
  int64_t list_intervals(int64_t i0, int64_t i1) {
    int32_t begin = static_cast<int32_t>(cols_), end = 0;
    for (int64_t i = i0; i < i1; ++i) {
      if (begin_[i] >= end_[i]) continue;
      begin = begin_[i] < begin ? begin_[i] : begin;
      end = end_[i] > end ? end_[i] : end;
    }
    return strips_.fill(i0 / kStripRows, begin, end, [](int64_t) { return true; });
  }
  int64_t list_addend(int64_t i0, int64_t i1) {
    return strips_.fill(i0 / kStripRows, 0, cols_, [&](int64_t c) {
      VecI kept{};
      for (int64_t i = i0; i < i1; ++i)
        kept |= load(addend_ + i * addend_stride_ + c) != splat(-kInf);
      return any_lane(kept);
    });
  }

  FASTATTN_MEMBER VecI inside(int64_t i, int64_t c) const {
    const VecI j = iota() + static_cast<int32_t>(c);
    return (j >= begin_[i]) & (j < end_[i]);
  }

  // Sets per-row intervals relative to the tile. Returns where the last one ends, in whole vectors.
  int64_t set_intervals() {
    masked_ = false;
    if (intervals_hold(p_.mask, p_.N, b_, i0_, i0_ + rows_, j0_, j0_ + cols_)) {
      for (int64_t i = 0; i < rows_; ++i) begin_[i] = 0, end_[i] = static_cast<int32_t>(cols_);
      return cols_;
    }
    int64_t last = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      const KeyRange row = row_range(p_.mask, p_.N, b_, i0_ + i);
      const int64_t begin = max64(0, min64(row.begin - j0_, cols_)),
                    end = max64(0, min64(row.end - j0_, cols_));
      begin_[i] = static_cast<int32_t>(begin);
      end_[i] = static_cast<int32_t>(end);
      if (begin < end) last = max64(last, end);
      masked_ |= begin > 0 || end < cols_;
    }
    return min64(cols_, round_up(last, kWidth));
  }

  // Whether the addend is only a bias that can be read where it lies, and is finite. Absolute
  // values are compared as integers, where infinities and NaN are the largest.
  bool look_at_plain_bias() {
    const View& bias = p_.bias;
    if (has_dense(p_.mask) || cols_ % kWidth != 0) return false;
    if (bias.dtype != DType::kFloat32 || bias.stride_c != 1) return false;
    bias_ = static_cast<const float*>(bias.data) + b_ * bias.stride_b + h_ * bias.stride_h +
            i0_ * bias.stride_r + j0_;
    bias_stride_ = bias.stride_r;
    // Rows of a line share all but one element each.
    const bool line = p_.bias_is_line;
    const float* const first = line ? bias_ - (rows_ - 1) : bias_;
    const int64_t rows = line || bias.stride_r == 0 ? 1 : rows_;
    const int64_t cols = line ? rows_ - 1 + cols_ : cols_;
    VecI most{};
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = 0; c < cols; c += kWidth) {
        const float* const at = first + i * bias.stride_r + min64(c, cols - kWidth);
        const VecI size = bits_of(abs(load(at)));
        most = size > most ? size : most;
      }
    if (any_lane(most > bits_of(splat(__FLT_MAX__)))) return false;
    masking_ = masked_ ? Masking::kBiasInside : Masking::kBias;
    return true;
  }

  // How much of the tile the dense mask keeps. Most tiles of a block mask are all kept or all
  // dropped. This check costs a sixth of building an addend.
  enum class Kept { kNone, kSome, kAll };
  Kept kept_by_mask() const {
    const DenseMask dense = dense_from(p_.mask, b_, h_, i0_, j0_);
    if (dense.stride_n != 1 || cols_ % kWidth != 0) return Kept::kSome;
    const uint8_t* const from = dense.data + dense.offset;
    VecBytes any{}, dropped{};
    for (int64_t i = 0; i < (dense.stride_m == 0 ? 1 : rows_); ++i)
      for (int64_t c = 0; c < cols_; c += kWidth) {
        const auto bytes = load_lanes<VecBytes>(from + i * dense.stride_m + c);
        any |= bytes;
        dropped |= bytes == 0;
      }
    const auto set = [](VecBytes x) { return any_lane(__builtin_convertvector(x != 0, VecI)); };
    return !set(any) ? Kept::kNone : set(dropped) ? Kept::kSome : Kept::kAll;
  }

  // Folds bias, dense mask and intervals into the addend, and finds the kind of the tile.
  int64_t build_addend(int64_t in_interval) {
    const bool one_row = !dense_varies_by_row(p_.mask) &&
                         (p_.bias.data == nullptr || p_.bias.stride_r == 0) && !masked_;
    addend_stride_ = one_row ? 0 : block_n_;
    Seen seen{};
    for (int64_t i = 0; i < (one_row ? 1 : rows_); ++i) {
      float* const row = addend_ + i * addend_stride_;
      if (p_.bias.data != nullptr) put_bias(i, row);
      if (has_dense(p_.mask))
        p_.bias.data == nullptr ? put_keep<false>(i, row) : put_keep<true>(i, row);
      if (begin_[i] > 0 || end_[i] < round_up(cols_, kWidth)) put_interval(i, row);
      look(row, seen);
    }
    if (!any_lane(seen.kept)) return 0;
    masked_ = any_lane(seen.masked);
    const bool plain = !masked_ && !any_lane(seen.biased) && cols_ % kWidth == 0;
    masking_ = !plain                    ? Masking::kAddend
               : p_.bias.data == nullptr ? Masking::kNone
                                         : Masking::kBias;
    bias_ = addend_, bias_stride_ = 0;  // a plain one is all zeros
    return last_kept(in_interval, one_row ? 1 : rows_);
  }

  // Drops trailing vectors of columns that are masked in all rows.
  int64_t last_kept(int64_t cols, int64_t rows) const {
    for (int64_t c = (cols - 1) / kWidth * kWidth; c > 0; c -= kWidth)
      for (int64_t i = 0; i < rows; ++i)
        if (any_lane(load(addend_ + i * addend_stride_ + c) != splat(-kInf)))
          return min64(cols, c + kWidth);
    return min64(cols, kWidth);
  }

  void put_bias(int64_t i, float* to) const {
    const View& bias = p_.bias;
    const int64_t row =
        b_ * bias.stride_b + h_ * bias.stride_h + (i0_ + i) * bias.stride_r + j0_ * bias.stride_c;
    with_dtype(bias.dtype, [&](auto type) {
      for (int64_t c = 0; c < cols_; c += kWidth)
        store(to + c, canonical(load_strided<type>(bias.data, row + c * bias.stride_c,
                                                   bias.stride_c, cols_ - c)));
    });
  }

  // A NaN that rounding to 16 bits keeps: see words_of().
  FASTATTN_MEMBER static Vec canonical(Vec x) { return x == x ? x : splat(__builtin_nanf("")); }

  // -inf where the dense mask drops a key; elsewhere 0, or (kOver) the value already there.
  template <bool kOver>
  void put_keep(int64_t i, float* to) const {
    const DenseMask dense = dense_from(p_.mask, b_, h_, i0_ + i, j0_);
    const uint8_t* const from = dense.data + dense.offset;
    const int64_t whole = dense.stride_n == 1 ? cols_ / kWidth * kWidth : 0;
    for (int64_t c = 0; c < cols_; c += kWidth) {
      VecBytes bytes{};
      if (c < whole) {
        bytes = load_lanes<VecBytes>(from + c);
      } else {
        for (int64_t lane = 0; lane < kWidth && c + lane < cols_; ++lane)
          bytes[lane] = static_cast<int8_t>(from[(c + lane) * dense.stride_n]);
      }
      const VecI dropped = __builtin_convertvector(bytes == 0, VecI);  // all bits set, or none
      store(to + c, dropped ? splat(-kInf) : kOver ? load(to + c) : Vec{});
    }
  }

  void put_interval(int64_t i, float* to) const {
    for (int64_t c = 0; c < cols_; c += kWidth)
      store(to + c, inside(i, c) ? load(to + c) : splat(-kInf));
  }

  struct Seen {
    VecI kept, masked, biased;
  };
  void look(const float* row, Seen& seen) const {
    for (int64_t c = 0; c < cols_; c += kWidth) {
      const Vec addend = load(row + c);
      const VecI gone = addend == splat(-kInf);
      seen.kept |= ~gone;
      seen.masked |= c + kWidth <= cols_ ? gone : gone & (iota() < static_cast<int32_t>(cols_ - c));
      seen.biased |= bits_of(addend);
    }
  }

  const AttentionParams& p_;
  int64_t block_n_;
  bool has_addend_, masked_ = false, sparse_ = false;
  Masking masking_ = Masking::kNone;
  int64_t b_ = 0, h_ = 0, i0_ = 0, rows_ = 0, j0_ = 0, cols_ = 0, addend_stride_ = 0;
  int64_t bias_stride_ = 0;
  KeyRange range_{};
  Strips strips_;
  int32_t *begin_, *end_;
  float* addend_;
  const float* bias_ = nullptr;
};

// The keys that each row block of a batch entry keeps. Backward meets a block again with every tile
// of keys. Limits that vary by row are then read once a task, and not once a tile.
class RowRanges {
 public:
  RowRanges(const AttentionParams& p, Scratch& scratch, int64_t block_m)
      : p_(p),
        block_m_(block_m),
        of_block_(scratch.of<KeyRange>(round_up(p.M, block_m) / block_m)) {}

  void use(int64_t b) {
    if (b == b_) return;
    b_ = b, all_ = {p_.N, 0};
    for (int64_t i0 = 0; i0 < p_.M; i0 += block_m_) {
      const KeyRange range = tile_range(p_.mask, p_.N, b, i0, min64(p_.M, i0 + block_m_));
      of_block_[i0 / block_m_] = range;
      if (range.begin >= range.end) continue;
      all_ = {min64(all_.begin, range.begin), max64(all_.end, range.end)};
    }
  }

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
