// The one place in C++ where a mask has a meaning: which keys j a query i keeps.
//
// row_range() covers the masks that keep an interval of keys per row (causal, window, kv_begin,
// kv_len). keeps() adds the dense mask. tile_range() bounds the keys that any row of a row block
// can keep: tiles outside it are never touched. A float bias is not a mask, but -inf in it removes
// a key too. CONTRIBUTING.md says what a new kind of mask needs.
#pragma once

#include "problem/host_device.h"
#include "problem/params.h"

namespace fastattn {

// ---- what loops need to know of a mask ----

FASTATTN_FN bool has_dense(const MaskParams& mask) { return mask.keep != nullptr; }

// Whether a dense mask differs from row to row: it may consist of blocks then, and whole tiles of
// it be dropped.
FASTATTN_FN bool dense_varies_by_row(const MaskParams& mask) {
  return has_dense(mask) && mask.keep_stride_m != 0;
}

// Whether limits differ from row to row. If not, intervals of keys move one way with the row, and
// the first and the last row bound all others.
FASTATTN_FN bool varies_by_row(const KeyLimit& limit) {
  return limit.data != nullptr && limit.stride_m != 0;
}
FASTATTN_FN bool limits_vary_by_row(const MaskParams& mask) {
  return varies_by_row(mask.kv_begin) || varies_by_row(mask.kv_len);
}

// Whether rows have first keys of their own, as packed documents do.
FASTATTN_FN bool begins_vary_by_row(const MaskParams& mask) { return varies_by_row(mask.kv_begin); }

// Whether samples or rows may have keys of their own, by limits or a dense mask.
FASTATTN_FN bool keys_vary(const MaskParams& mask) {
  return mask.kv_begin.data != nullptr || mask.kv_len.data != nullptr || has_dense(mask);
}

// Whether a diagonal bounds the keys of the first rows more than those of the last.
FASTATTN_FN bool later_rows_keep_more(const MaskParams& mask, int64_t N) {
  return mask.band_hi < N;
}

// Whether the band keeps every key for each of M rows.
FASTATTN_FN bool band_keeps_all(const MaskParams& mask, int64_t M, int64_t N) {
  return mask.band_lo <= 1 - M && mask.band_hi >= N - 1;
}

// Pairs (i, j) of a head that the band keeps.
FASTATTN_FN double band_pairs(const MaskParams& mask, int64_t M, int64_t N) {
  const double rows = static_cast<double>(M), keys = static_cast<double>(N);
  // The sum of max(0, t - i) over the rows i.
  const auto triangle = [rows](double t) {
    const double n = t < 0 ? 0 : t < rows ? t : rows;
    return n * t - n * (n - 1) / 2;
  };
  const auto dropped = [&](double t) { return triangle(t) - triangle(t - keys); };
  return rows * keys - dropped(keys - 1 - static_cast<double>(mask.band_hi)) -
         dropped(rows - 1 + static_cast<double>(mask.band_lo));
}

// Whether there is nothing that could drop a pair.
FASTATTN_FN bool keeps_all(const MaskParams& mask, int64_t M, int64_t N) {
  return band_keeps_all(mask, M, N) && !keys_vary(mask);
}

// ---- the keys that it keeps ----

// Where the keys end that the band leaves to row i.
FASTATTN_FN int64_t band_end(const MaskParams& mask, int64_t i) { return i + mask.band_hi + 1; }

struct KeyRange {
  int64_t begin, end;  // keys begin <= j < end; empty when begin >= end
};

struct RowRange {
  int64_t begin, end;  // rows begin <= i < end; empty when begin >= end
};

// A limit, clamped to [0, N], so that no value in user memory can cause a read out of bounds.
FASTATTN_FN int64_t limit_at(const KeyLimit& limit, int64_t absent, int64_t N, int64_t b,
                             int64_t i) {
  if (limit.data == nullptr) return absent;
  return max64(0, min64(N, limit.data[b * limit.stride_b + i * limit.stride_m]));
}

// The keys that limits leave to a row.
FASTATTN_FN KeyRange limits_at(const MaskParams& mask, int64_t N, int64_t b, int64_t i) {
  return {limit_at(mask.kv_begin, 0, N, b, i), limit_at(mask.kv_len, N, N, b, i)};
}

FASTATTN_FN KeyRange row_range(const MaskParams& mask, int64_t N, int64_t b, int64_t i) {
  const KeyRange limits = limits_at(mask, N, b, i);
  return {max64(limits.begin, i + mask.band_lo), min64(limits.end, band_end(mask, i))};
}

// The union over rows i0 <= i < i1, as an interval, by a look at each.
FASTATTN_RARE_FN KeyRange union_of_rows(const MaskParams& mask, int64_t N, int64_t b, int64_t i0,
                                        int64_t i1) {
  KeyRange all = {N, 0};
  for (int64_t i = i0; i < i1; ++i) {
    const KeyRange row = row_range(mask, N, b, i);
    if (row.begin >= row.end) continue;
    all.begin = min64(all.begin, row.begin);
    all.end = max64(all.end, row.end);
  }
  return all;
}

// The same where all rows have these limits.
FASTATTN_FN KeyRange tile_range(const MaskParams& mask, const KeyRange& limits, int64_t i0,
                                int64_t i1) {
  return {max64(limits.begin, i0 + mask.band_lo), min64(limits.end, band_end(mask, i1 - 1))};
}

// The same. Limits that vary by row cost one read a row, their [B] form one in all.
FASTATTN_FN KeyRange tile_range(const MaskParams& mask, int64_t N, int64_t b, int64_t i0,
                                int64_t i1) {
  if (limits_vary_by_row(mask)) return union_of_rows(mask, N, b, i0, i1);
  return tile_range(mask, limits_at(mask, N, b, i0), i0, i1);
}

// The keys that the intervals of all rows i0 <= i < i1 hold.
FASTATTN_FN KeyRange common_range(const MaskParams& mask, const KeyRange& limits, int64_t i0,
                                  int64_t i1) {
  return {max64(limits.begin, i1 - 1 + mask.band_lo), min64(limits.end, band_end(mask, i0))};
}

// The same; none where only every row could tell.
FASTATTN_FN KeyRange common_range(const MaskParams& mask, int64_t N, int64_t b, int64_t i0,
                                  int64_t i1) {
  if (limits_vary_by_row(mask)) return {N, 0};
  return common_range(mask, limits_at(mask, N, b, i0), i0, i1);
}

// The rows that keep some key j0 <= j < j1, where all rows have these limits.
FASTATTN_FN RowRange rows_of_keys(const MaskParams& mask, const KeyRange& limits, int64_t M,
                                  int64_t j0, int64_t j1) {
  const int64_t first = max64(j0, limits.begin), last = min64(j1, limits.end) - 1;
  if (first > last) return {0, 0};
  return {max64(0, first - mask.band_hi), min64(M, last - mask.band_lo + 1)};
}

// The same, unless limits vary by row: those rows are no interval.
FASTATTN_FN RowRange rows_of_keys(const MaskParams& mask, int64_t M, int64_t N, int64_t b,
                                  int64_t j0, int64_t j1) {
  return rows_of_keys(mask, limits_at(mask, N, b, 0), M, j0, j1);
}

// The rows whose intervals hold all keys j0 <= j < j1, where all rows have these limits.
FASTATTN_FN RowRange rows_of_all_keys(const MaskParams& mask, const KeyRange& limits, int64_t M,
                                      int64_t j0, int64_t j1) {
  if (j0 < limits.begin || limits.end < j1) return {M, 0};
  return {max64(0, j1 - 1 - mask.band_hi), min64(M, j0 - mask.band_lo + 1)};
}

// Whether these intervals hold all keys j0 <= j < j1.
FASTATTN_FN bool intervals_hold(const MaskParams& mask, int64_t N, int64_t b, int64_t i0,
                                int64_t i1, int64_t j0, int64_t j1) {
  const KeyRange common = common_range(mask, N, b, i0, i1);
  return common.begin <= j0 && j1 <= common.end;
}

// The dense mask, if there is one, where (b, h, i, j) is at `offset`; nonzero keeps.
struct DenseMask {
  const uint8_t* data;
  int64_t offset, stride_m, stride_n;
};

FASTATTN_FN DenseMask dense_from(const MaskParams& mask, int64_t b, int64_t h, int64_t i,
                                 int64_t j) {
  return {mask.keep,
          b * mask.keep_stride_b + h * mask.keep_stride_h + i * mask.keep_stride_m +
              j * mask.keep_stride_n,
          mask.keep_stride_m, mask.keep_stride_n};
}

// Its sizes: 1 along an axis along which it says the same.
struct DenseSizes {
  int64_t b, h, m, n;
};
FASTATTN_FN DenseSizes dense_sizes(const AttentionParams& p) {
  const MaskParams& mask = p.mask;
  return {mask.keep_stride_b == 0 ? 1 : p.B, mask.keep_stride_h == 0 ? 1 : p.H,
          mask.keep_stride_m == 0 ? 1 : p.M, mask.keep_stride_n == 0 ? 1 : p.N};
}

FASTATTN_FN bool dense_keeps(const MaskParams& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!has_dense(mask)) return true;
  const DenseMask dense = dense_from(mask, b, h, i, j);
  return dense.data[dense.offset] != 0;
}

FASTATTN_FN bool keeps(const MaskParams& mask, int64_t N, int64_t b, int64_t h, int64_t i,
                       int64_t j) {
  const KeyRange row = row_range(mask, N, b, i);
  if (j < row.begin || j >= row.end) return false;
  return dense_keeps(mask, b, h, i, j);
}

// ---- heads as rows ----

// The mask of heads with one query each, where groups of them become rows of one head. The band
// keeps every key, and still does.
FASTATTN_FN MaskParams heads_as_rows(MaskParams mask, int64_t group) {
  mask.keep_stride_m = mask.keep_stride_h;
  mask.keep_stride_h *= group;
  mask.kv_begin.stride_m = mask.kv_len.stride_m = 0;
  mask.band_lo -= group, mask.band_hi += 1;
  return mask;
}

}  // namespace fastattn
