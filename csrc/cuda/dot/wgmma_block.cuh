// What a block of forward_wgmma.cu has, and the work of its consumers.
#pragma once

#include <cstddef>

#include "cuda/base/ptx_wgmma.cuh"
#include "cuda/base/tensor_map.h"
#include "cuda/dot/forward.cuh"
#include "cuda/dot/wgmma_tiles.cuh"

namespace fastattn::cuda {

struct WgmmaArgs {
  ForwardParams p;
  Shares shares;
  const TileSpan* spans;  // of keys
  DenseTiles dense;
  float unit, slack;  // of logits; what they may exceed a row's maximum by, 1 / unit
  CUtensorMap q, k, v;
};

// What a block consists of: a producer and consumers of 64 rows, with so many registers a thread. A
// block is launched with a multiple of 8 registers a thread, and has no others: what consumers do
// not take is the producer's.
template <int kConsumersOf, int kRegistersOf>
struct Groups {
  static constexpr int kConsumers = kConsumersOf, kBlock = kWarpgroup * (kConsumers + 1);
  static constexpr int kLaunched = 65536 / kBlock / 8 * 8;
  static constexpr int kConsumerRegisters = kRegistersOf;
  static constexpr int kProducerRegisters =
      (kConsumers + 1) * kLaunched - kConsumers * kConsumerRegisters;
  static constexpr int kRowTile = kTile * kConsumers, kBlockWarps = kBlock / 32;
};

// What depends on the head size: consumers, keys of a tile, stages, panels. O of 256 columns has
// 128 registers a thread. 80 keys are what then fits beside it, and two stages of what fits the
// shared memory. Three consumers would spill with heads over 64.
template <int kDim>
struct Plan : Groups<kDim == 64 ? 3 : 2, kDim == 64 ? 160 : 232> {
  static constexpr int kKeys = kDim == 256 ? 80 : 128;
  static constexpr int kStages = kDim == 64 ? 4 : 2, kPanels = kDim / kPanel;
  static constexpr int kPlaces = kDim == 256 ? 896 : 8192;  // of tiles under a dense mask
};
// Kernels whose blocks have one tile: another one would make them spill.
template <int kDim, bool kCurved>
constexpr bool kHasOneTile = kCurved || kDim == 256;

template <int kDim>
struct alignas(1024) WgmmaMemory {
  using Of = Plan<kDim>;
  uint16_t q[Of::kConsumers][Of::kPanels][kTile * kPanel];
  uint16_t k[Of::kStages][Of::kPanels][Of::kKeys * kPanel];
  uint16_t v[Of::kStages][Of::kPanels][Of::kKeys * kPanel];
  Barrier q_full[Of::kConsumers], k_full[Of::kStages], v_full[Of::kStages];
  Barrier q_empty[Of::kConsumers], k_empty[Of::kStages], v_empty[Of::kStages];
  TileList list;  // of blocks with one tile
  FoundTiles<Of::kPlaces, Of::kBlockWarps> found;
  TileCounts counts[Of::kConsumers];  // for these queries
  LineSpans lines[Of::kConsumers];
  int tile[Of::kStages];  // of keys
};

static_assert(sizeof(WgmmaMemory<256>) <= 227 << 10);  // what a block may have

// A place in the ring of stages.
template <int kStages>
struct Stage {
  uint32_t number = 0, parity = 0;  // parity: of the phase that fills it

