// Scaled dot-product attention, forward, by products of warpgroups (sm_90a); the formula of
// forward.cu, and its results up to rounding:
//
//   for (b, h, tile of 64 queries a consumer)   a block: a producer, and two consumers or three;
//                                               it takes tile after tile, where their work is even
//     producer   a warp copies queries, another one tiles of 128 or 80 keys: K, then V, into the
//                next stage that is free. Tiles of which a mask keeps nothing are left out.
//     consumer   S_0 = Q K_0^T -> masked -> P_0
//       for n = 1, 2, ...                       masked tiles first, tiles without a mask after them
//         start S_n = Q K_n^T, and O += P_(n-1) V_(n-1)
//         S_n -> curved, masked, biased -> softmax while the other product runs
//         O = alpha O, P_n
//       O += P V of the last one; out = O / l, lse, stats
//
// Each stage has two barriers: full, which counts the bytes of its copies, and empty, at which each
// consumer warp arrives when it has read the stage. Nothing else orders the warps.
//
// A product carries NaN and infinity past the mask, as 0 * NaN. A warp with a result that is not
// finite therefore leaves a mark, and forward.cu computes its rows again.
//
// Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and low-precision",
// 2024. docs/decisions/0013-warpgroups.md counts its instructions, 0034 has its rates.
#include "cuda/dot/forward_wgmma.h"
#include "cuda/dot/wgmma_block.cuh"
#include "cuda/dot/wgmma_choice.h"
#include "cuda/tile/few_queries.h"

