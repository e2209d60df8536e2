// Which queries and keys the blocks of forward_wgmma.cu and backward_wgmma.cu take, in which order.
#pragma once

#include "cuda/dot/dense_tiles.cuh"
#include "cuda/dot/wgmma_choice.h"

namespace fastattn::cuda {

// All lanes of a warp have the same x. Out of a reduction, the compiler keeps it in a uniform
// register.
template <typename Int>
FASTATTN_DEVICE Int same_for_warp(Int x) {
  return static_cast<Int>(__reduce_max_sync(kAllLanes, static_cast<int>(x)));
}

// ---- which queries ----

// Tile `number` of all shares: its head among those of all samples, and its place in the head.
struct HeadTile {
  uint32_t head, tile;
};
FASTATTN_DEVICE HeadTile tile_of(uint32_t number, uint32_t tiles, int share) {
  if (share == 1) return {number / tiles, number % tiles};
  // A pair comes from both ends of a head, or of two heads with an odd number of tiles each.
  const uint32_t heads = 1 + tiles % 2, list = tiles * heads, place = number % list;
  const uint32_t n = place % 2 == 0 ? place / 2 : list - 1 - place / 2;
  return {number / list * heads + n / tiles, n % tiles};
}

// Its queries. Later ones may have more keys, and come first.
template <int kRowTile>
FASTATTN_DEVICE Place queries_at(const AttentionParams& p, uint32_t number, int share) {
  const uint32_t tiles = static_cast<uint32_t>(ceil_div(p.M, kRowTile));
  HeadTile at = tile_of(number, tiles, share);
  const int64_t h = take_digit(&at.head, p.H);
  const uint32_t tile = later_rows_keep_more(p.mask, p.N) ? tiles - 1 - at.tile : at.tile;
  return place(p, at.head, h, opaque_here(static_cast<int>(tile * kRowTile)), 0);
}

// Calls f(number, turn) for the tiles of a block's shares, or for its only one. A block takes one
// share of each round, at the next place each time: pairs of a head may not be quite equal, and
// would fall to the same blocks again and again. This order was not run on a GPU.
template <bool kOnce, typename F>
__device__ __forceinline__ void for_shares(const Shares& shares, F f) {
  const uint32_t each = shares.tiles, blocks = static_cast<uint32_t>(shares.blocks);
  const uint32_t end = static_cast<uint32_t>(shares.count) * each;
  uint32_t n = blockIdx.x * each;
#pragma unroll 1
  for (uint32_t turn = 0; n < end; ++turn) {
    f(n, turn);
    if constexpr (kOnce) return;
    ++n;
    if (each == 2 && n % 2 != 0) continue;
    if (n / each % blocks != 0) n += blocks * each;
  }
}

// ---- which keys ----

// The key tiles that intervals leave to a block, in the order in which it takes them. Late masked
// ones come first, from the last one down, and then those before the keys that all rows keep. Tiles
// without mask and dropout, whose logits are their scores, come last. If all are masked, all are
// late.
struct KeyTiles {
  int first, end, full_first, full_end;

