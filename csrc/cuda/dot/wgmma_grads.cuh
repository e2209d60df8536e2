// What a block of backward_wgmma.cu has, and the work of its consumers.
#pragma once

#include <cstddef>

#include "cuda/dot/backward.cuh"
#include "cuda/dot/wgmma_block.cuh"

namespace fastattn::cuda {

// Of an operand and a gradient of the output, or of their products: what S and what dP is made of.
constexpr int kOfScores = 0, kOfGrads = 1;

struct WgmmaGradArgs {
  BackwardParams p;
  Shares shares;
  int heads;  // that share keys, if blocks own keys; or 1
  Spans spans;
  DenseTiles dense;
  float unit;  // of logits
  uint8_t* marks;
  // What blocks own, and what passes by: K, V and Q, dO; or the reverse.
  CUtensorMap own[2], passing[2];
};

constexpr int kConsumers = 2, kPlaces = 16384;  // places: of tiles under a dense mask
// dK and dV of 128 columns leave no registers: their blocks have one tile.
template <bool kOfKeys, int kDim>
struct GradGroups : Groups<kConsumers, kOfKeys && kDim == 128 ? 240 : 232> {
  static constexpr bool kOnce = kOfKeys && kDim == 128;
};
using AnyGroups = GradGroups<false, 64>;
constexpr int kRowTile = AnyGroups::kRowTile, kBlock = AnyGroups::kBlock;

template <int kDim>
struct GradPlan {
  static constexpr int kStages = kDim == 64 ? 4 : 3, kPanels = kDim / kPanel;
};

template <int kDim>
struct alignas(1024) WgmmaGradMemory {
  using Of = GradPlan<kDim>;
  using Operand = uint16_t[Of::kPanels][kTile * kPanel];
  Operand own[2][kConsumers];
  Operand passing[Of::kStages][2];
  RowMemory rows[Of::kStages];  // of a consumer, or of what passes by
  Barrier own_full, own_empty, full[Of::kStages], empty[Of::kStages];
  TileList list;  // of blocks with one tile
  FoundTiles<kPlaces, AnyGroups::kBlockWarps> found;
  TileCounts counts;  // for what the block owns now
  LineSpans lines[kConsumers];
  LineSpans passing_lines[Of::kStages];  // where limits vary by row
  PassingTile tiles[Of::kStages];
};

// ---- which tiles ----

// The tiles of rows that visit the next kRowTile keys from j0 on.
template <bool kVary>
FASTATTN_DEVICE KeyTiles row_tiles(const WgmmaGradArgs& a, bool masked, int b, int j0) {
  const BackwardParams& p = a.p;
  const auto end_of_keys = [&] { return int64_t{opaque_here(j0)} + kRowTile; };
  if (kVary && a.spans.queries != nullptr) {
    const int n = j0 / kTile, count = min(kConsumers, tiles_in(p.N) - n);
    const TileSpan tiles = join(a.spans.queries + (b * tiles_in(p.N) + n), count);
    return order_tiles<1>(tiles.some, masked ? Span{0, 0} : tiles.all);
  }
  const int64_t j1 = min64(p.N, end_of_keys());
  const Span some = span_within(p.M, rows_of_keys(p.mask, limits_of<kVary>(p, b), p.M, j0, j1));
  if (masked || some.begin >= some.end) return order_tiles<kTile>(some, Span{0, 0});
  const int64_t here = opaque_here(j0);
  const RowRange all = rows_of_all_keys(p.mask, limits_of<kVary>(p, b), p.M, here, end_of_keys());
  return order_tiles<kTile>(some, span_within(p.M, all));
}

template <bool kVary, bool kOfKeys>
FASTATTN_DEVICE TileList passing_tiles(const WgmmaGradArgs& a, const Place& at) {
  const bool masked = masks_every_tile(a.p) || a.p.grad_weights.data != nullptr;
  if constexpr (kOfKeys)
    return {row_tiles<kVary>(a, masked, at.b, static_cast<int>(at.j0)), a.heads};
  const auto known = [&](const AttentionParams&) { return masked; };
  const int i0 = static_cast<int>(at.i0);
  return {key_tiles<kVary, kTile, kRowTile>(a.p, a.spans.keys, known, at.b, i0), 1};
}
// As a producer finds them. A block with one tile has found its list beforehand.
template <bool kOfKeys, int kDim>
FASTATTN_DEVICE TileList listed_tiles(const WgmmaGradArgs& a, const Place& at,
                                      const WgmmaGradMemory<kDim>& memory) {
  if constexpr (GradGroups<kOfKeys, kDim>::kOnce) return memory.list;
  return keys_vary(a.p.mask) ? memory.list : passing_tiles<false, kOfKeys>(a, at);
}

// Where a tile that passes by is.
template <bool kOfKeys>
FASTATTN_DEVICE Place at_passing(const AttentionParams& p, Place at, const PassingTile& which) {
  const int64_t first = int64_t{which.tile} * kTile;
  if constexpr (kOfKeys) {
    at.h += which.head, at.i0 = first, at.rows = extent(p.M, first);
  } else {
    at.j0 = first, at.cols = extent(p.N, first);
  }
  return at;
}

// ---- consumers ----

// The gradients of 64 keys, or of 64 queries, of the warpgroup.
template <bool kOfKeys, DType kType, int kDim>
struct GradConsumer {
  using Of = GradPlan<kDim>;
  using Memory = WgmmaGradMemory<kDim>;
  using Layout = std::conditional_t<kOfKeys, KeyRows, QueryRows>;
  // The products of dS run beside the next tile's S and dP. dK and dV of 128 columns leave no
  // registers for the operand, which stays until then.
  static constexpr bool kAhead = !kOfKeys || kDim == 64;
  // How many of the two own operands stay in registers. A product of 64 x 64 takes all that shared
  // memory gives if both operands come from there. At 128, an H200 is slower with one in registers.
  static constexpr int kHeld = kDim == 64 ? 2 : 0, kSteps = kDim / 16;
  const WgmmaGradArgs& a;
  Place at = {};
  Memory& memory;
  int group;
  uint64_t own, passing, down;  // descriptors: of what S is made of, in stage 0
  Stage<Of::kStages> stage = {};
  uint32_t last = 0;  // the stage of the tile before
  uint32_t held[kHeld == 0 ? 1 : kHeld][kSteps][4] = {};
  float s[kTile / 8][4] = {}, ds[kTile / 8][4] = {};
  uint32_t w[kTile / 16][4] = {}, dw[kTile / 16][4] = {};  // both as operands
  float of_scores[kDim / 8][4] = {};                       // dK or dQ, without the scale
  float of_weights[kOfKeys ? kDim / 8 : 1][4] = {};        // dV

