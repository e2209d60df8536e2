// How the mask and the bias of a tile are found: what of masking.h is compiled once for an
// instruction set (base/shared.h).
#pragma once

#include "cpu/base/tanh.h"
#include "cpu/tile/masking.h"

namespace fastattn::FASTATTN_ISA {

FASTATTN_SHARED LogitUnits logit_units(const AttentionParams& p, double scale, float own) {
  constexpr double kLeast = __FLT_MIN__, kMost = __FLT_MAX__;
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
                 : 0.f,
          p.q.dtype != DType::kFloat32};
}

FASTATTN_SHARED void curve_scores(const LogitUnits& units, int64_t rows, int64_t cols, int64_t ld,
                                  float* s, float* slopes) {
  const float ratio = units.ratio;
  if (ratio == 0.f) return;
  for (int64_t begin = 0; begin < rows * ld; begin += ld) {
    const int64_t end = begin + cols;
    const auto small = [&]() __attribute__((always_inline)) {
      Vec largest{};
      for (int64_t at = begin; at < end; at += kWidth)
        largest = max(abs(load(s + at)), largest);  // operand order passes over NaN
      return !any_above(largest, kSmall / ratio);
    };
    with_tanh(ratio, units.half, small, [&](auto tanh_and_slope) __attribute__((always_inline)) {
      for (int64_t at = begin; at < end; at += kWidth) {
        const TanhAndSlope of = tanh_and_slope(load(s + at));
        if (slopes != nullptr) store(slopes + at, min(of.slope, splat(1.f)));  // 1 of NaN
        store(s + at, of.tanh);
      }
    });
  }
}

void MaskTile::set_rows(int64_t b, int64_t h, int64_t i0, int64_t rows) {
  set_rows(b, h, i0, rows, tile_range(p_.mask, p_.N, b, i0, i0 + rows));
}

int64_t MaskTile::set_keys(int64_t j0, int64_t cols) {
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
  if (kept == Kept::kAll) return in_interval;
  return look_at_plain_mask() ? last_kept(cols) : build_addend(in_interval);
}

void MaskTile::find_strips() {
  const bool by_pair = masking_ == Masking::kDense || masking_ == Masking::kAddend;
  if (!masked_ || (by_pair && pair_stride_ == 0)) return;
  int64_t listed = 0, all = 0;
  for (int64_t i = 0; i < rows_; i += kStripRows) {
    const int64_t end = min64(rows_, i + kStripRows);
    listed += by_pair ? list_kept(i, end) : list_intervals(i, end);
    all += AllColumns{cols_}.count();
  }
  sparse_ = 8 * listed <= 7 * all;
}

bool MaskTile::keeps_key(int64_t c) const {
  if (!masked_) return true;
  for (int64_t i = 0; i < rows_; ++i)
    if (keeps(i, c)) return true;
  return false;
}

int64_t MaskTile::list_intervals(int64_t i0, int64_t i1) {
  int32_t begin = static_cast<int32_t>(cols_), end = 0;
  for (int64_t i = i0; i < i1; ++i) {
    if (begin_[i] >= end_[i]) continue;
    begin = begin_[i] < begin ? begin_[i] : begin;
    end = end_[i] > end ? end_[i] : end;
  }
  return strips_.fill(i0 / kStripRows, begin, end, [](int64_t) { return true; });
}

int64_t MaskTile::list_kept(int64_t i0, int64_t i1) {
  return strips_.fill(i0 / kStripRows, 0, cols_, [&](int64_t c) { return keeps_some(i0, i1, c); });
}

