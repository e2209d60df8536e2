#include "cuda/tile/spans.cuh"

namespace fastattn::cuda {
namespace {

struct SpanArgs {
  AttentionParams p;
  Spans spans;
};

FASTATTN_DEVICE void extend(Span& span, int64_t begin, int64_t end) {
  span.begin = min(span.begin, static_cast<int>(begin));
  span.end = max(span.end, static_cast<int>(end));
}

FASTATTN_DEVICE Span union_of_lanes(Span x) {
  for (int n = 16; n > 0; n /= 2)
    extend(x, __shfl_xor_sync(kAllLanes, x.begin, n), __shfl_xor_sync(kAllLanes, x.end, n));
  return x;
}

// A warp takes a tile of an array [B][tiles].
FASTATTN_DEVICE int64_t number_of_warp() { return blockIdx.x * int64_t{kWarps} + warp(); }

// The keys of each query tile. Rows without keys say nothing.
__global__ void __launch_bounds__(kThreads) key_spans_kernel(const __grid_constant__ SpanArgs a) {
  const AttentionParams& p = a.p;
  const int64_t tiles = ceil_div(p.M, kTile), number = number_of_warp();
  if (number >= p.B * tiles) return;
  const int64_t i0 = number % tiles * kTile;
  Span keys = {0x7fffffff, 0};
  for (int64_t i = i0 + lane(); i < min64(p.M, i0 + kTile); i += 32) {
    const KeyRange row = row_range(p.mask, p.N, number / tiles, i);
    if (row.begin < row.end) extend(keys, row.begin, row.end);
  }
  keys = union_of_lanes(keys);
  if (lane() == 0) a.spans.keys[number] = keys;
}

// The query tiles of each tile of keys.
__global__ void __launch_bounds__(kThreads) query_spans_kernel(const __grid_constant__ SpanArgs a) {
  const int64_t tiles_m = ceil_div(a.p.M, kTile), tiles_n = ceil_div(a.p.N, kTile);
  const int64_t number = number_of_warp();
  if (number >= a.p.B * tiles_n) return;
  const int64_t j0 = number % tiles_n * kTile;
  const Span* const keys = a.spans.keys + number / tiles_n * tiles_m;
  Span queries = {0x7fffffff, 0};
  for (int64_t n = lane(); n < tiles_m; n += 32)
    if (meets(keys[n], j0)) extend(queries, n, n + 1);
  queries = union_of_lanes(queries);
  if (lane() == 0) a.spans.queries[number] = queries;
}

}  // namespace

Span* make_key_spans(const AttentionParams& p, float* memory, Launcher& launcher) {
  if (!limits_vary_by_row(p.mask)) return nullptr;
  Span* const keys = reinterpret_cast<Span*>(memory);
  launcher.run(key_spans_kernel, ceil_div(p.B * ceil_div(p.M, kTile), kWarps), kThreads, 0,
               SpanArgs{p, {keys, nullptr}});
  return keys;
}

Spans make_spans(const AttentionParams& p, float* memory, Launcher& launcher) {
  Span* const keys = make_key_spans(p, memory, launcher);
  if (keys == nullptr) return {nullptr, nullptr};
  const Spans spans = {keys, keys + p.B * ceil_div(p.M, kTile)};
  launcher.run(query_spans_kernel, ceil_div(p.B * ceil_div(p.N, kTile), kWarps), kThreads, 0,
               SpanArgs{p, spans});
  return spans;
}

}  // namespace fastattn::cuda
