// Gradients of queries, keys, values and w, in one pass over the scores. A block has a slice of the
// query tiles and a slice of the key tiles of a head. Slices are strided, so that a mask leaves
// blocks about as much to do. Each block adds up its own parts (gradient_sums.cuh):
//
//   for query tiles of the slice
//     for key tiles of the slice that some row keeps
//       S, dP -> W, dS     dS passes through shared memory, transposed
//       dV += W^T dO
//       for stages of dims
//         g -> dk, dw      in registers: a thread owns kOwnDims dims of kOwnKeys keys
//           -> dq          in shared memory: groups of 16 lanes have the tile's rows by turns
#include "cuda/additive/gradient_sums.cuh"

namespace fastattn::cuda {
namespace {

// ---- where sums of a block lie ----
//
// A use computes its address again. Kept over the loops, addresses would take registers.

FASTATTN_DEVICE uint32_t own_block() {
  return static_cast<uint32_t>(opaque_here(static_cast<int>(blockIdx.x)));
}

struct Slices {
  int64_t head, m, n;  // head: of all batches
};
FASTATTN_DEVICE Slices own_slices(const BackwardArgs& a) {
  uint32_t block = own_block();
  const int64_t n = take_digit(&block, a.plan.slices_n), m = take_digit(&block, a.plan.slices_m);
  return {block, m, n};
}
FASTATTN_DEVICE float* own_query_sums(const BackwardArgs& a, const Place& at) {
  const Slices own = own_slices(a);
  return query_sums(a, own.head, own.n, at.i0 / kTile);
}
FASTATTN_DEVICE float* own_key_sums(const BackwardArgs& a, const Place& at) {
  const Slices own = own_slices(a);
  return key_sums(a, own.head, own.m, at.j0 / kTile);
}
// This thread's dw of its dims of a stage.
FASTATTN_DEVICE float2& own_weight_sum(const BackwardArgs& a, int64_t stage) {
  const int64_t first = (own_block() * a.plan.panels.stages + stage) * kThreads;
  return reinterpret_cast<float2*>(workspace(a) + a.plan.sums_w)[first + thread()];
}

FASTATTN_DEVICE void clear_own(const BackwardArgs& a, const Slices& own) {
  const Panels& panels = a.plan.panels;
  for (int64_t tile = own.m; tile < panels.tiles_m; tile += a.plan.slices_m)
    clear_sums(query_sums(a, own.head, own.n, tile), panels.stages * kOwnSlots);
  for (int64_t tile = own.n; tile < panels.tiles_n; tile += a.plan.slices_n)
    clear_sums(key_sums(a, own.head, own.m, tile), value_slot(a, ceil_div(a.p.E, kTile) * kTile));
  for (int64_t stage = 0; stage < panels.stages; ++stage)
    own_weight_sum(a, stage) = make_float2(0.f, 0.f);
}

// ---- dV ----

FASTATTN_DEVICE void add_value_gradient(const BackwardArgs& a, const Place& at, bool full,
                                        BackwardMemory& memory) {
  const View& from = a.p.grad_out;
  for (int64_t e0 = 0; e0 < a.p.E; e0 += kTile) {
    Fragment acc;
    clear(acc);
    for (int i = 0; i < at.rows; i += kStage) {
      const int count = min(kStage, at.rows - i);
      __syncthreads();
      const bool finite =
          __syncthreads_and(stage_rows(from, offset_of(from, at.b, at.h, at.i0 + i, e0), count,
                                       extent(a.p.E, e0), memory.stage.queries));
      if (full || finite) {
        outer_add<false>(memory.weights, i, memory.stage.queries, count, acc);
      } else {
        outer_add<true>(memory.weights, i, memory.stage.queries, count, acc);
      }
    }
    float* const sums = own_key_sums(a, at);
#pragma unroll
    for (int r = 0; r < kRows; ++r) add_to_sum(sums, value_slot(a, e0) + r, acc[r]);
  }
}
FASTATTN_DEVICE void add_half_value_gradient(const BackwardArgs& a, const Place& at, bool full,
                                             BackwardMemory& memory) {
  const View& from = a.p.grad_out;
  HalfTile& tile = *reinterpret_cast<HalfTile*>(memory.stage.queries);
  for (int64_t e0 = 0; e0 < a.p.E; e0 += kTile) {
    Sums sum = {};
    add_weighted<true>(from, offset_of(from, at.b, at.h, at.i0, e0), at.rows, extent(a.p.E, e0),
                       full, memory.halves, tile, sum);
    float* const sums = own_key_sums(a, at);
#pragma unroll
    for (int n = 0; n < kRows; ++n) add_to_sum(sums, value_slot(a, e0) + n, sum[n]);
  }
}

// ---- dq, dk and dw ----

// The factor of a sum over a tile, besides the weights and unit_of_ds(). `factor`: E or F.
template <Loop kLoop>
FASTATTN_DEVICE float tile_factor(float factor) {
  return kLoop == Loop::kFactors ? factor : 1.f;
}

FASTATTN_DEVICE void load_quads(const float* tile, int dim, int i, Quads& to) {
#pragma unroll
  for (int d = 0; d < kOwnDims; ++d) unpack4(load4(tile, dim + d, i), to[d]);
}

// Passes this thread's sums of four rows on, behind those of the groups that came before.
FASTATTN_DEVICE void pass_on(bool first, int dim, int i, Quads& sums, float* passing) {
  Quads before = {};
  if (!first) load_quads(passing, dim, i, before);
#pragma unroll
  for (int d = 0; d < kOwnDims; ++d) {
#pragma unroll
    for (int x = 0; x < 4; ++x) sums[d][x] += before[d][x];
    store4(passing, dim + d, i, pack4(sums[d]));
  }
}

// Adds a tile's share to dq: passing sums of the rows of this thread's last turn.
template <Loop kLoop>
FASTATTN_DEVICE void add_to_queries(const BackwardArgs& a, const Place& at, BackwardMemory& memory,
                                    int64_t slot, int dim, int key0, float unit) {
  float* const sums = own_query_sums(a, at);
#pragma unroll
  for (int n = 0; n < kOwnKeys; n += 4) {
    const int i = last_row0(key0) + n;
    if (i >= at.rows) return;
    Quads sum, factor;
    load_quads(memory.stage.keys, dim, i, sum);
    load_quads(memory.stage.queries, dim, i, factor);
#pragma unroll
    for (int d = 0; d < kOwnDims; ++d) {
#pragma unroll
      for (int x = 0; x < 4; ++x) sum[d][x] *= tile_factor<kLoop>(factor[d][x]) * unit;
      add_to_sum(sums, slot + n / 4 * kOwnDims + d, sum[d]);
    }
  }
}

// Adds a tile's share to dk and dw.
template <Loop kLoop>
FASTATTN_DEVICE void add_to_keys(const BackwardArgs& a, const Place& at, int64_t slot,
                                 const OwnTile& own, const OwnTile& of_keys,
                                 const float (&weight)[kOwnDims], float unit) {
  float* const sums = own_key_sums(a, at);
#pragma unroll
  for (int n = 0; n < kOwnKeys; n += 4)
#pragma unroll
    for (int d = 0; d < kOwnDims; ++d) {
      float sum[4];
#pragma unroll
      for (int x = 0; x < 4; ++x)
        sum[x] = of_keys[d][n + x] * (tile_factor<kLoop>(own[d][n + x]) * unit);
      add_to_sum(sums, slot + n / 4 * kOwnDims + d, sum);
    }
  const float of_weights = kLoop == Loop::kDifferences ? unit : unit * (1.f / kGradUnit);
  float2& sum = own_weight_sum(a, slot / kOwnSlots);
  sum.x += weight[0] * of_weights;
  sum.y += weight[1] * of_weights;
}

// Adds a tile's share of dq and dk, without the factor 4 w (gaussian: -c r and c r), and of dw.
template <Loop kLoop>
FASTATTN_DEVICE void add_gradients(const BackwardArgs& a, const Place& at, BackwardMemory& memory) {
  constexpr bool kDirect = kLoop != Loop::kFactors;
  const AdditiveTiles tiles = tiles_of(a);
  float* const passing = memory.stage.keys;  // sums of dq, [dim][i]
  for (int64_t d0 = 0; d0 < tiles.panels.dims; d0 += kStage) {
    const int count = staged_dims(tiles, d0);
    __syncthreads();
    stage_queries(tiles, at, tiles.panels.gradient_queries, kDirect, d0, count,
                  memory.stage.queries);
    __syncthreads();
    const int dim = own_dim0(opaque_here(lane())), key0 = opaque_here(own_key0());
    const bool owns = dim < count && key0 < at.cols;
    OwnTile own, of_keys = {};
    float weight[kOwnDims] = {}, ratios[kOwnDims];
    if (owns) load_own(tiles, at, kDirect, d0 + dim, key0, own);
    if (kLoop == Loop::kDifferences && owns) load_ratios(tiles, at, d0 + dim, ratios);
#pragma unroll 1
    for (int turn = 0; turn < kOwnGroups; ++turn) {
      if (turn > 0) __syncthreads();
#pragma unroll 1
      for (int n = 0; n < kOwnKeys; n += 4) {
        const int i = turn_row0(key0, turn) + n;
        if (dim >= count || i >= at.rows) break;
        Quads other, of_queries = {};
        float share[kOwnDims] = {};
        load_quads(memory.stage.queries, dim, i, other);
        if (owns && kLoop == Loop::kDifferences)
          add_differences(own, key0, ratios, other, memory.ds, i, of_keys, of_queries, share);
        if (owns && kLoop != Loop::kDifferences)
          add_gradient<kDirect>(own, key0, other, memory.ds, i, of_keys, of_queries, share);
        // Sums have two levels, because one sum over the whole tile loses digits.
        weight[0] += share[0], weight[1] += share[1];
        pass_on(turn == 0, dim, i, of_queries, passing);
      }
    }
    const float unit = unit_of_ds(memory);
    const int64_t slot = d0 / kStage * kOwnSlots;
    if (dim < count) add_to_queries<kLoop>(a, at, memory, slot, dim, key0, unit);
    if (owns) add_to_keys<kLoop>(a, at, slot, own, of_keys, weight, unit);
  }
}

// Writes dw of this block, [dims].
FASTATTN_DEVICE void write_weight_part(const BackwardArgs& a, float* staged) {
  const Panels& panels = a.plan.panels;
  float* const to = workspace(a) + a.plan.weights + blockIdx.x * panels.dims;
  for (int64_t stage = 0; stage < panels.stages; ++stage) {
    __syncthreads();
    const int place = own_group() * kStage + own_dim0(lane());
    *reinterpret_cast<float2*>(staged + place) = own_weight_sum(a, stage);
    __syncthreads();
    const int64_t d = stage * kStage + thread();
    if (thread() >= kStage || d >= panels.dims) continue;
    float sum = 0.f;
    for (int n = 0; n < kOwnGroups; ++n) sum += staged[n * kStage + thread()];
    to[d] = sum;
  }
}

FASTATTN_DEVICE Place own_place(const BackwardArgs& a, int tile_m, int tile_n) {
  const uint32_t head = static_cast<uint32_t>(own_slices(a).head),
                 heads = static_cast<uint32_t>(a.p.H);
  return place(a.p, head / heads, head % heads, int64_t{tile_m} * kTile, int64_t{tile_n} * kTile);
}

// Finds the key tiles of this block's slice, from the first one that rows of a query tile keep.
// They lie in shared memory, because registers are full. Has barriers around it.
FASTATTN_DEVICE void find_keys(const BackwardArgs& a, int tile_m, Visited& visited) {
  __syncthreads();
  if (thread() == 0) {
    const Place at = own_place(a, tile_m, 0);
    const KeyRange keys = visited_keys(a.p, at, a.spans);
    const int slices = static_cast<int>(a.plan.slices_n), slice = static_cast<int>(own_slices(a).n);
    const int first = static_cast<int>(keys.begin / kTile);
    visited.keys.begin = first + (slice - first % slices + slices) % slices;
    visited.keys.end = ceil_div(keys.end, kTile);
    visited.tile_m = tile_m;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 3)
    additive_gradients_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  const Slices first = own_slices(a);
  clear_own(a, first);
  const int slices_m = static_cast<int>(a.plan.slices_m);
  const int slices_n = static_cast<int>(a.plan.slices_n);

  const volatile Visited& visited = memory.visited;
  for (int m = static_cast<int>(first.m); m < a.plan.panels.tiles_m;
       m = visited.tile_m + slices_m) {
    find_keys(a, m, memory.visited);
    for (int n = visited.keys.begin; n < visited.keys.end; n += slices_n) {
      const Place at = own_place(a, visited.tile_m, opaque_here(n));
      const TileMask mask = mask_tile<FragmentLayout>(p, at, a.spans);
      if (mask.empty) continue;
      Fragment weights, ds;
      gradient_tile(a, at, mask.bits, memory.stage, weights, ds, memory.ds);
      if (has_halves(p)) {
        store_weights(p.v.dtype, weights, mask.bits, memory.halves);
      } else {
        take_out_masked(mask.bits, weights);
        store_fragment<false>(weights, memory.weights);
      }
      store_ds(ds, memory, is_gaussian(p) ? 1.f : kGradUnit);
      has_halves(p) ? add_half_value_gradient(a, at, mask.full, memory)
                    : add_value_gradient(a, at, mask.full, memory);
      if (is_gaussian(p)) {
        add_gradients<Loop::kDifferences>(a, at, memory);
      } else if (is_direct(tiles_of(a), at)) {
        add_gradients<Loop::kDirect>(a, at, memory);
      } else {
        add_gradients<Loop::kFactors>(a, at, memory);
      }
    }
  }
  write_weight_part(a, memory.stage.queries);
}

}  // namespace

void launch_gradients(const BackwardArgs& args, Launcher& launcher) {
  const BackwardParams& p = args.p;
  const int64_t blocks = p.B * p.H * args.plan.slices_m * args.plan.slices_n;
  launcher.run(additive_gradients_kernel, blocks, kThreads, sizeof(BackwardMemory), args);
  launch_gradient_sums(args, launcher);
}

}  // namespace fastattn::cuda
