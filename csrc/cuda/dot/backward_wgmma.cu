// Scaled dot-product attention, backward, by products of warpgroups (sm_90a); the formulas of
// backward.cu, and its results up to rounding:
//
//   dk, dv: for (b, key head, 128 keys)   K, V stay; Q, dO of the heads that share them pass by
//   dq:     for (b, h, 128 queries)       Q, dO stay; K, V pass by
//
// Both are one kernel: a block is a producer and two consumers of 64 keys, or queries. It owns one
// such tile after the other, where their work is even.
//
//   producer   a warp copies what the block owns, another one what passes by: tiles of 64 queries
//              or keys, into the next stage that is free. For dK and dV a third one loads the stats
//              of these queries, and a fourth one their keys, where limits vary by row. Tiles of
//              which a mask keeps nothing are left out.
//   consumer   S = own other^T, dP likewise          own operands in registers, where they fit
//              S -> W, dP -> dS                      in registers, where they are operands
//              dV += W dO, and dK += dS Q; or dQ += dS K
//
// The last product of a tile runs between S and dP of the next one, where registers allow it.
// Tiles with a mask come first, in a loop of their own. delta and dbias are those of backward.cu.
// Every result has one owner. A warp with a result that is not finite leaves a mark, as in
// forward_wgmma.cu, and backward.cu computes its tile again.
#include "cuda/dot/backward_wgmma.h"
#include "cuda/dot/wgmma_choice.h"
#include "cuda/dot/wgmma_grads.cuh"
#include "cuda/tile/few_queries.h"

