// Strips of 16 rows of a tile, each with a list of the vectors of columns in which it keeps some
// pair. Where a mask drops much of a tile, products and softmax take the listed vectors alone. Sums
// keep their order and lose only zeros, so no bit changes.
//
//   for strips                        S = Q K^T
//     for groups of listed vectors    up to 4 of them
//       for 4 rows                    4 x 4 vectors in registers
//         for dims
//
//   for strips                        O = scale O + W V
//     for groups of vectors of E
//       for 4 rows
//         for listed vectors, keys of a vector
//
//   for groups of 6 keys              dV += W^T dO
//     gemm() of the rows from the first strip that lists one of them to the last
#pragma once

#include "cpu/tile/gemm.h"
#include "problem/mask.h"

namespace fastattn::FASTATTN_ISA {

constexpr int64_t kStripRows = 16;

// The first columns of some vectors, in ascending order.
struct Columns {
  const int32_t* listed;
  int64_t vectors;
  FASTATTN_MEMBER int64_t count() const { return vectors; }
  FASTATTN_MEMBER int64_t at(int64_t n) const { return listed[n]; }
};
struct AllColumns {
  int64_t cols;
  FASTATTN_MEMBER int64_t count() const { return (cols + kWidth - 1) / kWidth; }
  FASTATTN_MEMBER int64_t at(int64_t n) const { return n * kWidth; }
};

// Which columns a loop over a row takes: all of them, listed vectors, or pairs of vectors, the
// first of which has an even number, where one of both is listed.
enum class Takes { kAll, kListed, kPairs };

// The first columns of all vectors of a tile.
FASTATTN_SIMD int32_t* list_all(Scratch& scratch, int64_t cols) {
  int32_t* const all = scratch.ints(cols / kWidth);
  for (int64_t n = 0; n < cols / kWidth; ++n) all[n] = static_cast<int32_t>(n * kWidth);
  return all;
}

// The lists of a tile.
class Strips {
 public:
  Strips(Scratch& scratch, int64_t block_m, int64_t block_n)
      : capacity_(round_up(block_n / kWidth, 2)),
        all_(list_all(scratch, block_n)),
        listed_(scratch.ints(ceil_div(block_m, kStripRows) * capacity_)),
        paired_(scratch.ints(ceil_div(block_m, kStripRows) * capacity_)),
        count_(scratch.ints(ceil_div(block_m, kStripRows))),
        paired_count_(scratch.ints(ceil_div(block_m, kStripRows))) {}

  Columns every(int64_t cols) const { return {all_, AllColumns{cols}.count()}; }
  Columns of_row(int64_t i) const {
    const int64_t strip = i / kStripRows;
    return {listed_ + strip * capacity_, count_[strip]};
  }
  // Takes::kPairs
  Columns pairs_of_row(int64_t i) const {
    const int64_t strip = i / kStripRows;
    return {paired_ + strip * capacity_, paired_count_[strip]};
  }
  // Whether one of the rows [begin, end) lists the vector of column c.
  bool listed(int64_t begin, int64_t end, int64_t c) const {
    for (int64_t i = begin; i < end; i += kStripRows) {
      const Columns own = of_row(i);
      for (int64_t n = 0; n < own.count(); ++n)
        if (own.at(n) == c) return true;
    }
    return false;
  }

  // Lists the vectors of columns [begin, end) of a strip with lists(c). Returns how many.
  template <typename Lists>
  FASTATTN_MEMBER int64_t fill(int64_t strip, int64_t begin, int64_t end, Lists lists) {
    int32_t *const own = listed_ + strip * capacity_, *const pairs = paired_ + strip * capacity_;
    int32_t n = 0, paired = 0;
    for (int64_t c = begin / kWidth * kWidth; c < end; c += kWidth) {
      if (!lists(c)) continue;
      own[n++] = static_cast<int32_t>(c);
      const auto first = static_cast<int32_t>(c / (2 * kWidth) * (2 * kWidth));
      if (paired != 0 && pairs[paired - 2] == first) continue;
      pairs[paired++] = first;
      pairs[paired++] = first + static_cast<int32_t>(kWidth);
    }
    count_[strip] = n;
    paired_count_[strip] = paired;
    return n;
  }

  // The rows from the first strip to the last that list some of the columns [begin, end).
  RowRange rows_of(int64_t begin, int64_t end, int64_t rows) const {
    RowRange range{rows, 0};
    for (int64_t i = 0; i < rows; i += kStripRows) {
      const Columns own = of_row(i);
      for (int64_t n = 0; n < own.count() && own.at(n) < end; ++n)
        if (own.at(n) + kWidth > begin)
          range = {min64(range.begin, i), min64(rows, i + kStripRows)};
    }
    return range;
  }

  // Zeros the columns of s [rows, ld] that the list of a row lacks.
  void clear_others(float* s, int64_t ld, int64_t rows, int64_t cols) const {
    for (int64_t i = 0; i < rows; ++i) {
      const Columns own = of_row(i);
      for (int64_t c = 0, n = 0; c < cols; c += kWidth) {
        if (n < own.count() && own.at(n) == c)
          ++n;
        else
          store(s + i * ld + c, Vec{});
      }
    }
  }

