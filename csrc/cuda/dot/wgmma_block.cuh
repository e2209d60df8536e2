// What a block of forward_wgmma.cu has, and the work of its consumers.
#pragma once

#include <cstddef>

#include "cuda/base/ptx_wgmma.cuh"
#include "cuda/base/tensor_map.h"
#include "cuda/dot/forward.cuh"

namespace fastattn::cuda {

// How tiles of queries come to blocks. A share is a tile; or, where a diagonal leaves later rows
// more keys, one from the end of a head and one from its beginning. A block takes share after
// share.
struct Shares {
  int tiles;      // of a share: 1 or 2
  int64_t count;  // in all
  int64_t blocks;
};

struct WgmmaArgs {
  ForwardParams p;
  Shares shares;
  CUtensorMap q, k, v;
};

// What a block consists of: a producer and consumers of 64 rows. The registers of its warpgroups
// add up to at most 64 K.
template <int kConsumersOf>
struct Groups {
  static constexpr int kConsumers = kConsumersOf, kBlock = kWarpgroup * (kConsumers + 1);
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160, kProducerRegisters = 24;
  static constexpr int kRowTile = kTile * kConsumers, kBlockWarps = kBlock / 32;
};

// What a warp found in a dense mask of keys: the kept ones lie in [begin, end).
struct KeptKeys {
  int begin = 0x7fffffff, end = 0, count = 0;
};

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

// What depends on the head size: consumers, keys of a tile, stages, panels. O of 256 columns has
// 128 registers a thread. 80 keys are what then fits beside it, and two stages of what fits the
// shared memory. Three consumers would spill with heads over 64.
template <int kDim>
struct Plan : Groups<kDim == 64 ? 3 : 2> {
  static constexpr int kKeys = kDim == 256 ? 80 : 128;
  static constexpr int kStages = kDim == 64 ? 4 : 2, kPanels = kDim / kPanel;
};

template <int kDim>
struct alignas(1024) WgmmaMemory {
  using Of = Plan<kDim>;
  uint16_t q[Of::kConsumers][Of::kPanels][kTile * kPanel];
  uint16_t k[Of::kStages][Of::kPanels][Of::kKeys * kPanel];
  uint16_t v[Of::kStages][Of::kPanels][Of::kKeys * kPanel];
  Barrier q_full[Of::kConsumers], k_full[Of::kStages], v_full[Of::kStages];
  Barrier q_empty[Of::kConsumers], k_empty[Of::kStages], v_empty[Of::kStages];
  KeptKeys kept[Of::kBlockWarps];
  KeyTiles keys[Of::kConsumers];  // of these queries
};

// A value that is the same for a warp, which the compiler sees only so: it then keeps it, and
// loops, in uniform registers.
template <typename Int>
FASTATTN_DEVICE Int same_for_warp(Int x) {
  return static_cast<Int>(__reduce_max_sync(kAllLanes, static_cast<int>(x)));
}

// A place in the ring of stages.
template <int kStages>
struct Stage {
  uint32_t number = 0, parity = 0;  // parity: of the phase that fills it

  __device__ __forceinline__ Stage next() const {
    return {(number + 1) % kStages, parity ^ (number + 1) / kStages};
  }
};

// ---- which queries and keys ----

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

// The queries of tile `number` of all shares, or of a block. Later ones may have more keys, and
// come first. A head with an odd number of tiles has a pair with none: its queries lie past the
// end.
template <int kRowTile>
FASTATTN_DEVICE Place queries_at(const AttentionParams& p, uint32_t number, int share = 1) {
  const int64_t tiles = ceil_div(p.M, kRowTile), n = take_digit(&number, tiles + tiles % share);
  const int64_t h = take_digit(&number, p.H), last = tiles - 1 - n / share;
  const int64_t tile = later_rows_keep_more(p.mask, p.N) ? (n % share == 0 ? last : n / share) : n;
  return place(p, number, h, (n == tiles ? n : tile) * kRowTile, 0);
}

// Calls f(place, turn) for the tiles of queries of a block, or for its only one.
template <int kRowTile, bool kOnce, typename F>
__device__ __forceinline__ void for_queries(const AttentionParams& p, const Shares& shares, F f) {
  const uint32_t each = shares.tiles, end = static_cast<uint32_t>(shares.count) * each;
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t n = (blockIdx.x + turn / each * gridDim.x) * each + turn % each;
    if (n >= end) return;
    f(queries_at<kRowTile>(p, n, each), turn);
    if constexpr (kOnce) return;
  }
}

