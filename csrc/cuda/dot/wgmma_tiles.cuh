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

// Calls f(number, turn) for the tiles of a block's shares, or for its only one.
template <bool kOnce, typename F>
__device__ __forceinline__ void for_shares(const Shares& shares, F f) {
  const uint32_t each = shares.tiles, end = static_cast<uint32_t>(shares.count) * each;
  uint32_t n = blockIdx.x * each;
#pragma unroll 1
  for (uint32_t turn = 0; n < end; ++turn) {
    f(n, turn);
    if constexpr (kOnce) return;
    ++n;
    if (each == 1 || n % 2 == 0) n += static_cast<uint32_t>(shares.blocks - 1) * each;
  }
}

// ---- which keys ----

// The key tiles of a block in the order in which it takes them: from the last masked one down, then
// those before the keys that all rows keep, then tiles without mask and dropout, whose
// logits are their scores. If all are masked, all are late.
struct KeyTiles {
  int first, end, full_first, full_end;

  FASTATTN_DEVICE int count(const KeyTiles& x) { return x.end - x.first; }
  FASTATTN_DEVICE int masked(const KeyTiles& x) {
    return x.end - x.full_end + x.full_first - x.first;
  }
  // What depends on the list alone is computed where it is used: a producer has few registers.
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

// The key tiles that intervals leave to the next kRowTile rows from i0 on. Where limits vary by
// row, `spans` has the keys of each tile of 64 rows, and every tile is masked.
template <int kKeys, int kRowTile, typename IsMasked>
FASTATTN_DEVICE KeyTiles key_tiles(const AttentionParams& p, const Span* spans, IsMasked masked,
                                   int b, int i0) {
  const auto end_of_rows = [&] { return min64(p.M, int64_t{opaque_here(i0)} + kRowTile); };
  const int m = i0 / kTile, count = min(kRowTile / kTile, tiles_in(p.M) - m);
  const Span some = spans != nullptr
                        ? union_of(spans + (b * tiles_in(p.M) + m), count)
                        : span_within(p.N, union_of_ends(p.mask, p.N, b, i0, end_of_rows()));
  if (spans != nullptr || some.begin >= some.end || masked(p))
    return order_tiles<kKeys>(some, Span{0, 0});
  const KeyRange all = common_range(p.mask, p.N, b, opaque_here(i0), end_of_rows());
  return order_tiles<kKeys>(some, span_within(p.N, all));
}

// ---- what a dense mask leaves of them ----
//
// Of the same tiles for each of `heads` heads. A warp looks at 32 of them at a time. kept_of(head,
// tile) says what is kept of one.

// How many tiles are masked, and how many there are.
struct TileCounts {
  int masked, all;
};

// What is kept of tile n of a list, by intervals too.
template <typename KeptOf>
FASTATTN_DEVICE Kept kept_in(const KeyTiles& list, int head, int n, KeptOf kept_of) {
  if (n >= KeyTiles::count(list)) return kKeepsNone;
  const Kept kept = kept_of(head, KeyTiles::at(list, n));
  return kept == kKeepsAll && n < KeyTiles::masked(list) ? kKeepsSome : kept;
}

template <typename KeptOf>
FASTATTN_DEVICE TileCounts count_tiles(const KeyTiles& list, int heads, KeptOf kept_of) {
  TileCounts found = {0, 0};
#pragma unroll 1
  for (int head = 0; head < heads; ++head)
#pragma unroll 1
    for (int first = 0; first < KeyTiles::count(list); first += 32) {
      const Kept kept = kept_in(list, head, first + lane(), kept_of);
      found.masked += __popc(__ballot_sync(kAllLanes, kept == kKeepsSome));
      found.all += __popc(__ballot_sync(kAllLanes, kept != kKeepsNone));
    }
  return found;
}

// Calls f(head, tile) in all lanes for these tiles: masked ones first, in the order of the list.
template <typename KeptOf, typename F>
__device__ __forceinline__ void for_counted(const KeyTiles& list, int heads, KeptOf kept_of, F f) {
#pragma unroll 1
  for (int wanted = kKeepsSome; wanted > 0; wanted -= kKeepsSome - kKeepsAll)
#pragma unroll 1
    for (int head = 0; head < heads; ++head)
#pragma unroll 1
      for (int first = 0; first < KeyTiles::count(list); first += 32) {
        const Kept kept = kept_in(list, head, first + lane(), kept_of);
        uint32_t left = __ballot_sync(kAllLanes, kept == wanted);
#pragma unroll 1
        for (; left != 0; left &= left - 1)
          f(head, KeyTiles::at(list, first + __ffs(static_cast<int>(left)) - 1));
      }
}

}  // namespace fastattn::cuda
