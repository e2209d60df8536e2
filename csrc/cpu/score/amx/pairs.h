// Products of operands by AVX512-BF16, for CPUs without a matrix unit. A word is two bf16.
// vdpbf16ps multiplies a vector of words by one word, and adds both products in fp32. It takes a
// word of the left operand, broadcast, and a row of a right tile: the same word of 16 columns.
//
//   for groups of kCols tiles of columns     these tiles stay in the L1 cache
//     for groups of kRows rows               C in registers
//       for words of depth                   kCols loads, kRows broadcasts, kRows kCols products
//
// A strip of rows (strips.h) is as high as a tile, and a listed vector of columns as wide.
#pragma once

#include "cpu/score/amx/operand.h"

namespace fastattn::FASTATTN_ISA {

static_assert(kStripRows == kEdge && kWidth == kEdge && kTileDepth == 2 * kEdge);
constexpr bool kTilesHaveStrips = true;

// Tiles of depth: the first ones, those with a listed column, or those whose rows list a column.
struct FirstDepths {
  int64_t count;
  template <typename F>
  FASTATTN_MEMBER void each(F f) const {
    for (int64_t k = 0; k < count; ++k) f(k);
  }
};
struct ListedDepths {
  Columns pairs;
  template <typename F>
  FASTATTN_MEMBER void each(F f) const {
    for (int64_t n = 0; n < pairs.count(); n += 2) f(pairs.at(n) / kTileDepth);
  }
};
struct ListingDepths {
  const Strips& strips;
  int64_t column, depth;
  template <typename F>
  FASTATTN_MEMBER void each(F f) const {
    for (int64_t k = 0; k * kTileDepth < depth; ++k)
      if (strips.listed(k * kTileDepth, min64(depth, (k + 1) * kTileDepth), column)) f(k);
  }
};

// Rows [r, r + kRows) of C and kCols tiles of columns; kRows divides kEdge. column(x) returns the
// first column of a tile.
template <int kRows, int kCols, typename Column, typename Depths>
FASTATTN_SIMD void multiply_words(const Operand& a, const Operand& b, int64_t r, Column column,
                                  Depths depths, bool add, float* c, int64_t ld) {
  const auto place = [&](int i, int x) { return c + (r + i) * ld + column(x); };
  Vec sum[kRows][kCols];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int x = 0; x < kCols; ++x) sum[i][x] = add ? load(place(i, x)) : Vec{};
  depths.each([&](int64_t k) __attribute__((always_inline)) {
    const int32_t* const left = a.tiles(r / kEdge, k) + r % kEdge * kEdge;
    const int32_t* right[kCols];
#pragma GCC unroll 8
    for (int x = 0; x < kCols; ++x) right[x] = b.tiles(column(x) / kEdge, k);
#pragma GCC unroll 4
    for (int64_t word = 0; word < kEdge; ++word) {
      __m512bh columns[kCols];
#pragma GCC unroll 8
      for (int x = 0; x < kCols; ++x)
        columns[x] = (__m512bh)load_lanes<VecI>(right[x] + word * kEdge);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const auto row = (__m512bh)_mm512_set1_epi32(left[i * kEdge + word]);
#pragma GCC unroll 8
        for (int x = 0; x < kCols; ++x)
          sum[i][x] = (Vec)_mm512_dpbf16_ps((__m512)sum[i][x], columns[x], row);
      }
    }
  });
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int x = 0; x < kCols; ++x) store(place(i, x), sum[i][x]);
}

// Calls f(tiles, n), the first as a constant, for groups of `count` tiles from number n on.
template <typename F>
FASTATTN_SIMD void in_groups(int64_t count, F f) {
  int64_t n = 0;
  const auto take = [&](auto tiles) __attribute__((always_inline)) {
    for (; n + tiles <= count; n += tiles) f(tiles, n);
  };
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

// C[rows x cols] = A B, or C + A B; all are padded to whole tiles. A and B are kBf16.
static void multiply_tiles(const Operand& a, const Operand& b, int64_t rows, int64_t cols,
                           int64_t depth, bool add, float* c, int64_t ld, Lists lists = {}) {
  constexpr int kRows = 4;
  const FirstDepths all = {ceil_div(depth, kTileDepth)};
  if (lists.columns != nullptr) {
    for (int64_t r = 0; r < rows; r += kRows) {
      const Columns own = lists.columns->of_row(r);
      in_groups(own.count(), [&](auto tiles, int64_t n) __attribute__((always_inline)) {
        const auto column = [&](int x) { return own.at(n + x); };
        multiply_words<kRows, tiles>(a, b, r, column, all, add, c, ld);
      });
    }
    return;
  }
  if (lists.rows != nullptr) {
    for (int64_t n = 0; n < cols; n += kEdge)
      for (int64_t r = 0; r < rows; r += 2 * kRows)
        multiply_words<2 * kRows, 1>(
            a, b, r, [&](int) { return n; }, ListingDepths{*lists.rows, n, depth}, add, c, ld);
    return;
  }
  in_groups(ceil_div(cols, kEdge), [&](auto tiles, int64_t n) __attribute__((always_inline)) {
    const auto column = [&](int x) { return (n + x) * kEdge; };
    for (int64_t r = 0; r < rows; r += kRows) {
      const auto take = [&](auto depths) __attribute__((always_inline)) {
        multiply_words<kRows, tiles>(a, b, r, column, depths, add, c, ld);
      };
      lists.depth == nullptr ? take(all) : take(ListedDepths{lists.depth->pairs_of_row(r)});
    }
  });
}

}  // namespace fastattn::FASTATTN_ISA