namespace fastattn::cuda {
namespace {

template <bool kVary, int kDim>
FASTATTN_DEVICE TileList tiles_of(const WgmmaArgs& a, const Place& at) {
  using Of = Plan<kDim>;
  const int i0 = static_cast<int>(at.i0);
  return {key_tiles<kVary, Of::kKeys, Of::kRowTile>(a.p, a.spans, masks_every_tile, at.b, i0), 1};
}
// As a producer finds them. A block with one tile has found its list beforehand.
template <bool kOnce, int kDim>
FASTATTN_DEVICE TileList listed_tiles(const WgmmaArgs& a, const Place& at,
                                      const WgmmaMemory<kDim>& memory) {
  if constexpr (kOnce) return memory.list;
  return keys_vary(a.p.mask) ? memory.list : tiles_of<false, kDim>(a, at);
}

// ---- the producer: a thread for the queries, and one for the keys ----

template <int kDim, bool kOnce>
FASTATTN_DEVICE void produce_queries(const WgmmaArgs& a, WgmmaMemory<kDim>& memory) {
  using Of = Plan<kDim>;
  for_shares<kOnce>(a.shares, [&](uint32_t number, uint32_t turn) {
    const Place at = queries_at<Of::kRowTile>(a.p, number, a.shares.tiles);
    const TileCounts counts = count_tiles(a.p, listed_tiles<kOnce>(a, at, memory), memory.found);
    if (lane() > 0) return;
    for (int group = 0; group < Of::kConsumers; ++group) {
      Barrier* const full = &memory.q_full[group];
      wait_for_phase(&memory.q_empty[group], turn % 2 ^ 1);
      memory.counts[group] = counts;
      arrive_and_expect(full, sizeof(memory.q[group]));
      load_operand(a.q, full, at.i0 + group * kTile, at.h, at.b, memory.q[group]);
    }
  });
}

template <int kPanels, int kNumbers>
FASTATTN_DEVICE void load_keys(const CUtensorMap& map, const Place& at, int tile, Barrier* full,
                               uint16_t (&to)[kPanels][kNumbers]) {
  constexpr int kKeys = kNumbers / kPanel;
  arrive_and_expect(full, sizeof(to));
  load_operand(map, full, tile * kKeys, at.hkv, at.b, to);
}

template <int kDim, bool kOnce>
FASTATTN_DEVICE void produce_keys(const WgmmaArgs& a, WgmmaMemory<kDim>& memory) {
  Stage<Plan<kDim>::kStages> to;
  for_shares<kOnce>(a.shares, [&](uint32_t number, uint32_t) {
    const Place at = queries_at<Plan<kDim>::kRowTile>(a.p, number, a.shares.tiles);
    const TileList list = listed_tiles<kOnce>(a, at, memory);
    const int count = count_tiles(a.p, list, memory.found).all;
#pragma unroll 1
    for (int n = 0; n < count && lane() == 0; ++n, to = to.next()) {
      const int tile = tile_at(a.p, list, memory.found, n).tile;
      wait_for_phase(&memory.k_empty[to.number], to.parity ^ 1);
      memory.tile[to.number] = tile;
      load_keys(a.k, at, tile, &memory.k_full[to.number], memory.k[to.number]);
      wait_for_phase(&memory.v_empty[to.number], to.parity ^ 1);
      load_keys(a.v, at, tile, &memory.v_full[to.number], memory.v[to.number]);
    }
  });
}

// ---- the block ----

template <int kDim>
FASTATTN_DEVICE void init_barriers(WgmmaMemory<kDim>& memory) {
  using Of = Plan<kDim>;
  for (int n = 0; n < Of::kConsumers; ++n)
    init_barrier(&memory.q_full[n], 1), init_barrier(&memory.q_empty[n], kWarps);
  for (int n = 0; n < Of::kStages; ++n) {
    init_barrier(&memory.k_full[n], 1), init_barrier(&memory.v_full[n], 1);
    init_barrier(&memory.k_empty[n], Of::kConsumers * kWarps);
    init_barrier(&memory.v_empty[n], Of::kConsumers * kWarps);
  }
  publish_barriers();
}

template <DType kType, int kDim, bool kCurved>
FASTATTN_DEVICE void sdpa_wgmma_block(const WgmmaArgs& a) {
  using Of = Plan<kDim>;
  constexpr bool kOnce = kHasOneTile<kDim, kCurved>;
  WgmmaMemory<kDim>& memory = *static_cast<WgmmaMemory<kDim>*>(shared_boxes());
  if (thread() == 0) init_barriers(memory);
  if (kOnce || keys_vary(a.p.mask)) {
    const Place at = queries_at<Of::kRowTile>(a.p, blockIdx.x, 1);
    const TileList list = tiles_of<true, kDim>(a, at);
    if (thread() == 0) memory.list = list;
    const auto kept = [&](const PassingTile& which) {
      const int m = static_cast<int>(at.i0 / kTile), j0 = which.tile * Of::kKeys;
      return kept_of(a.dense, at.b, at.h, m, m + Of::kConsumers, j0 / kTile,
                     tiles_in(j0 + Of::kKeys));
    };
    if (has_dense(a.p.mask)) find_tiles(list, kept, memory.found);
  }
  __syncthreads();
  // The same for a warp, which the compiler sees only so.
  const int group = __shfl_sync(kAllLanes, thread() / kWarpgroup, 0);
  if (group == Of::kConsumers) {
    give_registers<Of::kProducerRegisters>();
    const int role = warp() % kWarps;
    if (role == 0) return produce_keys<kDim, kOnce>(a, memory);
    if (role == 1) produce_queries<kDim, kOnce>(a, memory);
    return;
  }
  take_registers<Of::kConsumerRegisters>();
  Consumer<kType, kDim, kCurved> mine(a, memory, group);
  for_shares<kOnce>(a.shares, [&](uint32_t number, uint32_t turn) {
    mine.begin(queries_at<Of::kRowTile>(a.p, number, a.shares.tiles));
    mine.run(turn);
    mine.write();
  });
}

template <DType kType, int kDim, bool kCurved>
__global__ void __launch_bounds__(Plan<kDim>::kBlock, 1)
    sdpa_wgmma_kernel(const __grid_constant__ WgmmaArgs a) {
  if constexpr (kHasWgmma) sdpa_wgmma_block<kType, kDim, kCurved>(a);
}

// The workspace: a word of marks for each tile of 64 queries, spans, and what is known of a dense
// mask. Spans begin at an even word.
int64_t span_start(const ForwardParams& p) {
  return ceil_div(p.B * p.H * ceil_div(p.M, kTile), 2) * 2;
}
int64_t dense_start(const ForwardParams& p) { return span_start(p) + key_span_floats(p); }

template <DType kType, int kDim, bool kCurved>
bool launch(const ForwardParams& p, Launcher& launcher) {
  using Of = Plan<kDim>;
  if (has_dense(p.mask) && ceil_div(p.N, Of::kKeys) > Of::kPlaces) return false;
  constexpr auto kKernel = sdpa_wgmma_kernel<kType, kDim, kCurved>;
  constexpr size_t kShared = sizeof(WgmmaMemory<kDim>);
  WgmmaArgs a{};
  a.p = p;
  a.shares = share_out(p, p.B * p.H, ceil_div(p.M, Of::kRowTile), !kHasOneTile<kDim, kCurved>);
  a.unit = unit_of(p), a.slack = 1.f / a.unit;
  launcher.prepare(kKernel, kShared);  // before the maps: the thread may be new to CUDA
  const bool made = make_tensor_map(p.q, {p.B, p.H, p.M, p.D}, kTile, &a.q) &&
                    make_tensor_map(p.k, {p.B, p.Hkv, p.N, p.D}, Of::kKeys, &a.k) &&
                    make_tensor_map(p.v, {p.B, p.Hkv, p.N, p.E}, Of::kKeys, &a.v);
  if (!made) return false;
  float* const memory = static_cast<float*>(p.workspace);
  a.spans = make_key_spans(p, memory + span_start(p), launcher);
  a.dense = make_dense_tiles(p, false, memory + dense_start(p), launcher);
  launcher.run(kKernel, a.shares.blocks, Of::kBlock, kShared, a);
  return true;
}

// Kernels with a curve have no size of 64, so that the library stays small.
template <DType kType>
bool launch_type(const ForwardParams& p, Launcher& launcher) {
  const int64_t size = max64(p.D, p.E);
  if (is_curved(p))
    return size > 128 ? launch<kType, 256, true>(p, launcher)
                      : launch<kType, 128, true>(p, launcher);
  if (size > 128) return launch<kType, 256, false>(p, launcher);
  return size > 64 ? launch<kType, 128, false>(p, launcher) : launch<kType, 64, false>(p, launcher);
}

bool has_tensor_maps(const ForwardParams& p) {
  return min64(p.B * p.H * p.N, min64(p.D, p.E)) > 0 && has_tensor_map(p.q, {p.B, p.H, p.M, p.D}) &&
         has_tensor_map(p.k, {p.B, p.Hkv, p.N, p.D}) && has_tensor_map(p.v, {p.B, p.Hkv, p.N, p.E});
}

bool wants_wgmma(const ForwardParams& p) {
  if (!wgmma_is_chosen() || !wgmma_can_run() || p.M <= kFewQueries) return false;
  return has_tensor_maps(p) && has_dense_tiles(p);
}

}  // namespace

int64_t wgmma_forward_bytes(const ForwardParams& p) {
  return wants_wgmma(p) ? 4 * dense_start(p) + dense_tile_bytes(p, false) : 0;
}

const char* against_large_heads(const ForwardParams& p) {
  if (p.M <= kFewQueries) return "up to 16 queries have D and E up to 128";
  if (p.weights_mode != WeightsMode::kNone) return "returned weights have D and E up to 128";
  return wgmma_can_run() ? nullptr : "D and E over 128 need compute capability 9.0";
}

bool launch_wgmma(const ForwardParams& p, Launcher& launcher) {
  // Another thread may choose between the allocation of the workspace and this.
  if (p.workspace == nullptr || !wants_wgmma(p)) return false;
  if (p.q.dtype == DType::kFloat16) return launch_type<DType::kFloat16>(p, launcher);
  return launch_type<DType::kBFloat16>(p, launcher);
}

}  // namespace fastattn::cuda
