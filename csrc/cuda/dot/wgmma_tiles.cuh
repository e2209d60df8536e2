// Which queries and keys the blocks of forward_wgmma.cu and backward_wgmma.cu take, in which order.
#pragma once

#include "cuda/dot/step.cuh"
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
  uint32_t head;
  int64_t tile;
};
FASTATTN_DEVICE HeadTile tile_of(uint32_t number, int64_t tiles, int share) {
  // A pair comes from both ends of a head, or of two heads with an odd number of tiles each.
  const int64_t list = share == 1 ? tiles : tiles * (1 + tiles % 2);
  int64_t n = take_digit(&number, list);
  if (share == 2) n = n % 2 == 0 ? n / 2 : list - 1 - n / 2;
  return {number * static_cast<uint32_t>(list / tiles) + static_cast<uint32_t>(n / tiles),
          n % tiles};
}

// Its queries. Later ones may have more keys, and come first.
template <int kRowTile>
FASTATTN_DEVICE Place queries_at(const AttentionParams& p, uint32_t number, int share = 1) {
  const int64_t tiles = ceil_div(p.M, kRowTile);
  HeadTile at = tile_of(number, tiles, share);
  const int64_t h = take_digit(&at.head, p.H);
  const bool last_first = later_rows_keep_more(p.mask, p.N);
  return place(p, at.head, h, (last_first ? tiles - 1 - at.tile : at.tile) * kRowTile, 0);
}

// Calls f(number, turn) for the tiles of a block's shares, or for its only one.
template <bool kOnce, typename F>
__device__ __forceinline__ void for_shares(const Shares& shares, F f) {
  const uint32_t each = shares.tiles, end = static_cast<uint32_t>(shares.count) * each;
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t n = (blockIdx.x + turn / each * gridDim.x) * each + turn % each;
    if (n >= end) return;
    f(n, turn);
    if constexpr (kOnce) return;
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
  FASTATTN_DEVICE int at(const KeyTiles& x, int n) {
    const int late = x.end - x.full_end;
    if (n < late) return x.end - 1 - n;
    return n < masked(x) ? x.first + n - late : x.full_end - 1 - (n - masked(x));
  }
};

// What a warp found in a dense mask of keys: the kept ones lie in [begin, end).
struct KeptKeys {
  int begin = 0x7fffffff, end = 0, count = 0;
};

// Tiles of `kSize` that meet `some`; those within `all` need no mask. Both lie in the array.
template <int kSize, typename Range>
FASTATTN_DEVICE KeyTiles order_tiles(const Range& some, const Range& all) {
  if (some.begin >= some.end) return {0, 0, 0, 0};
  const int first = static_cast<int>(some.begin / kSize);
  const int end = static_cast<int>(ceil_div(some.end, kSize));
  const int full_end = static_cast<int>(max64(first, all.end / kSize));
  const int full_first = static_cast<int>(max64(first, ceil_div(all.begin, kSize)));
  if (full_first >= full_end) return {first, end, first, first};
  return {first, end, full_first, full_end};
}

// Whether something else than intervals is known of each pair alone.
FASTATTN_DEVICE bool masks_every_tile(const AttentionParams& p) {
  const bool dense = has_dense(p.mask) && !dense_is_of_keys(p.mask);
  return dense || !logits_are_scores(p) || p.dropout.enabled;
}

FASTATTN_DEVICE KeyRange intersect(const KeyRange& a, const KeyRange& b) {
  return {max64(a.begin, b.begin), min64(a.end, b.end)};
}

// Over a warp, in uniform registers: the compiler then knows that loops are the same for its lanes.
FASTATTN_DEVICE KeptKeys union_of_lanes(const KeptKeys& x) {
  return {__reduce_min_sync(kAllLanes, x.begin), __reduce_max_sync(kAllLanes, x.end),
          __reduce_add_sync(kAllLanes, x.count)};
}

// Before a barrier, by all threads of a block: each warp notes what a dense mask of keys keeps of
// these keys. All lanes go the same way: with others, ptxas would keep what follows in more
// registers, and dK and dV spill.
template <int kBlockWarps>
FASTATTN_DEVICE void scan_keys(const MaskParams& mask, int b, const KeyRange& keys,
                               KeptKeys (&kept)[kBlockWarps]) {
  const DenseMask dense = dense_from(mask, b, 0, 0, 0);
  KeptKeys mine;
#pragma unroll 4
  for (int64_t first = keys.begin; first < keys.end; first += 32 * kBlockWarps) {
    const int64_t last = keys.end - 1, j = min64(first + thread(), last);
    const bool is_kept = dense.data[dense.offset + j * dense.stride_n] != 0;
    const int key = static_cast<int>(j);
    mine.begin = is_kept ? min(mine.begin, key) : mine.begin;
    mine.end = is_kept ? key + 1 : mine.end;
    mine.count += is_kept && first + thread() <= last ? 1 : 0;
  }
  mine = union_of_lanes(mine);
  if (lane() == 0) kept[warp()] = mine;
}

// Behind the barrier: of the keys that were scanned, those that a dense mask of keys leaves to a
// block lie in `some`, and it keeps all that lie in `all`. Other masks are not its business.
struct DenseKeys {
  KeyRange some, all;
};
template <int kBlockWarps>
FASTATTN_DEVICE DenseKeys dense_keys(const AttentionParams& p,
                                     const KeptKeys (&kept)[kBlockWarps]) {
  if (!dense_is_of_keys(p.mask)) return {{0, p.N}, {0, p.N}};
  const KeptKeys found = union_of_lanes(lane() < kBlockWarps ? kept[lane()] : KeptKeys{});
  const KeyRange some = {found.begin, found.end};
  return {some, found.count == found.end - found.begin ? some : KeyRange{p.N, 0}};
}

// `masked` is asked late: known early, it would cost the largest kernel a spill.
template <int kKeys, typename IsMasked>
FASTATTN_DEVICE KeyTiles key_tiles(const AttentionParams& p, IsMasked masked,
                                   const DenseKeys& dense, int b, int64_t i0, int64_t i1) {
  const KeyRange some = intersect(tile_range(p.mask, p.N, b, i0, i1), dense.some);
  if (some.begin >= some.end || masked(p)) return order_tiles<kKeys>(some, KeyRange{p.N, 0});
  return order_tiles<kKeys>(some, intersect(common_range(p.mask, p.N, b, i0, i1), dense.all));
}

}  // namespace fastattn::cuda
