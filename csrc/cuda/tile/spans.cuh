// Which query tiles a tile of keys visits: from the first to the last one with a row that keeps
// some key of it. Arithmetic says so, unless limits vary by row, as in packed documents. A look at
// every row for every tile of keys would then take longer than the tiles. Two kernels make tables
// instead. Intervals of rows in order leave no tile between first and last that keeps nothing. The
// tables also say which tiles need no mask: those of which every row keeps every key.
#pragma once

#include "cuda/base/launcher.cuh"
#include "cuda/tile/tile.cuh"

namespace fastattn::cuda {

struct __align__(8) Span {
  int32_t begin, end;  // empty when begin >= end
};

using LineSpans = Span[kTile];  // of each line of a tile

// From the first to the last of what meets some of a tile; an interval of what keeps all of it.
struct TileSpan {
  Span some, all;
};
constexpr int kLast = 0x7fffffff;
constexpr TileSpan kNoTile = {{kLast, 0}, {0, kLast}};

struct Spans {
  TileSpan* keys;     // [B][query tiles]: that rows of the tile keep; nullptr: no limit varies
  TileSpan* queries;  // [B][key tiles]: the query tiles to visit, those without mask
  LineSpans* rows;    // [B][query tiles]: the keys that each row keeps, or {0, 0}
};

// Floats of the tables: of that of keys, of all.
FASTATTN_FN int64_t key_span_floats(const AttentionParams& p) {
  return limits_vary_by_row(p.mask) ? 4 * p.B * ceil_div(p.M, kTile) : 0;
}
FASTATTN_FN int64_t span_floats(const AttentionParams& p) {
  if (!limits_vary_by_row(p.mask)) return 0;
  return p.B * ((4 + 2 * kTile) * ceil_div(p.M, kTile) + 4 * ceil_div(p.N, kTile));
}
// Fill that of keys, or all, in memory for as many floats.
TileSpan* make_key_spans(const AttentionParams& p, float* memory, Launcher& launcher);
Spans make_spans(const AttentionParams& p, float* memory, Launcher& launcher);

// Adds another tile, or a row. What is kept of both is no more than what is kept of each.
FASTATTN_DEVICE void join(TileSpan& x, const TileSpan& other) {
  if (other.some.begin < other.some.end)
    x.some = {min(x.some.begin, other.some.begin), max(x.some.end, other.some.end)};
  x.all = {max(x.all.begin, other.all.begin), min(x.all.end, other.all.end)};
}
// `count` neighbours of a table.
FASTATTN_DEVICE TileSpan join(const TileSpan* table, int count) {
  TileSpan all = kNoTile;
#pragma unroll 1
  for (int n = 0; n < count; ++n) join(all, table[n]);
  return all;
}

// Whether some keys of a tile are among these, and whether all are.
FASTATTN_DEVICE bool meets(const Span& keys, int64_t j0) {
  return keys.begin < j0 + kTile && keys.end > j0;
}
FASTATTN_DEVICE bool holds(const Span& keys, int64_t j0) {
  return keys.begin <= j0 && j0 + kTile <= keys.end;
}

// Finds the rows that the keys at `at` visit, from the beginning of a tile on. They lie in shared
// memory, because registers are full of sums. Ends with a barrier.
FASTATTN_DEVICE void find_rows(const AttentionParams& p, const Spans& spans, const Place& at,
                               Span& rows) {
  if (thread() == 0) {
    RowRange found = rows_of_keys(p.mask, p.M, p.N, at.b, at.j0, at.j0 + at.cols);
    if (spans.keys != nullptr) {
      const Span tiles = spans.queries[at.b * ceil_div(p.N, kTile) + at.j0 / kTile].some;
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