// ---- products ----

constexpr uint32_t kRowBytes = 2 * kPanel;
// Along the rows of one panel, in steps of 16 numbers.
constexpr OperandShape kAlongRows = {0, 8 * kRowBytes};
constexpr uint32_t kRowStep = 32;
// Down the columns of all panels of V, in steps of 16 rows.
template <int kKeys>
constexpr OperandShape kDownColumns = {kKeys * kRowBytes, 8 * kRowBytes};
constexpr uint32_t kColumnStep = 16 * kRowBytes;

// From the first 16 numbers of an operand's rows to those of step n, in chunks.
FASTATTN_DEVICE constexpr uint32_t along_rows(uint32_t n, uint32_t rows) {
  return chunks_of(n / 4 * rows * kRowBytes + n % 4 * kRowStep);
}

// Starts S = Q K^T, or S += Q K^T if `keep`.
template <DType kType, int kPanels, int kTiles>
FASTATTN_DEVICE void start_scores(uint64_t q, uint64_t k, float (&s)[kTiles][4],
                                  bool keep = false) {
  hold(s);
  fence_products();
#pragma unroll
  for (uint32_t n = 0; n < 4 * kPanels; ++n)
    multiply_shared<kType>(s, advance(q, along_rows(n, kTile)),
                           advance(k, along_rows(n, 8 * kTiles)), keep || n > 0);
  commit_products();
}
// The same where Q is in registers.
template <DType kType, int kSteps, int kTiles>
FASTATTN_DEVICE void start_scores(uint32_t (&q)[kSteps][4], uint64_t k, float (&s)[kTiles][4],
                                  bool keep = false) {
  hold(q), hold(s);
  fence_products();
#pragma unroll
  for (uint32_t n = 0; n < kSteps; ++n)
    multiply_registers<kType, false>(s, q[n], advance(k, along_rows(n, 8 * kTiles)), keep || n > 0);
  commit_products();
}

// Starts O += P V.
template <DType kType, int kSteps, int kTiles>
FASTATTN_DEVICE void start_values(uint32_t (&w)[kSteps][4], uint64_t v, float (&o)[kTiles][4]) {
  hold(w), hold(o);
  fence_products();
#pragma unroll
  for (uint32_t n = 0; n < kSteps; ++n)
    multiply_registers<kType, true>(o, w[n], advance(v, chunks_of(n * kColumnStep)), true);
  commit_products();
}

// ---- weights ----

// A half of a tile's keys: a thread has at most 32 pairs of it, a bit for each.
template <int kScoreTiles>
struct HalfOfKeys : QueryRows {
  static constexpr int kTiles = kScoreTiles / 2, kKeys = 2 * kTiles;
  static_assert(kScoreTiles % 2 == 0 && kTiles <= QueryRows::kTiles);
  // What depends on these is computed where it is used: O takes most registers.
  FASTATTN_DEVICE int query0() { return opaque_here(QueryRows::query0()); }
  FASTATTN_DEVICE int key0() { return opaque_here(QueryRows::key0()); }
  FASTATTN_DEVICE KeepBits before(int end) {
    return SumLines<false, kTiles>::columns_before(end, key0());
  }
};

// Calls f(place, scores) for both halves in turn.
template <int kScoreTiles, typename F>
FASTATTN_DEVICE void for_halves(const AttentionParams& p, Place at, int64_t j0,
                                float (&s)[kScoreTiles][4], F f) {
  using Half = HalfOfKeys<kScoreTiles>;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    at.j0 = j0 + n * 8 * Half::kTiles, at.cols = extent(p.N, at.j0);
    f(at, *reinterpret_cast<Pairs<Half>*>(&s[n * Half::kTiles]));
  }
}

template <int kScoreTiles>
FASTATTN_DEVICE void mask_tile_scores(const AttentionParams& p, const Place& at, int64_t j0,
                                      float (&s)[kScoreTiles][4]) {
  using Half = HalfOfKeys<kScoreTiles>;
  for_halves(p, at, j0, s, [&](const Place& here, Pairs<Half>& half) {
    mask_scores<Half>(p, here, partial_bits<Half>(p, here), half);
  });
}
template <int kScoreTiles>
FASTATTN_DEVICE void drop_tile_weights(const AttentionParams& p, const Place& at, int64_t j0,
                                       float (&s)[kScoreTiles][4]) {
  using Half = HalfOfKeys<kScoreTiles>;
  if (!p.dropout.enabled) return;
  for_halves(p, at, j0, s, [&](const Place& here, Pairs<Half>& half) {
    drop(p, surviving_bits<Half>(p, here), half);
  });
}