  FASTATTN_DEVICE int count(const KeyTiles& x) { return x.end - x.first; }
  FASTATTN_DEVICE int masked(const KeyTiles& x) {
    return x.end - x.full_end + x.full_first - x.first;
  }
  // What depends on a list alone is computed where it is used: a producer has few registers.
  FASTATTN_DEVICE int at(const KeyTiles& x, int n) {
    const KeyTiles here = {x.first, opaque_here(x.end), opaque_here(x.full_first), x.full_end};
    const int late = here.end - here.full_end, left = n - masked(here);
    if (n < late) return here.end - 1 - n;
    return left < 0 ? here.first + n - late : here.full_end - 1 - left;
  }
};

// Tiles of `kSize` that meet `some`; those within `all` need no mask. Both lie in the array.
template <int kSize>
FASTATTN_DEVICE KeyTiles order_tiles(const Span& some, const Span& all) {
  if (some.begin >= some.end) return {0, 0, 0, 0};
  const int first = some.begin / kSize, end = (some.end + kSize - 1) / kSize;
  const int full_end = max(first, all.end / kSize);
  const int full_first = max(first, (all.begin + kSize - 1) / kSize);
  if (full_first >= full_end) return {first, end, first, first};
  return {first, end, full_first, full_end};
}

// Whether something else than a mask is known of each pair alone.
FASTATTN_DEVICE bool masks_every_tile(const AttentionParams& p) {
  return !logits_are_scores(p) || p.dropout.enabled;
}

template <typename Range>
FASTATTN_DEVICE Span span_within(int64_t size, const Range& x) {
  return {static_cast<int>(max64(0, min64(size, x.begin))),
          static_cast<int>(max64(0, min64(size, x.end)))};
}

// What limits leave to all rows of a sample; all keys, unless keys vary (mask.h).
template <bool kVary>
FASTATTN_DEVICE KeyRange limits_of(const AttentionParams& p, int b) {
  if constexpr (!kVary) return {0, p.N};
  return limits_at(p.mask, p.N, b, 0);
}

// The key tiles that intervals leave to the next kRowTile rows from i0 on. Where limits vary by
// row, `spans` has the keys of each tile of 64 rows. These full tiles were not run on a GPU.
template <bool kVary, int kKeys, int kRowTile, typename IsMasked>
FASTATTN_DEVICE KeyTiles key_tiles(const AttentionParams& p, const TileSpan* spans, IsMasked masked,
                                   int b, int i0) {
  const auto end_of_rows = [&] { return min64(p.M, int64_t{opaque_here(i0)} + kRowTile); };
  if (kVary && spans != nullptr) {
    const int m = i0 / kTile, count = min(kRowTile / kTile, tiles_in(p.M) - m);
    const TileSpan keys = join(spans + (b * tiles_in(p.M) + m), count);
    return order_tiles<kKeys>(keys.some, masked(p) ? Span{0, 0} : keys.all);
  }
  const Span some = span_within(p.N, tile_range(p.mask, limits_of<kVary>(p, b), i0, end_of_rows()));
  if (some.begin >= some.end || masked(p)) return order_tiles<kKeys>(some, Span{0, 0});
  const int64_t here = opaque_here(i0);
  const KeyRange all = common_range(p.mask, limits_of<kVary>(p, b), here, end_of_rows());
  return order_tiles<kKeys>(some, span_within(p.N, all));
}

// The tiles that pass by what a block owns: the same for each of `heads` heads. Masked ones of all
// heads come first.
struct PassingTile {
  int head, tile;
};
struct TileList {
  KeyTiles of_head;
  int heads;

