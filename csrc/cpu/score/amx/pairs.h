// Products of operands by AVX512-BF16, for CPUs without a matrix unit. A word is two bf16.
// vdpbf16ps multiplies a vector of words by one word, and adds both products in fp32. It takes a
// word of the left operand, broadcast, and a row of a right tile: the same word of 16 columns.
//
//   for groups of kCols tiles of columns     these tiles stay in the L1 cache
//     for groups of kRows rows               C in registers
//       for words of depth                   kCols loads, kRows broadcasts, kRows kCols products
#pragma once

#include "cpu/score/amx/operand.h"

namespace fastattn::FASTATTN_ISA {

// Rows [r, r + kRows) of C and kCols tiles of columns from tile n on. kRows divides kEdge.
template <int kRows, int kCols>
FASTATTN_SIMD void multiply_words(const Operand& a, const Operand& b, int64_t r, int64_t n,
                                  int64_t depths, bool add, float* c, int64_t ld) {
  float* const to = c + r * ld + n * kEdge;
  Vec sum[kRows][kCols];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int x = 0; x < kCols; ++x) sum[i][x] = add ? load(to + i * ld + x * kEdge) : Vec{};
  for (int64_t k = 0; k < depths; ++k) {
    const int32_t* const left = a.tiles(r / kEdge, k) + r % kEdge * kEdge;
    const int32_t* right[kCols];
#pragma GCC unroll 8
    for (int x = 0; x < kCols; ++x) right[x] = b.tiles(n + x, k);
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
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int x = 0; x < kCols; ++x) store(to + i * ld + x * kEdge, sum[i][x]);
}

// C[rows x cols] = A B, or C + A B; all are padded to whole tiles. A and B are kBf16.
static void multiply_tiles(const Operand& a, const Operand& b, int64_t rows, int64_t cols,
                           int64_t depth, bool add, float* c, int64_t ld) {
  constexpr int kRows = 4, kCols = 4;
  const int64_t padded = round_up(rows, kRows), ns = round_up(cols, kEdge) / kEdge;
  const int64_t depths = round_up(depth, kTileDepth) / kTileDepth;
  int64_t n = 0;
  const auto take = [&](auto count) __attribute__((always_inline)) {
    for (; n + count <= ns; n += count)
      for (int64_t r = 0; r < padded; r += kRows)
        multiply_words<kRows, count>(a, b, r, n, depths, add, c, ld);
  };
  take(std::integral_constant<int, kCols>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

}  // namespace fastattn::FASTATTN_ISA