// P as operand A.
template <DType kType, int kTiles>
FASTATTN_DEVICE void pack_weights(const float (&s)[kTiles][4], uint32_t (&w)[kTiles / 2][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      w[n / 2][n % 2 * 2 + r] = pack_pair<kType>(s[n][2 * r], s[n][2 * r + 1]);
}

// Makes O and l sums of all tiles so far. Most tiles leave the maxima as they are (softmax.cuh).
template <int kTiles>
FASTATTN_DEVICE void rescale(float unit, const SdpaStep& step, SdpaState& state,
                             float (&o)[kTiles][4]) {
  if (!__any_sync(kAllLanes, step.raised)) {
    state.l[0] += step.sum[0], state.l[1] += step.sum[1];
    return;
  }
  float alpha[2];
  sdpa_add_sums(unit, step, state, alpha);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int v = 0; v < 4; ++v) o[n][v] *= alpha[v / 2];
}

// The threads of a warp have read a stage.
FASTATTN_DEVICE void release(Barrier* empty) {
  if (lane() == 0) arrive(empty);
}

// NaN if a result is not finite, else 0.
template <int kTiles>
FASTATTN_DEVICE float zero_of(const float (&o)[kTiles][4]) {
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < 4 * kTiles; ++n) sum += o[n / 4][n % 4] * 0.f;
  return sum;
}
// Marks this warp of a tile unless all its results are finite. `inside`: whether the tile is.
FASTATTN_DEVICE void mark(void* marks, int64_t tile, bool inside, float zero) {
  const bool bad = __any_sync(kAllLanes, zero != 0.f);
  if (inside && lane() == 0) static_cast<uint8_t*>(marks)[tile * kWarps + warp() % kWarps] = bad;
}

template <DType kType, int kDim, bool kCurved>
struct Consumer {
  using Of = Plan<kDim>;
  const ForwardParams& p;
  WgmmaMemory<kDim>& memory;
  int group;
  float unit;                    // of logits
  uint64_t q, first_k, first_v;  // descriptors; the latter two of stage 0
  Stage<Of::kStages> of_scores = {}, of_values = {};
  Place at = {};
  SdpaState state = {};
  SdpaStep step = {};
  float o[kDim / 8][4] = {};
  float s[Of::kKeys / 8][4] = {};
  uint32_t w[Of::kKeys / 16][4] = {};

  __device__ __forceinline__ Consumer(const WgmmaArgs& a, WgmmaMemory<kDim>& memory, int group)
      : p(a.p),
        memory(memory),
        group(group),
        unit(unit_of(a.p)),
        q(describe(memory.q[group], kAlongRows)),
        first_k(at_offset(memory, offsetof(WgmmaMemory<kDim>, k), kAlongRows)),
        first_v(at_offset(memory, offsetof(WgmmaMemory<kDim>, v), kDownColumns<Of::kKeys>)) {}

  // Both from one address, which stays in a register.
  __device__ static uint64_t at_offset(const WgmmaMemory<kDim>& memory, size_t bytes,
                                       OperandShape shape) {
    return advance(describe(&memory, shape), chunks_of(bytes));
  }

  // The queries of a block, of which these are a part.
  __device__ __forceinline__ void begin(const Place& block) {
    at = block;
    at.i0 += group * kTile, at.rows = extent(p.M, at.i0);
    state = {{-kInfinity, -kInfinity}, {0.f, 0.f}};
#pragma unroll
    for (int n = 0; n < kDim / 2; ++n) o[n / 4][n % 4] = 0.f;
  }

