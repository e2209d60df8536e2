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
  Spans spans;
  float unit;  // of logits
  uint8_t* marks;
  // What blocks own, and what passes by: K, V and Q, dO; or the reverse.
  CUtensorMap own[2], passing[2];
};

// At every head size.
using GradGroups = Groups<2>;
constexpr int kConsumers = GradGroups::kConsumers, kRowTile = GradGroups::kRowTile;
constexpr int kBlock = GradGroups::kBlock;

template <int kDim>
struct GradPlan {
  static constexpr int kStages = kDim == 64 ? 4 : 3, kPanels = kDim / kPanel;
};

struct PassingTile {
  int head, tile;
};
// The tiles that pass by: those of `heads` heads, masked ones first.
struct PassingTiles {
  KeyTiles of_head;
  int heads;

  FASTATTN_DEVICE int masked(const PassingTiles& x) {
    return x.heads * KeyTiles::masked(x.of_head);
  }
  FASTATTN_DEVICE int count(const PassingTiles& x) { return x.heads * KeyTiles::count(x.of_head); }
  FASTATTN_DEVICE PassingTile at(const PassingTiles& x, int n) {
    const int masked = KeyTiles::masked(x.of_head), late = n - x.heads * masked;
    const int each = late < 0 ? masked : KeyTiles::count(x.of_head) - masked;
    const int m = late < 0 ? n : late, head = x.heads == 1 ? 0 : m / each;
    return {head, KeyTiles::at(x.of_head, m - head * each + (late < 0 ? 0 : masked))};
  }
};

template <int kDim>
struct alignas(1024) WgmmaGradMemory {
  using Of = GradPlan<kDim>;
  using Operand = uint16_t[Of::kPanels][kTile * kPanel];
  Operand own[2][kConsumers];
  Operand passing[Of::kStages][2];
  RowMemory rows[Of::kStages];  // of a consumer, or of what passes by
  Barrier own_full, own_empty, full[Of::kStages], empty[Of::kStages];
  KeptKeys kept[GradGroups::kBlockWarps];
  PassingTiles tiles;  // for what the block owns now
};

// ---- which tiles ----

// The rows that a block of keys visits.
FASTATTN_DEVICE RowRange visited_rows(const WgmmaGradArgs& a, const Place& at, int64_t j1) {
  if (a.spans.queries == nullptr)
    return rows_of_keys(a.p.mask, a.p.M, a.p.N, at.b, at.j0, min64(a.p.N, j1));
  const int64_t tiles = ceil_div(a.p.N, kTile);
  RowRange rows = {a.p.M, 0};
  for (int64_t n = at.j0 / kTile; n < min64(tiles, ceil_div(j1, kTile)); ++n) {
    const Span span = a.spans.queries[at.b * tiles + n];
    if (span.begin >= span.end) continue;
    rows = {min64(rows.begin, int64_t{span.begin} * kTile),
            max64(rows.end, min64(a.p.M, int64_t{span.end} * kTile))};
  }
  return rows;
}

template <bool kOfKeys>
FASTATTN_DEVICE PassingTiles passing_tiles(const WgmmaGradArgs& a, const DenseKeys& dense,
                                           const Place& at) {
  const BackwardParams& p = a.p;
  const bool masked = masks_every_tile(p) || p.grad_weights.data != nullptr;
  if constexpr (kOfKeys) {
    const int64_t j1 = at.j0 + kRowTile;
    const RowRange none = {p.M, 0};
    const bool dropped = dense.some.begin >= dense.some.end;
    const bool whole = !masked && dense.all.begin <= at.j0 && j1 <= dense.all.end;
    return {order_tiles<kTile>(dropped ? none : visited_rows(a, at, j1),
                               whole ? rows_of_all_keys(p.mask, p.M, p.N, at.b, at.j0, j1) : none),
            static_cast<int>(p.H) / static_cast<int>(p.Hkv)};
  } else {
    const auto known = [&](const AttentionParams&) { return masked; };
    return {key_tiles<kTile>(p, known, dense, at.b, at.i0, min64(p.M, at.i0 + kRowTile)), 1};
  }
}

// Where a tile that passes by is.
template <bool kOfKeys>
FASTATTN_DEVICE Place at_passing(const AttentionParams& p, Place at, const PassingTiles& tiles,
                                 int n) {
  const PassingTile which = PassingTiles::at(tiles, n);
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
  __device__ __forceinline__ void start_of_weights() {
    if constexpr (kOfKeys) {
      pack_weights<kType>(s, w);
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

  __device__ __forceinline__ void full_tile(bool is_first) {
    start_tile(false);
    wait_for_products<kAhead ? 2 : 1>();
    hold(s);
    known_pairs<Layout>(rows(), a.unit, kAllKept, s);
    start_of_weights();
    if constexpr (!kOfKeys) keep_before_wait(s);
    wait_for_products<kOfKeys ? 1 : 0>();
    take_grads(is_first);
    grad_scores<Layout, false>(rows(), kAllKept, s, ds);
    end_tile();
  }

  __device__ __forceinline__ void masked_tile(const Place& here, bool is_first) {
    const BackwardParams& p = a.p;
    const KeepBits bits = partial_bits<Layout>(p, here);
    const KeepBits survivors = surviving_bits<Layout>(p, here);
    load_grad_weights<Layout, kType>(p, here, bits, ds);
    start_tile(true);
    wait_for_products<0>();
    hold(s);
    take_grads(is_first);
    mask_scores<Layout>(p, here, bits, s);
    grad_pairs<Layout, false>(p, {bits, false, false}, survivors, a.unit, rows(), s, ds);
    start_of_weights();
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

  // Read where they are used: kept over a loop, they would take registers.
  __device__ __forceinline__ PassingTiles tiles() {
    const volatile PassingTiles& x = memory.tiles;
    const volatile KeyTiles& y = x.of_head;
    return {{y.first, y.end, y.full_first, y.full_end}, x.heads};
  }
  __device__ __forceinline__ int count() { return same_for_warp(PassingTiles::count(tiles())); }
  // Before a loop: see Consumer.
  __device__ __forceinline__ void keep_uniform() {
    stage = {same_for_warp(stage.number), same_for_warp(stage.parity)};
    last = same_for_warp(last);
  }

  __device__ __forceinline__ void run(uint32_t turn) {
    wait_for_phase(&memory.own_full, turn % 2);
    hold_own();
    const int masked = same_for_warp(PassingTiles::masked(tiles()));
    const bool any = count() > 0;
    int n = 0;
    keep_uniform();
#pragma unroll 1
    for (; n < masked; ++n) masked_tile(at_passing<kOfKeys>(a.p, at, tiles(), n), n == 0);
    keep_uniform();
#pragma unroll 1
    for (int left = count() - n; left > 0; --left) full_tile(n == 0), n = 1;
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