  __device__ __forceinline__ GradConsumer(const WgmmaGradArgs& a, Memory& memory, int group)
      : a(a),
        memory(memory),
        group(group),
        own(describe(memory.own[kOfScores][group], kAlongRows)),
        passing(describe(memory.passing, kAlongRows)),
        down(describe(memory.passing, kDownColumns<kTile>)) {}

  static constexpr uint32_t kOwn = chunks_of(sizeof(Memory::own[0]));
  static constexpr uint32_t kStage = chunks_of(sizeof(Memory::passing[0]));
  static constexpr uint32_t kPassing = chunks_of(sizeof(Memory::passing[0][0]));

  __device__ __forceinline__ const RowMemory& rows() {
    return memory.rows[kOfKeys ? stage.number : group];
  }

  __device__ __forceinline__ void hold_own() {
#pragma unroll
    for (int n = 0; n < kHeld * kSteps; ++n) {
      const uint16_t* const panel = memory.own[n / kSteps][group][n % kSteps / 4];
      const int row = warp_row0() + lane() % 16, chunk = n % 4 * 2 + lane() / 16;
      load_matrices<false>(panel + chunk_index<kPanel>(row, chunk), held[n / kSteps][n % kSteps]);
    }
  }

  // Starts dK += dS Q, or dQ += dS K.
  __device__ __forceinline__ void start_of_scores(uint32_t from) {
    start_values<kType>(dw, advance(down, from * kStage), of_scores);
  }
  // Starts dV += W dO, where W is P after dropout.
  template <bool kMasked>
  __device__ __forceinline__ void start_of_weights(KeepBits survivors) {
    if constexpr (kOfKeys) {
      if (kMasked && a.p.dropout.enabled) {
        pack_weights<kType>(s, w,
                            [&](int n, float x) { return dropped(a.p, kept(survivors, n), x); });
      } else {
        pack_weights<kType>(s, w);
      }
      start_values<kType>(w, advance(down, stage.number * kStage + kPassing), of_weights);
    }
  }
  template <int kWhich>
  __device__ __forceinline__ void start_product(uint64_t first, float (&to)[kTile / 8][4],
                                                bool keep) {
    const uint64_t other = advance(first, kWhich * kPassing);
    if constexpr (kWhich < kHeld)
      start_scores<kType>(held[kWhich], other, to, keep);
    else
      start_scores<kType, Of::kPanels>(advance(here(own), kWhich * kOwn), other, to, keep);
  }
  // Starts S, and dP on top of what is there if `keep`. Before the first tile dS is 0, and its
  // product with what is in that tile's stage adds nothing.
  __device__ __forceinline__ void start_tile(bool keep) {
    const uint64_t first = advance(passing, stage.number * kStage);
    wait_for_phase(&memory.full[stage.number], stage.parity);
    start_product<kOfScores>(first, s, false);
    if constexpr (kAhead) start_of_scores(last);
    start_product<kOfGrads>(first, ds, keep);
  }