int64_t MaskTile::set_intervals() {
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

bool MaskTile::look_at_plain_bias() {
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

MaskTile::Kept MaskTile::kept_by_mask() const {
  constexpr int64_t kBytes = sizeof(WideBytes);
  const DenseMask dense = dense_from(p_.mask, b_, h_, i0_, j0_);
  const int64_t cols = cols_;
  if (dense.stride_n != 1 || cols < kBytes) return Kept::kSome;
  const uint8_t* from = dense.data + dense.offset;
  WideBytes any{}, dropped{};
  for (int64_t i = 0; i < (dense.stride_m == 0 ? 1 : rows_); ++i, from += dense.stride_m) {
    for (int64_t c = 0; c < cols; c += kBytes) {  // the last bytes may be looked at twice
      const auto bytes = load_lanes<WideBytes>(from + min64(c, cols - kBytes));
      any |= bytes;
      dropped |= bytes == 0;
    }
    __builtin_prefetch(from + cols, 0, 2);  // for the next tile
    __builtin_prefetch(from + cols + 64, 0, 2);
  }
  return !any_lane((VecI)any) ? Kept::kNone : any_lane((VecI)dropped) ? Kept::kSome : Kept::kAll;
}

bool MaskTile::look_at_plain_mask() {
  const DenseMask dense = dense_from(p_.mask, b_, h_, i0_, j0_);
  if (masked_ || dense.stride_n != 1 || cols_ % kWidth != 0) return false;
  kept_ = dense.data + dense.offset, pair_stride_ = dense.stride_m;
  masking_ = Masking::kDense, masked_ = true;
  return true;
}

void MaskTile::put_bias(int64_t i, float* to) const {
  const View& bias = p_.bias;
  const int64_t row =
      b_ * bias.stride_b + h_ * bias.stride_h + (i0_ + i) * bias.stride_r + j0_ * bias.stride_c;
  const Matrix from = {bias.data, bias.dtype, row, bias.stride_r, bias.stride_c, rows_, cols_};
  with_dtype(bias.dtype, [&](auto type) {
    const int64_t ahead = prefetch_distance<type>(from);
    if (bias.stride_c == 1) prefetch_rows<type>(from, ahead, ahead + 1);
    for (int64_t c = 0; c < cols_; c += kWidth)
      store(to + c, canonical(load_strided<type>(bias.data, row + c * bias.stride_c, bias.stride_c,
                                                 cols_ - c)));
  });
}

template <bool kOver>
void MaskTile::put_keep(int64_t i, float* to) const {
  const DenseMask dense = dense_from(p_.mask, b_, h_, i0_ + i, j0_);
  const uint8_t* const from = dense.data + dense.offset;
  const int64_t cols = cols_, whole = dense.stride_n == 1 ? cols / kWidth * kWidth : 0;
  const auto put = [&](int64_t c, VecBytes bytes) __attribute__((always_inline)) {
    const VecI dropped = widen(bytes) == 0;
    const Vec gone = from_bits(dropped & bits_of(splat(-kInf)));
    store(to + c, kOver ? dropped ? gone : load(to + c) : gone);
  };
  for (int64_t c = 0; c < whole; c += kWidth) put(c, load_lanes<VecBytes>(from + c));
  for (int64_t c = whole; c < cols; c += kWidth) {
    VecBytes bytes{};
    for (int64_t lane = 0; lane < kWidth && c + lane < cols; ++lane)
      bytes[lane] = static_cast<int8_t>(from[(c + lane) * dense.stride_n]);
    put(c, bytes);
  }
}

void MaskTile::put_interval(int64_t i, float* to) const {
  const auto interval = row<Masking::kIntervals>(i);
  for (int64_t c = 0, cols = cols_; c < cols; c += kWidth)
    store(to + c, interval.inside(c) ? load(to + c) : splat(-kInf));
}

MaskTile::Seen MaskTile::look(const float* row, Seen seen) const {
  for (int64_t c = 0, cols = cols_; c < cols; c += kWidth) {
    const VecI bits = bits_of(load(row + c)), gone = bits == bits_of(splat(-kInf));
    seen.dropped &= gone;
    seen.masked |= c + kWidth <= cols ? gone : gone & (iota() < static_cast<int32_t>(cols - c));
    seen.biased |= bits;
  }
  return seen;
}

bool MaskTile::keeps_some(int64_t i0, int64_t i1, int64_t c) const {
  for (int64_t i = i0; i < i1; ++i) {
    const int64_t at = i * pair_stride_ + c;
    const VecI kept = masking_ == Masking::kDense ? widen(load_lanes<VecBytes>(kept_ + at))
                                                  : load(addend_ + at) != splat(-kInf);
    if (any_lane(kept)) return true;
  }
  return false;
}

int64_t MaskTile::last_kept(int64_t cols) const {
  const int64_t rows = pair_stride_ == 0 ? 1 : rows_;
  for (int64_t c = (cols - 1) / kWidth * kWidth; c > 0; c -= kWidth)
    if (keeps_some(0, rows, c)) return min64(cols, c + kWidth);
  return min64(cols, kWidth);
}

int64_t MaskTile::build_addend(int64_t in_interval) {
  const bool one_row = !dense_varies_by_row(p_.mask) &&
                       (p_.bias.data == nullptr || p_.bias.stride_r == 0) && !masked_;
  pair_stride_ = one_row ? 0 : block_n_;
  Seen seen = {VecI{} == 0, {}, {}};
  for (int64_t i = 0; i < (one_row ? 1 : rows_); ++i) {
    float* const row = addend_ + i * pair_stride_;
    if (p_.bias.data != nullptr) put_bias(i, row);
    if (has_dense(p_.mask))
      p_.bias.data == nullptr ? put_keep<false>(i, row) : put_keep<true>(i, row);
    if (begin_[i] > 0 || end_[i] < round_up(cols_, kWidth)) put_interval(i, row);
    seen = look(row, seen);
  }
  if (!any_lane(~seen.dropped)) return 0;
  masked_ = any_lane(seen.masked);
  const bool plain = !masked_ && !any_lane(seen.biased) && cols_ % kWidth == 0;
  masking_ = !plain ? Masking::kAddend : p_.bias.data == nullptr ? Masking::kNone : Masking::kBias;
  bias_ = addend_, bias_stride_ = 0;  // a plain one is all zeros
  return last_kept(in_interval);
}

void RowRanges::use(int64_t b) {
  if (b == b_) return;
  b_ = b, all_ = {p_.N, 0};
  for (int64_t i0 = 0; i0 < p_.M; i0 += block_m_) {
    const KeyRange range = tile_range(p_.mask, p_.N, b, i0, min64(p_.M, i0 + block_m_));
    of_block_[i0 / block_m_] = range;
    if (range.begin >= range.end) continue;
    all_ = {min64(all_.begin, range.begin), max64(all_.end, range.end)};
  }
}

}  // namespace fastattn::FASTATTN_ISA
