// Small dense products C (op)= A B in fp32. All operands lie in scratch memory.
//
//   for n in panels of kTileVecs vectors    B panel [depth x panel] stays in the L1 cache
//     for r in groups of kTileRows rows     C tile stays in registers
//       for k < depth                       kTileVecs loads of B, kTileRows broadcasts of A, FMAs
//
// 6 x 2 vectors fill 12 of 16 registers, 6 x 4 fill 24 of 32. Each element of A is broadcast into
// one register and feeds kTileVecs FMAs. Loads thus stay well under the hardware's two a cycle. On
// aarch64, GCC spills some of 24 accumulators, so the small tile is used there.
//
// Rows are computed in whole groups: A and C must have memory up to round_up(rows, kTileRows). What
// lies there does not change the result, but denormals in A would cost time (clear_padding()).
// Columns are whole vectors. Depth is exact. Its sums are cut into chains, because the error of one
// chain of FMAs grows with the root of its length.
#pragma once

#include "cpu/base/scratch.h"
#include "cpu/base/shared.h"

namespace fastattn::FASTATTN_ISA {

constexpr int kTileRows = 6;
constexpr int kTileVecs = kVectorRegisters == 32 && kWidth == 16 ? 4 : 2;

// At most so many terms of a sum over D or E are added one after the other. A sum over a block of
// keys or queries is one chain. With 128 here, passes of D 128 take 1% less at most, and have 1.4
// times the error (Zen 5).
constexpr int64_t kChain = 64;

// Rows of memory that a tile of scores or outputs needs: whole register tiles of either kind.
FASTATTN_SIMD int64_t row_capacity(int64_t rows) {
  const int64_t whole = round_up(rows, kTileRows);
#ifdef __AVX512BF16__
  return whole > round_up(rows, 16) ? whole : round_up(rows, 16);
#else
  return whole;
#endif
}

// Memory for a tile of scores, in a problem of M queries.
template <typename Tile>
FASTATTN_SIMD float* scores_memory(Scratch& scratch, int64_t M, const Tile& tile) {
  return scratch.floats(row_capacity(min64(M, tile.m)) * tile.n);
}

// Zeros the rows of A beyond `rows` that gemm() reads.
FASTATTN_SIMD void clear_padding(float* a, int64_t ld, int64_t rows) {
  for (int64_t n = rows * ld; n < round_up(rows, kTileRows) * ld; ++n) a[n] = 0.f;
}

// A by rows: element (r, k) = data[r * ld + k]; or by columns, the transpose of a row-major matrix:
// data[k * ld + r].
struct ByRows {
  const float* data;
  int64_t ld;
  FASTATTN_MEMBER float at(int64_t r, int64_t k) const { return data[r * ld + k]; }
  FASTATTN_MEMBER ByRows rows_from(int64_t r) const { return {data + r * ld, ld}; }
  FASTATTN_MEMBER ByRows from(int64_t k) const { return {data + k, ld}; }
};
struct ByCols {
  const float* data;
  int64_t ld;
  FASTATTN_MEMBER float at(int64_t r, int64_t k) const { return data[k * ld + r]; }
  FASTATTN_MEMBER ByCols rows_from(int64_t r) const { return {data + r, ld}; }
  FASTATTN_MEMBER ByCols from(int64_t k) const { return {data + k * ld, ld}; }
};

// What to do with the product: C = AB, C = C + AB, C = C scale[row] + AB.
struct Store {
  FASTATTN_MEMBER Vec operator()(const float*, int64_t, Vec product) const { return product; }
};
struct Add {
  FASTATTN_MEMBER Vec operator()(const float* c, int64_t, Vec product) const {
    return load(c) + product;
  }
};
struct RescaleAdd {
  const float* scale;
  FASTATTN_MEMBER Vec operator()(const float* c, int64_t row, Vec product) const {
    return load(c) * scale[row] + product;
  }
};

// Calls f(begin, length, into) for the chains of a sum: the first does what `into` says, the others
// add to it. Chains are about equal: 65 terms are 33 and 32, because 64 and 1 gain nothing.
template <typename Into, typename F>
FASTATTN_SIMD void in_chains(int64_t depth, Into into, F f) {
  const int64_t length = ceil_div(depth, max64(1, ceil_div(depth, kChain)));
  f(int64_t{0}, length, into);
  for (int64_t k = length; k < depth; k += length) f(k, min64(depth - k, length), Add{});
}

// One chain of gemm().
template <typename A, typename Into>
FASTATTN_SHARED void gemm_chain(A a, const float* b, int64_t ldb, int64_t rows, int64_t cols,
                                int64_t depth, float* c, int64_t ldc, Into into);

// C[rows x cols] from A[rows x depth] and B[depth x cols]; cols is a multiple of kWidth.
template <typename A, typename Into>
static void gemm(A a, const float* b, int64_t ldb, int64_t rows, int64_t cols, int64_t depth,
                 float* c, int64_t ldc, Into into) {
  in_chains(depth, into, [&](int64_t k, int64_t length, auto to) {
    gemm_chain(a.from(k), b + k * ldb, ldb, rows, cols, length, c, ldc, to);
  });
}

#ifdef FASTATTN_SHARED_CODE
template <int kRows, int kVecs, typename A, typename Into>
FASTATTN_SIMD void micro_kernel(A a, const float* b, int64_t ldb, int64_t depth, float* c,
                                int64_t ldc, int64_t row, Into into) {
  Vec acc[kRows][kVecs] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    Vec bk[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) bk[v] = load(b + k * ldb + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec ark = splat(a.at(r, k));
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[r][v] += ark * bk[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      float* const to = c + r * ldc + v * kWidth;
      store(to, into(to, row + r, acc[r][v]));
    }
}

template <int kVecs, typename A, typename Into>
FASTATTN_SIMD void gemm_panel(A a, const float* b, int64_t ldb, int64_t rows, int64_t depth,
                              float* c, int64_t ldc, Into into) {
  for (int64_t r = 0; r < rows; r += kTileRows)
    micro_kernel<kTileRows, kVecs>(a.rows_from(r), b, ldb, depth, c + r * ldc, ldc, r, into);
}

template <typename A, typename Into>
FASTATTN_SHARED void gemm_chain(A a, const float* b, int64_t ldb, int64_t rows, int64_t cols,
                                int64_t depth, float* c, int64_t ldc, Into into) {
  constexpr int kPanel = kTileVecs * kWidth;
  int64_t n = 0;
  for (; n + kPanel <= cols; n += kPanel)
    gemm_panel<kTileVecs>(a, b + n, ldb, rows, depth, c + n, ldc, into);
  if constexpr (kTileVecs == 4) {
    if (n + 2 * kWidth <= cols) {
      gemm_panel<2>(a, b + n, ldb, rows, depth, c + n, ldc, into);
      n += 2 * kWidth;
    }
  }
  if (n < cols) gemm_panel<1>(a, b + n, ldb, rows, depth, c + n, ldc, into);
}

#ifndef FASTATTN_ALONE
#define FASTATTN_CHAIN(A, Into)                                                                  \
  template void gemm_chain(A, const float*, int64_t, int64_t, int64_t, int64_t, float*, int64_t, \
                           Into)
FASTATTN_CHAIN(ByRows, Store);
FASTATTN_CHAIN(ByRows, Add);
FASTATTN_CHAIN(ByRows, RescaleAdd);
FASTATTN_CHAIN(ByCols, Add);
#undef FASTATTN_CHAIN
#endif
#endif  // FASTATTN_SHARED_CODE

}  // namespace fastattn::FASTATTN_ISA
