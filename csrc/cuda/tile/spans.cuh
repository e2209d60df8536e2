// Which query tiles a tile of keys visits: from the first to the last one with a row that keeps
// some key of it. Arithmetic says so, unless limits vary by row, as in packed documents. A look at
// every row for every tile of keys would then take longer than the tiles. Two kernels make tables
// instead. Intervals of rows in order leave no tile between first and last that keeps nothing.
#pragma once

#include "cuda/base/launcher.cuh"
#include "cuda/tile/tile.cuh"

namespace fastattn::cuda {

struct __align__(8) Span {
  int32_t begin, end;  // empty when begin >= end
};

struct Spans {
  Span* keys;     // [B][query tiles]: the keys that rows of the tile keep; nullptr: no limit varies
  Span* queries;  // [B][key tiles]: the query tiles to visit
};

// Floats of the tables: of that of keys, of both.
FASTATTN_FN int64_t key_span_floats(const AttentionParams& p) {
  return limits_vary_by_row(p.mask) ? 2 * p.B * ceil_div(p.M, kTile) : 0;
}
FASTATTN_FN int64_t span_floats(const AttentionParams& p) {
  return key_span_floats(p) + (limits_vary_by_row(p.mask) ? 2 * p.B * ceil_div(p.N, kTile) : 0);
}
// Fill that of keys, or both, in memory for as many floats.
Span* make_key_spans(const AttentionParams& p, float* memory, Launcher& launcher);
Spans make_spans(const AttentionParams& p, float* memory, Launcher& launcher);

// From the first to the last of what `count` neighbours of a table hold.
FASTATTN_DEVICE Span union_of(const Span* table, int count) {
  Span all = {0x7fffffff, 0};
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const Span here = table[n];
    if (here.begin < here.end) all = {min(all.begin, here.begin), max(all.end, here.end)};
  }
  return all;
}

FASTATTN_DEVICE bool meets(const Span& keys, int64_t j0) {
  return keys.begin < j0 + kTile && keys.end > j0;
}

// Finds the rows that the keys at `at` visit, from the beginning of a tile on. They lie in shared
// memory, because registers are full of sums. Ends with a barrier.
FASTATTN_DEVICE void find_rows(const AttentionParams& p, const Spans& spans, const Place& at,
                               Span& rows) {
  if (thread() == 0) {
    RowRange found = rows_of_keys(p.mask, p.M, p.N, at.b, at.j0, at.j0 + at.cols);
    if (spans.keys != nullptr) {
      const Span tiles = spans.queries[at.b * ceil_div(p.N, kTile) + at.j0 / kTile];
      found = {int64_t{tiles.begin} * kTile, min64(p.M, int64_t{tiles.end} * kTile)};
    }
    const int end = static_cast<int>(found.end);
    rows = {found.begin < end ? static_cast<int>(found.begin / kTile * kTile) : end, end};
  }
  __syncthreads();
}
// Volatile, because the compiler would read them once, and keep them in registers.
FASTATTN_DEVICE int first_row(const volatile Span& rows) { return rows.begin; }
FASTATTN_DEVICE int rows_end(const volatile Span& rows) { return rows.end; }

}  // namespace fastattn::cuda