 private:
  int64_t capacity_;
  int32_t *all_, *listed_, *paired_, *count_, *paired_count_;
};

// The listed columns of C [rows, ldc] = A B.
FASTATTN_SHARED void multiply_to_strips(ByRows a, const float* b, int64_t ldb, const Strips& strips,
                                        int64_t rows, int64_t depth, float* c, int64_t ldc);

// C [rows, cols] from the listed columns of A, and B [depth, cols].
template <typename Into>
FASTATTN_SHARED void multiply_strips(ByRows a, const Strips& strips, int64_t depth, const float* b,
                                     int64_t ldb, int64_t rows, int64_t cols, float* c, int64_t ldc,
                                     Into into);

// C [rows, cols] += A^T B, where rows are the columns of strips, and the depth has their rows.
// Columns that strips lack hold zeros.
static inline void multiply_strips(ByCols a, const Strips& strips, int64_t depth, const float* b,
                                   int64_t ldb, int64_t rows, int64_t cols, float* c, int64_t ldc,
                                   Add into) {
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const RowRange of = strips.rows_of(r, min64(rows, r + kTileRows), depth);
    if (of.begin >= of.end) continue;
    gemm_chain(a.rows_from(r).from(of.begin), b + of.begin * ldb, ldb, kTileRows, cols,
               of.end - of.begin, c + r * ldc, ldc, into);
  }
}

#ifdef FASTATTN_SHARED_CODE
// Calls f(rows, vectors, row, vector), the first two as constants, for blocks of a strip. Of 2
// vectors, 4 rows have just the sums that hide the latency of two units. So 6 rows go first.
template <typename F>
FASTATTN_SIMD void in_blocks(int64_t rows, int64_t vectors, F f) {
  int64_t n = 0;
  const auto take = [&](auto count) __attribute__((always_inline)) {
    for (; n + count <= vectors; n += count) {
      int64_t r = 0;
      if constexpr (kTileVecs == 2)
        for (; r + 6 <= rows; r += 6) f(std::integral_constant<int, 6>{}, count, r, n);
      for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>{}, count, r, n);
      for (; r < rows; ++r) f(std::integral_constant<int, 1>{}, count, r, n);
    }
  };
  if constexpr (kTileVecs == 4) take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

template <int kRows, int kVecs, typename Into>
FASTATTN_SIMD void listed_columns(ByRows a, const float* b, int64_t ldb, const int32_t* listed,
                                  int64_t depth, float* c, int64_t ldc, Into into) {
  Vec acc[kRows][kVecs] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec bk[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) bk[v] = load(b + k * ldb + listed[v]);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[r][v] += splat(a.at(r, k)) * bk[v];
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      float* const to = c + r * ldc + listed[v];
      store(to, into(to, r, acc[r][v]));
    }
}

FASTATTN_SHARED void multiply_to_strips(ByRows a, const float* b, int64_t ldb, const Strips& strips,
                                        int64_t rows, int64_t depth, float* c, int64_t ldc) {
  for (int64_t i = 0; i < rows; i += kStripRows) {
    const Columns own = strips.of_row(i);
    in_blocks(min64(kStripRows, rows - i), own.count(),
              [&](auto r_count, auto v_count, int64_t r, int64_t n) __attribute__((always_inline)) {
                in_chains(depth, Store{}, [&](int64_t k, int64_t length, auto into) {
                  listed_columns<r_count, v_count>(a.rows_from(i + r).from(k), b + k * ldb, ldb,
                                                   own.listed + n, length, c + (i + r) * ldc, ldc,
                                                   into);
                });
              });
  }
}

// `depth`: where the listed columns of A end, which may be inside the last one.
template <int kRows, int kVecs, typename Into>
FASTATTN_SIMD void listed_depth(ByRows a, Columns own, int64_t depth, const float* b, int64_t ldb,
                                float* c, int64_t ldc, int64_t row, Into into) {
  Vec acc[kRows][kVecs] = {};
  for (int64_t n = 0; n < own.count(); ++n)
    for (int64_t k = own.at(n); k < min64(depth, own.at(n) + kWidth); ++k) {
      Vec bk[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) bk[v] = load(b + k * ldb + v * kWidth);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) acc[r][v] += splat(a.at(r, k)) * bk[v];
    }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      float* const to = c + r * ldc + v * kWidth;
      store(to, into(to, row + r, acc[r][v]));
    }
}

template <typename Into>
FASTATTN_SHARED void multiply_strips(ByRows a, const Strips& strips, int64_t depth, const float* b,
                                     int64_t ldb, int64_t rows, int64_t cols, float* c, int64_t ldc,
                                     Into into) {
  for (int64_t i = 0; i < rows; i += kStripRows) {
    const Columns own = strips.of_row(i);
    // No row keeps a key here: C stays as it is. (All scales are 1.)
    if (!std::is_same_v<Into, Store> && own.count() == 0) continue;
    in_blocks(min64(kStripRows, rows - i), cols / kWidth,
              [&](auto r_count, auto v_count, int64_t r, int64_t n) __attribute__((always_inline)) {
                listed_depth<r_count, v_count>(a.rows_from(i + r), own, depth, b + n * kWidth, ldb,
                                               c + (i + r) * ldc + n * kWidth, ldc, i + r, into);
              });
  }
}

#ifndef FASTATTN_ALONE
template void multiply_strips(ByRows, const Strips&, int64_t, const float*, int64_t, int64_t,
                              int64_t, float*, int64_t, Store);
template void multiply_strips(ByRows, const Strips&, int64_t, const float*, int64_t, int64_t,
                              int64_t, float*, int64_t, RescaleAdd);
#endif
#endif  // FASTATTN_SHARED_CODE

}  // namespace fastattn::FASTATTN_ISA
