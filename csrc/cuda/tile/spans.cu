#include "cuda/tile/spans.cuh"

namespace fastattn::cuda {
namespace {

struct SpanArgs {
  AttentionParams p;
  Spans spans;
};

FASTATTN_DEVICE TileSpan join_lanes(TileSpan x) {
  const auto other = [](const Span& span, int n) {
    return Span{__shfl_xor_sync(kAllLanes, span.begin, n), __shfl_xor_sync(kAllLanes, span.end, n)};
  };
  for (int n = 16; n > 0; n /= 2) join(x, {other(x.some, n), other(x.all, n)});
  return x;
}

// A warp takes a tile of an array [B][tiles].
FASTATTN_DEVICE int64_t number_of_warp() { return blockIdx.x * int64_t{kWarps} + warp(); }

// The keys of each query tile, and of each row if that table is given. A row without keys leaves
// none that all rows keep.
__global__ void __launch_bounds__(kThreads) key_spans_kernel(const __grid_constant__ SpanArgs a) {
  const AttentionParams& p = a.p;
  const int64_t tiles = ceil_div(p.M, kTile), number = number_of_warp();
  if (number >= p.B * tiles) return;
  const int64_t b = number / tiles, i0 = number % tiles * kTile;
  TileSpan keys = kNoTile;
  for (int n = lane(); n < kTile; n += 32) {
    const bool inside = i0 + n < p.M;
    const KeyRange row = inside ? row_range(p.mask, p.N, b, i0 + n) : KeyRange{0, 0};
    Span here = {0, 0};
    if (row.begin < row.end) here = {static_cast<int>(row.begin), static_cast<int>(row.end)};
    if (a.spans.rows != nullptr) a.spans.rows[number][n] = here;
    if (inside) join(keys, {here, here});
  }
  keys = join_lanes(keys);
  if (lane() == 0) a.spans.keys[number] = keys;
}

// The query tiles of each tile of keys. Limits may be in any order, so those that keep all of it
// may lie apart. None of them counts then, and all are masked, which is never wrong.
__global__ void __launch_bounds__(kThreads) query_spans_kernel(const __grid_constant__ SpanArgs a) {
  const int64_t tiles_m = ceil_div(a.p.M, kTile), tiles_n = ceil_div(a.p.N, kTile);
  const int64_t number = number_of_warp();
  if (number >= a.p.B * tiles_n) return;
  const int64_t j0 = number % tiles_n * kTile;
  const TileSpan* const keys = a.spans.keys + number / tiles_n * tiles_m;
  TileSpan some = kNoTile, whole = kNoTile;
  int count = 0;
  for (int64_t n = lane(); n < tiles_m; n += 32) {
    const Span here = {static_cast<int>(n), static_cast<int>(n + 1)};
    if (meets(keys[n].some, j0)) join(some, {here, here});
    if (here.end * kTile > a.p.M || !holds(keys[n].all, j0)) continue;
    join(whole, {here, here}), ++count;
  }
  const Span tiles = join_lanes(some).some, all = join_lanes(whole).some;
  const bool is_one = __reduce_add_sync(kAllLanes, count) == all.end - all.begin;
  if (lane() == 0) a.spans.queries[number] = {tiles, is_one ? all : Span{0, 0}};
}

}  // namespace

static void find_keys(const AttentionParams& p, const Spans& spans, Launcher& launcher) {
  launcher.run(key_spans_kernel, ceil_div(p.B * ceil_div(p.M, kTile), kWarps), kThreads, 0,
               SpanArgs{p, spans});
}

TileSpan* make_key_spans(const AttentionParams& p, float* memory, Launcher& launcher) {
  if (!limits_vary_by_row(p.mask)) return nullptr;
  TileSpan* const keys = reinterpret_cast<TileSpan*>(memory);
  find_keys(p, {keys, nullptr, nullptr}, launcher);
  return keys;
}

Spans make_spans(const AttentionParams& p, float* memory, Launcher& launcher) {
  if (!limits_vary_by_row(p.mask)) return {nullptr, nullptr, nullptr};
  TileSpan* const keys = reinterpret_cast<TileSpan*>(memory);
  TileSpan* const queries = keys + p.B * ceil_div(p.M, kTile);
  TileSpan* const end = queries + p.B * ceil_div(p.N, kTile);
  const Spans spans = {keys, queries, reinterpret_cast<LineSpans*>(end)};
  find_keys(p, spans, launcher);
  launcher.run(query_spans_kernel, ceil_div(p.B * ceil_div(p.N, kTile), kWarps), kThreads, 0,
               SpanArgs{p, spans});
  return spans;
}

}  // namespace fastattn::cuda