  FASTATTN_DEVICE int masked(const TileList& x) { return x.heads * KeyTiles::masked(x.of_head); }
  FASTATTN_DEVICE int count(const TileList& x) { return x.heads * KeyTiles::count(x.of_head); }
  FASTATTN_DEVICE PassingTile at(const TileList& x, int n) {
    if (x.heads == 1) return {0, KeyTiles::at(x.of_head, n)};
    const int masked = opaque_here(KeyTiles::masked(x.of_head)), late = n - x.heads * masked;
    const int each = late < 0 ? masked : KeyTiles::count(x.of_head) - masked;
    const int m = late < 0 ? n : late, head = m / each;
    return {head, KeyTiles::at(x.of_head, m - head * each + (late < 0 ? 0 : masked))};
  }
};

// ---- which pairs of a tile ----

// Which keys the intervals leave to each query of a consumer, or which queries to each key: found
// once, and not for each tile that passes by. A warp needs its own lines alone, and finds them. Not
// run on a GPU.
template <typename Layout>
FASTATTN_DEVICE void find_lines(const AttentionParams& p, const Place& at, LineSpans& lines) {
  if (lane() < kWarpRows) {
    const int line = warp_row0() + lane();
    Span found = {0, 0};
    if constexpr (Layout::kLinesAreKeys) {
      const int64_t j = at.j0 + line;
      if (line < at.cols) found = span_within(p.M, rows_of_keys(p.mask, p.M, p.N, at.b, j, j + 1));
    } else if (line < at.rows) {
      found = span_within(p.N, row_range(p.mask, p.N, at.b, at.i0 + line));
    }
    lines[line] = found;
  }
  __syncwarp();
}

// This thread's pairs of the tile at `at` within the intervals. Limits that vary by row leave a key
// no interval of queries: `lines` are then those of the queries, `by_query`. Not run on a GPU.
template <typename Layout>
FASTATTN_DEVICE KeepBits bits_of_lines(const Place& at, const LineSpans& lines, bool by_query) {
  const int first = static_cast<int>(Layout::kLinesAreKeys ? at.i0 : at.j0);
  KeepBits bits = 0;
  if (Layout::kLinesAreKeys && by_query) {
    const int key0 = static_cast<int>(at.j0) + opaque_here(Layout::key0());
    const int query0 = opaque_here(Layout::query0());
#pragma unroll
    for (int x = 0; x < Layout::kQueries; ++x) {
      const Span keys = lines[query0 + Layout::query(x)];
#pragma unroll
      for (int y = 0; y < Layout::kKeys; ++y) {
        const int key = key0 + Layout::key(y);
        if (keys.begin <= key && key < keys.end) bits |= KeepBits{1} << Layout::pair(x, y);
      }
    }
    return bits;
  }
#pragma unroll
  for (int n = 0; n < Layout::kLines; ++n) {
    const Span line = lines[sum_row(2 * n)];
    bits |= (Layout::before(line.end - first) & ~Layout::before(line.begin - first))
            << n * Layout::kLineBits;
  }
  return bits;
}

// ---- what a dense mask leaves of them ----

// How many tiles are masked, and how many there are.
struct TileCounts {
  int masked, all;
};

// Of a list of tiles, the places of those that a dense mask leaves: masked ones, then whole ones.
template <int kMost, int kBlockWarps>
struct FoundTiles {
  uint16_t places[kMost];
  TileCounts of_warp[kBlockWarps];
};

// By all threads of a block, which has one tile then. kept_of(tile) says what the mask keeps of a
// tile. A barrier has to follow.
template <int kMost, int kBlockWarps, typename KeptOf>
FASTATTN_DEVICE void find_tiles(const TileList& list, KeptOf kept_of,
                                FoundTiles<kMost, kBlockWarps>& found) {
  // Calls f(place, masked, whole) for the tiles of a warp, 32 neighbours at a time.
  const int count = TileList::count(list), each = (count + kBlockWarps - 1) / kBlockWarps;
  const auto for_tiles = [&](auto f) {
    const int begin = warp() * each, end = min(count, begin + each);
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      const int n = first + lane();
      int kept = n < end ? kept_of(TileList::at(list, n)) : kKeepsNone;
      if (kept == kKeepsAll && n < TileList::masked(list)) kept = kKeepsSome;
      f(n, kept == kKeepsSome, kept == kKeepsAll);
    }
  };
  TileCounts mine = {0, 0};
  for_tiles([&](int, bool masked, bool whole) {
    mine.masked += __popc(__ballot_sync(kAllLanes, masked));
    mine.all += __popc(__ballot_sync(kAllLanes, masked || whole));
  });
  if (lane() == 0) found.of_warp[warp()] = mine;
  __syncthreads();
  int next_masked = 0, next_whole = 0;
  for (int n = 0; n < kBlockWarps; ++n) {
    const TileCounts& x = found.of_warp[n];
    next_masked += n < warp() ? x.masked : 0;
    next_whole += x.masked + (n < warp() ? x.all - x.masked : 0);
  }
  const uint32_t before = (1u << lane()) - 1;
  for_tiles([&](int n, bool masked, bool whole) {
    const uint32_t all_masked = __ballot_sync(kAllLanes, masked);
    const uint32_t all_whole = __ballot_sync(kAllLanes, whole);
    if (masked) found.places[next_masked + __popc(all_masked & before)] = static_cast<uint16_t>(n);
    if (whole) found.places[next_whole + __popc(all_whole & before)] = static_cast<uint16_t>(n);
    next_masked += __popc(all_masked), next_whole += __popc(all_whole);
  });
}

// Behind the barrier, by a warp.
template <int kMost, int kBlockWarps>
FASTATTN_DEVICE TileCounts count_tiles(const AttentionParams& p, const TileList& list,
                                       const FoundTiles<kMost, kBlockWarps>& found) {
  if (!has_dense(p.mask)) return {TileList::masked(list), TileList::count(list)};
  const TileCounts x = lane() < kBlockWarps ? found.of_warp[lane()] : TileCounts{0, 0};
  return {__reduce_add_sync(kAllLanes, x.masked), __reduce_add_sync(kAllLanes, x.all)};
}
template <int kMost, int kBlockWarps>
FASTATTN_DEVICE PassingTile tile_at(const AttentionParams& p, const TileList& list,
                                    const FoundTiles<kMost, kBlockWarps>& found, int n) {
  return TileList::at(list, has_dense(p.mask) ? found.places[n] : n);
}

}  // namespace fastattn::cuda