  // Once all products of a stage are done, if it was taken.
  __device__ __forceinline__ void leave(uint32_t number, bool taken) {
    hold(dw), hold(of_scores);
    __syncwarp();  // its lanes have read the rows
    if (taken) release(&memory.empty[number]);
  }
  // Once dP is done, and with it the products of dS.
  __device__ __forceinline__ void take_grads(bool is_first) {
    hold(ds);
    if constexpr (kAhead) leave(last, !is_first);
  }
  __device__ __forceinline__ void end_tile() {
    pack_weights<kType>(ds, dw);
    if constexpr (!kAhead) start_of_scores(stage.number);
    if constexpr (kOfKeys || !kAhead) wait_for_products<0>();
    if constexpr (kOfKeys) hold(w), hold(of_weights);
    if constexpr (!kAhead) leave(stage.number, true);
    last = stage.number;
    stage = stage.next();
  }

  __device__ __forceinline__ Place passing_place() {
    const volatile PassingTile& which = memory.tiles[stage.number];
    return at_passing<kOfKeys>(a.p, at, {which.head, which.tile});
  }

  template <bool kMasked>
  __device__ __forceinline__ void take_tile(bool is_first) {
    const BackwardParams& p = a.p;
    const bool has_grad = kMasked && p.grad_weights.data != nullptr;
    if (has_grad) {
      wait_for_phase(&memory.full[stage.number], stage.parity);
      const Place here = passing_place();
      load_grad_weights<Layout, kType>(p, here, bits_within<Layout>(here.rows, here.cols), ds);
    }
    start_tile(has_grad);
    KeepBits bits = kAllKept, survivors = kAllKept;
    if constexpr (kMasked) {
      const Place here = passing_place();
      const bool by_query = kOfKeys && a.spans.rows != nullptr;
      const LineSpans& lines =
          by_query ? memory.passing_lines[opaque_here(stage.number)] : memory.lines[group];
      bits = tile_bits<Layout>(p, a.dense, lines, here, by_query);
      survivors = surviving_bits<Layout>(p, here);
    }
    wait_for_products<kAhead ? 2 : 1>();
    hold(s);
    if (kMasked && !logits_are_scores(p)) make_logits<Layout>(p, passing_place(), bits, s);
    known_pairs<Layout>(rows(), a.unit, bits, s);
    start_of_weights<kMasked>(survivors);
    if constexpr (!kOfKeys) keep_before_wait(s);
    wait_for_products<kOfKeys ? 1 : 0>();
    take_grads(is_first);
    if constexpr (kMasked) drop(p, survivors, ds);
    grad_scores<Layout, false>(rows(), bits, s, ds);
    end_tile();
  }

  // What the block owns now, of which this is a part.
  __device__ __forceinline__ void begin(const Place& block) {
    at = block;
    if constexpr (kOfKeys) {
      at.j0 += group * kTile, at.cols = extent(a.p.N, at.j0);
    } else {
      at.i0 += group * kTile, at.rows = extent(a.p.M, at.i0);
    }
    last = stage.number;
    clear(of_scores), clear(of_weights);
#pragma unroll
    for (int n = 0; n < kTile / 4; ++n) dw[n / 4][n % 4] = 0;
  }

  // Read where it is used: kept over a loop, it would take a register.
  __device__ __forceinline__ int count() {
    const volatile TileCounts& counts = memory.counts;
    return same_for_warp(counts.all);
  }
  // Before a loop: see Consumer.
  __device__ __forceinline__ void keep_uniform() {
    stage = {same_for_warp(stage.number), same_for_warp(stage.parity)};
    last = same_for_warp(last);
  }

  __device__ __forceinline__ void run(uint32_t turn) {
    wait_for_phase(&memory.own_full, turn % 2);
    hold_own();
    const volatile TileCounts& counts = memory.counts;
    const int masked = same_for_warp(counts.masked);
    const bool any = count() > 0;
    if (masked > 0) find_lines<Layout>(a.p, at, memory.lines[group]);
    int n = 0;
    keep_uniform();
#pragma unroll 1
    for (; n < masked; ++n) take_tile<true>(n == 0);
    keep_uniform();
#pragma unroll 1
    for (int left = count() - n; left > 0; --left) take_tile<false>(n == 0), n = 1;
    __syncwarp();  // its lanes have read the stats
    release(&memory.own_empty);
    if constexpr (kAhead) {
      if (!any) return;
      start_of_scores(last);
      wait_for_products<0>();
      leave(last, true);
    }
  }
};

}  // namespace fastattn::cuda