  __device__ __forceinline__ void start_next_scores() {
    wait_for_phase(&memory.k_full[of_scores.number], of_scores.parity);
    start_scores<kType, Of::kPanels>(
        Of::kPanels > 2 ? here(q) : q,
        advance(first_k, of_scores.number * chunks_of(sizeof(memory.k[0]))), s);
  }
  __device__ __forceinline__ void start_next_values() {
    wait_for_phase(&memory.v_full[of_values.number], of_values.parity);
    start_values<kType>(w, advance(first_v, of_values.number * chunks_of(sizeof(memory.v[0]))), o);
  }
  // Later keys than the band leaves to these rows. The other consumers may need them.
  __device__ __forceinline__ bool is_late(int tile) {
    return int64_t{tile} * Of::kKeys >= band_end(p.mask, at.i0 + at.rows - 1);
  }
  __device__ __forceinline__ void pass_by() {
    wait_for_phase(&memory.k_full[of_scores.number], of_scores.parity);
    release(&memory.k_empty[of_scores.number]);
    wait_for_phase(&memory.v_full[of_scores.number], of_scores.parity);
    release(&memory.v_empty[of_scores.number]);
    of_scores = of_scores.next();
  }
  // Once their products are done:
  __device__ __forceinline__ void take_scores() {
    hold(s);
    release(&memory.k_empty[of_scores.number]);
  }
  __device__ __forceinline__ void take_values() {
    hold(w), hold(o);
    release(&memory.v_empty[of_values.number]);
  }
  __device__ __forceinline__ void go_on() {
    of_values = of_scores;
    of_scores = of_scores.next();
  }

  // S -> P.
  template <bool kMasked>
  __device__ __forceinline__ void softmax(int tile) {
    if constexpr (kCurved) curve_scores(p, s);
    if constexpr (kMasked) {
      const int64_t j0 = static_cast<int64_t>(tile) * Of::kKeys;
      mask_tile_scores(p, at, j0, s);
      sdpa_softmax_step<true>(unit, state, s, step);
      drop_tile_weights(p, at, j0, s);
    } else {
      sdpa_softmax_step<false>(unit, state, s, step);
    }
  }

  // Where no tile is masked, neither is this one.
  __device__ __forceinline__ void first(int tile, bool masked) {
    start_next_scores();
    wait_for_products<0>();
    take_scores();
    if (masked) {
      softmax<true>(tile);
    } else {
      softmax<false>(tile);
    }
    state.l[0] = step.sum[0], state.l[1] = step.sum[1];
    pack_weights<kType>(s, w);
    go_on();
  }

  // The scores of a tile, beside the values of the one before. A curve and a mask leave large heads
  // no registers for weights that a product still reads: there the softmax comes behind it.
  template <bool kMasked>
  __device__ __forceinline__ void next(int tile) {
    constexpr bool kBeside = !(kMasked && kCurved && kDim == 256);
    start_next_scores();
    start_next_values();
    wait_for_products<kBeside ? 1 : 0>();
    take_scores();
    if constexpr (!kBeside) take_values();
    softmax<kMasked>(tile);
    if constexpr (kBeside) {
      keep_before_wait(s);
      wait_for_products<0>();
      take_values();
    }
    rescale(unit, step, state, o);
    pack_weights<kType>(s, w);
    go_on();
  }

  __device__ __forceinline__ void last() {
    release(&memory.q_empty[group]);
    start_next_values();
    wait_for_products<0>();
    take_values();
  }

  // Read where they are used: kept over a loop, they would take registers.
  __device__ __forceinline__ KeyTiles keys() {
    const volatile KeyTiles& x = memory.keys[group];
    return {x.first, x.end, x.full_first, x.full_end};
  }
  __device__ __forceinline__ int count() { return same_for_warp(KeyTiles::count(keys())); }
  __device__ __forceinline__ int tile_at(int n) { return same_for_warp(KeyTiles::at(keys(), n)); }

  // Before a loop: where the compiler does not know that stages are the same for a warp,
  // descriptors cost a loop two moves each.
  __device__ __forceinline__ void keep_uniform() {
    of_scores = {same_for_warp(of_scores.number), same_for_warp(of_scores.parity)};
    of_values = {same_for_warp(of_values.number), same_for_warp(of_values.parity)};
  }

  __device__ __forceinline__ void run(uint32_t turn) {
    wait_for_phase(&memory.q_full[group], turn % 2);
    const int masked = same_for_warp(KeyTiles::masked(keys()));
    int n = 0;
    while (n < masked && is_late(tile_at(n))) pass_by(), ++n;
    if (n == count()) return release(&memory.q_empty[group]);
    first(tile_at(n), n < masked);
    ++n;
    keep_uniform();
#pragma unroll 1
    for (; n < masked; ++n) next<true>(tile_at(n));
    keep_uniform();
#pragma unroll 1
    for (int left = count() - n; left > 0; --left) next<false>(0);
    last();
  }

  __device__ __forceinline__ void write() {
    mark(p.workspace, (at.b * p.H + at.h) * ceil_div(p.M, kTile) + at.i0 / kTile, at.rows > 0,
         zero_of(o));
    write_rows<kType, kDim>(p, at, state, o);
  }
};

}  // namespace fastattn::cuda