namespace fastattn::cuda {
namespace {

// The keys of tile `number` of all shares, and the first of the heads that share them.
FASTATTN_DEVICE Place keys_at(const WgmmaGradArgs& a, uint32_t number) {
  const BackwardParams& p = a.p;
  HeadTile at = tile_of(number, static_cast<uint32_t>(ceil_div(p.N, kRowTile)), a.shares.tiles);
  const int h = static_cast<int>(take_digit(&at.head, p.Hkv));
  const int64_t j0 = int64_t{at.tile} * kRowTile;
  return {static_cast<int>(at.head), h * a.heads, h, 0, j0, extent(p.M, 0), extent(p.N, j0)};
}
template <bool kOfKeys>
FASTATTN_DEVICE Place owned_at(const WgmmaGradArgs& a, uint32_t number) {
  return kOfKeys ? keys_at(a, number) : queries_at<kRowTile>(a.p, number, a.shares.tiles);
}

// ---- the producer: a warp for what the block owns, others for what passes by ----
//
// The kernels of other GPUs than Hopper are empty: they leave what is no template unused.

// Loads the stats of the queries at `at`, as far as this lane does.
[[maybe_unused]] FASTATTN_DEVICE void load_stats(const BackwardParams& p, const Place& at,
                                                 RowMemory& rows) {
  // can_take_wgmma() bounds the number of rows.
  const uint32_t head = static_cast<uint32_t>(at.b) * static_cast<uint32_t>(p.H) + at.h;
  const uint32_t first = head * static_cast<uint32_t>(p.M) + static_cast<uint32_t>(at.i0);
#pragma unroll
  for (int n = 0; n < kTile / 32; ++n) start_row<true>(p, at, first, lane() + 32 * n, rows);
  wait_for_copies();
}
// Arrives for the warp, once its lanes have written stats.
[[maybe_unused]] FASTATTN_DEVICE void arrive_with_stats(Barrier* full) {
  __syncwarp();
  if (lane() == 0) arrive(full);
}

template <bool kOfKeys, int kDim>
FASTATTN_DEVICE void produce_own(const WgmmaGradArgs& a, WgmmaGradMemory<kDim>& memory) {
  for_shares<GradGroups<kOfKeys, kDim>::kOnce>(a.shares, [&](uint32_t number, uint32_t turn) {
    const Place at = owned_at<kOfKeys>(a, number);
    const TileCounts counts = count_tiles(a.p, listed_tiles<kOfKeys>(a, at, memory), memory.found);
    wait_for_phase(&memory.own_empty, turn % 2 ^ 1);
    if (lane() == 0) {
      memory.counts = counts;
      arrive_and_expect(&memory.own_full, sizeof(memory.own));
      for (int which = 0; which < 2; ++which)
        for (int group = 0; group < kConsumers; ++group)
          load_operand(a.own[which], &memory.own_full, (kOfKeys ? at.j0 : at.i0) + group * kTile,
                       kOfKeys ? at.hkv : at.h, at.b, memory.own[which][group]);
    }
    for (int group = 0; group < kConsumers && !kOfKeys; ++group) {
      Place here = at;
      here.i0 += group * kTile, here.rows = extent(a.p.M, here.i0);
      load_stats(a.p, here, memory.rows[group]);
    }
    arrive_with_stats(&memory.own_full);
  });
}

// Calls f(stage, tile, place) for all that passes by, once its stage is free, in the first kLanes
// lanes. f fills a stage only when these have seen it free: others would miss that phase.
template <bool kOfKeys, int kLanes, int kDim, typename F>
__device__ __forceinline__ void for_passing(const WgmmaGradArgs& a, WgmmaGradMemory<kDim>& memory,
                                            F f) {
  Stage<GradPlan<kDim>::kStages> to;
  for_shares<GradGroups<kOfKeys, kDim>::kOnce>(a.shares, [&](uint32_t number, uint32_t) {
    const Place at = owned_at<kOfKeys>(a, number);
    const TileList list = listed_tiles<kOfKeys>(a, at, memory);
    const int count = count_tiles(a.p, list, memory.found).all;
    if (lane() >= kLanes) return;
#pragma unroll 1
    for (int n = 0; n < count; ++n, to = to.next()) {
      const PassingTile tile = tile_at(a.p, list, memory.found, n);
      wait_for_phase(&memory.empty[to.number], to.parity ^ 1);
      f(to.number, tile, at_passing<kOfKeys>(a.p, at, tile));
    }
  });
}

template <bool kOfKeys, int kDim>
FASTATTN_DEVICE void produce_passing(const WgmmaGradArgs& a, WgmmaGradMemory<kDim>& memory) {
  for_passing<kOfKeys, 1>(a, memory, [&](uint32_t stage, const PassingTile& tile, const Place& at) {
    Barrier* const full = &memory.full[stage];
    memory.tiles[stage] = tile;
    arrive_and_expect(full, sizeof(memory.passing[0]));
    for (int which = 0; which < 2; ++which)
      load_operand(a.passing[which], full, kOfKeys ? at.i0 : at.j0, kOfKeys ? at.h : at.hkv, at.b,
                   memory.passing[stage][which]);
  });
}

template <int kDim>
FASTATTN_DEVICE void produce_stats(const WgmmaGradArgs& a, WgmmaGradMemory<kDim>& memory) {
  for_passing<true, 32>(a, memory, [&](uint32_t stage, const PassingTile&, const Place& at) {
    load_stats(a.p, at, memory.rows[stage]);
    arrive_with_stats(&memory.full[stage]);
  });
}

// The keys that limits leave to each query. With them, the warp of the stats would spill. Not run
// on a GPU.
template <int kDim>
FASTATTN_DEVICE void produce_lines(const WgmmaGradArgs& a, WgmmaGradMemory<kDim>& memory) {
  for_passing<true, 32>(a, memory, [&](uint32_t stage, const PassingTile& tile, const Place& at) {
    const Span* const lines = a.spans.rows[at.b * tiles_in(a.p.M) + tile.tile];
    copy_async<16>(&memory.passing_lines[stage][2 * lane()], lines + 2 * lane());
    wait_for_copies();
    arrive_with_stats(&memory.full[stage]);
  });
}

// ---- the block ----

template <bool kOfKeys, int kDim>
FASTATTN_DEVICE void init_barriers(const WgmmaGradArgs& a, WgmmaGradMemory<kDim>& memory) {
  init_barrier(&memory.own_full, 2), init_barrier(&memory.own_empty, kConsumers * kWarps);
  for (int n = 0; n < GradPlan<kDim>::kStages; ++n) {
    init_barrier(&memory.full[n], kOfKeys ? 2 + (a.spans.rows != nullptr) : 1);  // copies, stats
    init_barrier(&memory.empty[n], kConsumers * kWarps);
  }
  publish_barriers();
}

// Of a consumer's own tile, whose sums these are.
template <bool kOfKeys, DType kType, int kDim>
FASTATTN_DEVICE void write(const WgmmaGradArgs& a, const GradConsumer<kOfKeys, kType, kDim>& from) {
  const BackwardParams& p = a.p;
  const Place& at = from.at;
  const float zero = zero_of(from.of_scores) + zero_of(from.of_weights);
  if constexpr (kOfKeys) {
    const int64_t tile = (at.b * p.Hkv + at.hkv) * ceil_div(p.N, kTile) + at.j0 / kTile;
    mark(a.marks, tile, at.cols > 0, zero);
    store_sums<kType, kDim>(p.grad_v, offset_of(p.grad_v, at.b, at.hkv, at.j0, 0), at.cols, p.E,
                            {1.f, 1.f}, from.of_weights);
    store_sums<kType, kDim>(p.grad_k, offset_of(p.grad_k, at.b, at.hkv, at.j0, 0), at.cols, p.D,
                            {p.scale, p.scale}, from.of_scores);
  } else {
    const int64_t tile = (at.b * p.H + at.h) * ceil_div(p.M, kTile) + at.i0 / kTile;
    mark(a.marks, tile, at.rows > 0, zero);
    store_sums<kType, kDim>(p.grad_q, offset_of(p.grad_q, at.b, at.h, at.i0, 0), at.rows, p.D,
                            {p.scale, p.scale}, from.of_scores);
  }
}

template <bool kOfKeys, DType kType, int kDim>
FASTATTN_DEVICE void grads_block(const WgmmaGradArgs& a) {
  using Of = GradGroups<kOfKeys, kDim>;
  WgmmaGradMemory<kDim>& memory = *static_cast<WgmmaGradMemory<kDim>*>(shared_boxes());
  if (thread() == 0) init_barriers<kOfKeys>(a, memory);
  if (Of::kOnce || keys_vary(a.p.mask)) {
    const Place at = owned_at<kOfKeys>(a, blockIdx.x);
    const TileList list = passing_tiles<true, kOfKeys>(a, at);
    if (thread() == 0) memory.list = list;
    const auto kept = [&](const PassingTile& tile) {
      const Place here = at_passing<kOfKeys>(a.p, at, tile);
      const int m = static_cast<int>(here.i0 / kTile), n = static_cast<int>(here.j0 / kTile);
      const int rows = kOfKeys ? 1 : kConsumers, cols = kOfKeys ? kConsumers : 1;
      return kept_of(a.dense, here.b, here.h, m, m + rows, n, n + cols);
    };
    if (has_dense(a.p.mask)) find_tiles(list, kept, memory.found);
  }
  __syncthreads();
  // The same for a warp, which the compiler sees only so.
  const int group = __shfl_sync(kAllLanes, thread() / kWarpgroup, 0);
  if (group == kConsumers) {
    give_registers<Of::kProducerRegisters>();
    const int role = warp() % kWarps;
    if (role == 0) return produce_passing<kOfKeys>(a, memory);
    if (role == 1) return produce_own<kOfKeys>(a, memory);
    if constexpr (kOfKeys) {
      if (role == 2) return produce_stats(a, memory);
      if (a.spans.rows != nullptr) produce_lines(a, memory);
    }
    return;
  }
  take_registers<Of::kConsumerRegisters>();
  GradConsumer<kOfKeys, kType, kDim> mine(a, memory, group);
  for_shares<GradGroups<kOfKeys, kDim>::kOnce>(a.shares, [&](uint32_t number, uint32_t turn) {
    mine.begin(owned_at<kOfKeys>(a, number));
    mine.run(turn);
    write(a, mine);
  });
}

template <DType kType, int kDim>
__global__ void __launch_bounds__(kBlock, 1)
    sdpa_wgmma_dkdv_kernel(const __grid_constant__ WgmmaGradArgs a) {
  if constexpr (kHasWgmma) grads_block<true, kType, kDim>(a);
}
template <DType kType, int kDim>
__global__ void __launch_bounds__(kBlock, 1)
    sdpa_wgmma_dq_kernel(const __grid_constant__ WgmmaGradArgs a) {
  if constexpr (kHasWgmma) grads_block<false, kType, kDim>(a);
}

// ---- launch ----

// What of the problem the copies read: K, V, Q, dO.
struct Copied {
  View view;
  Extents size;
};
void list_copied(const BackwardParams& p, Copied (&list)[4]) {
  list[0] = {p.k, {p.B, p.Hkv, p.N, p.D}}, list[1] = {p.v, {p.B, p.Hkv, p.N, p.E}};
  list[2] = {p.q, {p.B, p.H, p.M, p.D}}, list[3] = {p.grad_out, {p.B, p.H, p.M, p.E}};
}

template <DType kType, int kDim>
void launch(WgmmaGradArgs a, const CUtensorMap (&maps)[4], const GradMarks& marks,
            Launcher& launcher) {
  constexpr size_t kShared = sizeof(WgmmaGradMemory<kDim>);
  const BackwardParams& p = a.p;
  const auto choose = [&](const CUtensorMap* own, const CUtensorMap* passing, uint32_t* marks,
                          int64_t heads, int64_t rows, bool once) {
    for (int n = 0; n < 2; ++n) a.own[n] = own[n], a.passing[n] = passing[n];
    a.marks = reinterpret_cast<uint8_t*>(marks);
    a.shares = share_out(p, p.B * heads, ceil_div(rows, kRowTile), !once);
  };
  choose(maps + 2, maps, marks.queries, p.H, p.M, GradGroups<false, kDim>::kOnce);
  launcher.run(sdpa_wgmma_dq_kernel<kType, kDim>, a.shares.blocks, kBlock, kShared, a);
  choose(maps, maps + 2, marks.keys, p.Hkv, p.N, GradGroups<true, kDim>::kOnce);
  a.heads = static_cast<int>(p.H / p.Hkv);
  launcher.run(sdpa_wgmma_dkdv_kernel<kType, kDim>, a.shares.blocks, kBlock, kShared, a);
}

}  // namespace

static bool can_take_wgmma(const BackwardParams& p) {
  if (!wgmma_can_run() || p.M <= kFewQueries || is_curved(p)) return false;
  if (p.B * p.H * p.M > kMostNumbers || !has_dense_tiles(p)) return false;
  if (min64(p.B * p.H * p.N, min64(p.D, p.E)) <= 0) return false;
  Copied list[4];
  list_copied(p, list);
  bool all = true;
  for (const Copied& x : list) all &= has_tensor_map(x.view, x.size);
  return all;
}

int64_t wgmma_backward_bytes(const BackwardParams& p) {
  return can_take_wgmma(p) ? dense_tile_bytes(p, true) : 0;
}

bool launch_wgmma(const BackwardParams& p, const Spans& spans, const GradMarks& marks, void* memory,
                  Launcher& launcher) {
  if (!wgmma_is_chosen() || !can_take_wgmma(p)) return false;
  const int64_t most = max64(p.H / p.Hkv * tiles_in(p.M), tiles_in(p.N));
  if (has_dense(p.mask) && most > kPlaces) return false;
  Copied list[4];
  CUtensorMap maps[4];
  list_copied(p, list);
  for (int n = 0; n < 4; ++n)
    if (!make_tensor_map(list[n].view, list[n].size, kTile, &maps[n])) return false;
  const DenseTiles dense = make_dense_tiles(p, true, memory, launcher);
  with_operands(p, [&](auto type, auto dim, auto curved) {
    if constexpr (!curved)
      launch<type, dim>({p, {}, 1, spans, dense, unit_of(p), nullptr, {}, {}}, maps, marks,
                        launcher);
  });
  return true;
}

}  // namespace fastattn::cuda