  __device__ __forceinline__ Stage next() const {
    return {(number + 1) % kStages, parity ^ (number + 1) / kStages};
  }
};

// Starts the copy of as many rows of an operand as `to` has.
template <int kPanels, int kNumbers>
FASTATTN_DEVICE void load_operand(const CUtensorMap& map, Barrier* full, int64_t row, int h, int b,
                                  uint16_t (&to)[kPanels][kNumbers]) {
  for (int panel = 0; panel < kPanels; ++panel)
    load_box(to[panel], map, full, panel * kPanel, static_cast<int>(row), h, b);
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

// Calls f(place, half, scores) for both halves in turn.
template <int kScoreTiles, typename F>
FASTATTN_DEVICE void for_halves(const AttentionParams& p, Place at, int64_t j0,
                                float (&s)[kScoreTiles][4], F f) {
  using Half = HalfOfKeys<kScoreTiles>;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    at.j0 = j0 + n * 8 * Half::kTiles, at.cols = extent(p.N, at.j0);
    f(at, n, *reinterpret_cast<Pairs<Half>*>(&s[n * Half::kTiles]));
  }
}

// The pairs of this thread that are kept of a tile.
template <typename Layout>
FASTATTN_DEVICE KeepBits tile_bits(const AttentionParams& p, const DenseTiles& dense,
                                   const LineSpans& lines, const Place& at, bool by_query = false) {
  const KeepBits inside = bits_of_lines<Layout>(at, lines, by_query);
  return partial_bits<Layout>(p, at, inside, [&](KeepBits inside) {
    return inside == 0 ? 0 : dense_bits<Layout>(dense, at);
  });
}

template <int kScoreTiles>
FASTATTN_DEVICE void mask_tile_scores(const AttentionParams& p, const Place& at, int64_t j0,
                                      const KeepBits (&bits)[2], float (&s)[kScoreTiles][4]) {
  using Half = HalfOfKeys<kScoreTiles>;
  for_halves(p, at, j0, s, [&](const Place& here, int n, Pairs<Half>& half) {
    mask_scores<Half>(p, here, bits[n], half);
  });
}
template <int kScoreTiles>
FASTATTN_DEVICE void drop_tile_weights(const AttentionParams& p, const Place& at, int64_t j0,
                                       float (&s)[kScoreTiles][4]) {
  using Half = HalfOfKeys<kScoreTiles>;
  if (!p.dropout.enabled) return;
  for_halves(p, at, j0, s, [&](const Place& here, int, Pairs<Half>& half) {
    drop(p, surviving_bits<Half>(p, here), half);
  });
}

// P as operand A: f(pair, x) of each.
template <DType kType, int kTiles, typename F>
FASTATTN_DEVICE void pack_weights(const float (&s)[kTiles][4], uint32_t (&w)[kTiles / 2][4], F f) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int v = 0; v < 4; v += 2)
      w[n / 2][n % 2 * 2 + v / 2] =
          pack_pair<kType>(f(4 * n + v, s[n][v]), f(4 * n + v + 1, s[n][v + 1]));
}
template <DType kType, int kTiles>
FASTATTN_DEVICE void pack_weights(const float (&s)[kTiles][4], uint32_t (&w)[kTiles / 2][4]) {
  pack_weights<kType>(s, w, [](int, float x) { return x; });
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
  const DenseTiles& dense;
  WgmmaMemory<kDim>& memory;
  int group;
  const float &unit, &slack;     // of logits
  uint64_t q, first_k, first_v;  // descriptors; the latter two of stage 0
  Stage<Of::kStages> of_scores = {}, of_values = {};
  Place at = {};
  SdpaState state = {};
  SdpaStep step = {};
  float o[kDim / 8][4] = {};
  float s[Of::kKeys / 8][4] = {};
  uint32_t w[Of::kKeys / 16][4] = {};
  KeepBits kept[2] = {};  // of both halves of a tile

  __device__ __forceinline__ Consumer(const WgmmaArgs& a, WgmmaMemory<kDim>& memory, int group)
      : p(a.p),
        dense(a.dense),
        memory(memory),
        group(group),
        unit(a.unit),
        slack(a.slack),
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
    clear(o);
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
  // Where the keys begin of the stage whose K is full.
  __device__ __forceinline__ int64_t first_key() {
    const volatile int& tile = memory.tile[of_scores.number];
    return int64_t{same_for_warp(tile)} * Of::kKeys;
  }
  // Whether these are later keys than the band leaves to these rows. Other consumers may need them.
  __device__ __forceinline__ bool is_late() {
    wait_for_phase(&memory.k_full[of_scores.number], of_scores.parity);
    return first_key() >= band_end(p.mask, at.i0 + at.rows - 1);
  }
  __device__ __forceinline__ void pass_by() {
    wait_for_phase(&memory.v_full[of_scores.number], of_scores.parity);
    __syncwarp();  // its lanes have seen both phases
    release(&memory.k_empty[of_scores.number]);
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

  // Which pairs of a tile are kept: found while its scores are on their way.
  __device__ __forceinline__ void find_kept(int64_t j0) {
    using Half = HalfOfKeys<Of::kKeys / 8>;
    for_halves(p, at, j0, s, [&](const Place& here, int n, Pairs<Half>&) {
      kept[n] = tile_bits<Half>(p, dense, memory.lines[group], here);
    });
  }

  // S -> P.
  template <bool kMasked>
  __device__ __forceinline__ void softmax(int64_t j0) {
    if constexpr (kCurved) curve_scores(p, s);
    if constexpr (kMasked) {
      mask_tile_scores(p, at, j0, kept, s);
      sdpa_softmax_step<true>(unit, slack, state, s, step);
      drop_tile_weights(p, at, j0, s);
    } else {
      sdpa_softmax_step<false>(unit, slack, state, s, step);
    }
  }

  // Where no tile is masked, neither is this one.
  __device__ __forceinline__ void first(bool masked) {
    start_next_scores();
    const int64_t j0 = first_key();
    if (masked) find_kept(j0);
    wait_for_products<0>();
    take_scores();
    if (masked) {
      softmax<true>(j0);
    } else {
      softmax<false>(j0);
    }
    state.l[0] = step.sum[0], state.l[1] = step.sum[1];
    pack_weights<kType>(s, w);
    go_on();
  }

  // The scores of a tile, beside the values of the one before. A curve and a mask leave large heads
  // no registers for weights that a product still reads: there the softmax comes behind it.
  template <bool kMasked>
  __device__ __forceinline__ void next() {
    constexpr bool kBeside = !(kMasked && kCurved && kDim == 256);
    start_next_scores();
    const int64_t j0 = kMasked ? first_key() : 0;
    start_next_values();
    if constexpr (kMasked) find_kept(j0);
    wait_for_products<kBeside ? 1 : 0>();
    take_scores();
    if constexpr (!kBeside) take_values();
    softmax<kMasked>(j0);
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

  // Read where it is used: kept over a loop, it would take a register.
  __device__ __forceinline__ int count() {
    const volatile TileCounts& counts = memory.counts[group];
    return same_for_warp(counts.all);
  }

  // Before a loop: where the compiler does not know that stages are the same for a warp,
  // descriptors cost a loop two moves each.
  __device__ __forceinline__ void keep_uniform() {
    of_scores = {same_for_warp(of_scores.number), same_for_warp(of_scores.parity)};
    of_values = {same_for_warp(of_values.number), same_for_warp(of_values.parity)};
  }

  __device__ __forceinline__ void run(uint32_t turn) {
    wait_for_phase(&memory.q_full[group], turn % 2);
    const volatile TileCounts& counts = memory.counts[group];
    const int masked = same_for_warp(counts.masked);
    if (masked > 0) find_lines<QueryRows>(p, at, memory.lines[group]);
    int n = 0;
    while (n < masked && is_late()) pass_by(), ++n;
    if (n == count()) return release(&memory.q_empty[group]);  // count() waits for all lanes
    first(n < masked);
    ++n;
    keep_uniform();
#pragma unroll 1
    for (; n < masked; ++n) next<true>();
    keep_uniform();
#pragma unroll 1
    for (int left = count() - n; left > 0; --left) next<false>();
    last();
  }

  __device__ __forceinline__ void write() {
    mark(p.workspace, (at.b * p.H + at.h) * ceil_div(p.M, kTile) + at.i0 / kTile, at.rows > 0,
         zero_of(o));
    write_rows<kType, kDim>(p, at, state, o);
  }
};

}  // namespace fastattn::cuda
