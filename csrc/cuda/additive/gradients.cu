// Gradients of queries, keys, values and w, in one pass over the scores. A block has a slice of the
// query tiles and a slice of the key tiles of a head. Slices are strided, so that a mask leaves
// blocks about as much to do. Each block adds up its own parts; two kernels add up the parts:
//
//   for query tiles of the slice
//     for key tiles of the slice that some row keeps
//       S, dP -> W, dS     dS passes through shared memory, transposed
//       dV += W^T dO
//       for stages of dims
//         g -> dk, dw      in registers: a thread owns kOwnDims dims of kOwnKeys keys
//           -> dq          in shared memory: groups of 16 lanes have the tile's rows by turns
#include "cuda/additive/backward.cuh"

namespace fastattn::cuda {
namespace {

// ---- where sums of a block lie ----
//
// A use computes its address again. Kept over the loops, addresses would take registers.

FASTATTN_DEVICE uint32_t own_block() {
  return static_cast<uint32_t>(opaque_here(static_cast<int>(blockIdx.x)));
}

// Of dq: kOwnSlots slots per stage of dims.
FASTATTN_DEVICE float* query_sums(const BackwardArgs& a, int64_t head, int64_t slice_n,
                                  int64_t tile_m) {
  const int64_t number = (head * a.plan.slices_n + slice_n) * a.plan.panels.tiles_m + tile_m;
  return workspace(a) + a.plan.sums_q + number * a.plan.block_q;
}
// Of dk, kOwnSlots slots per stage of dims, and then of dV.
FASTATTN_DEVICE float* key_sums(const BackwardArgs& a, int64_t head, int64_t slice_m,
                                int64_t tile_n) {
  const int64_t number = (head * a.plan.slices_m + slice_m) * a.plan.panels.tiles_n + tile_n;
  return workspace(a) + a.plan.sums_k + number * a.plan.block_k;
}
// The first slot of dV's columns [e0, e0 + kTile), which take kRows slots.
FASTATTN_DEVICE int64_t value_slot(const BackwardArgs& a, int64_t e0) {
  return a.plan.panels.stages * kOwnSlots + e0 / kTile * kRows;
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

// The rows of a group in each of its turns.
FASTATTN_DEVICE int turn_row0(int key0, int turn) { return (key0 + turn * kOwnKeys) % kTile; }
FASTATTN_DEVICE int last_row0(int key0) { return turn_row0(key0, kOwnGroups - 1); }

// A slot holds four rows or keys of a dim.
FASTATTN_DEVICE int row_of_slot(int slot) { return slot % kOwnSlots / kOwnDims * 4; }
FASTATTN_DEVICE int64_t dim_of_slot(int slot) {
  return slot / kOwnSlots * kStage + own_dim0(lane()) + slot % kOwnDims;
}

// The factor of a sum over a tile, besides the weights and unit_of_ds(). `factor`: E or F.
template <Loop kLoop>
FASTATTN_DEVICE float tile_factor(float factor) {
  return kLoop == Loop::kFactors ? factor : kLoop == Loop::kDirect ? 1.f : 1.f / kGradUnit;
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
  float2& sum = own_weight_sum(a, slot / kOwnSlots);
  sum.x += weight[0] * (unit * (1.f / kGradUnit));
  sum.y += weight[1] * (unit * (1.f / kGradUnit));
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
    Span keys;
    if (a.spans.keys == nullptr) {
      const KeyRange range = tile_range(a.p.mask, a.p.N, at.b, at.i0, at.i0 + at.rows);
      keys = {static_cast<int>(range.begin), static_cast<int>(range.end)};
    } else {
      keys = a.spans.keys[at.b * a.plan.panels.tiles_m + tile_m];
    }
    const int slices = static_cast<int>(a.plan.slices_n), slice = static_cast<int>(own_slices(a).n);
    const int first = keys.begin / kTile;
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
      const TileMask mask = mask_tile<FragmentLayout>(p, at, a.spans.keys);
      if (mask.empty) continue;
      Fragment weights, ds;
      gradient_tile(a, at, mask.bits, memory.stage, weights, ds, memory.ds);
      has_halves(p) ? store_weights(p.v.dtype, weights, mask.bits, memory.halves)
                    : store_fragment<false>(weights, memory.weights);
      store_ds(ds, memory);
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

// ---- sums of the parts ----

// sum += this thread's sum in each of `count` parts, `stride` floats apart.
FASTATTN_DEVICE void add_parts(float* parts, int64_t count, int64_t stride, int64_t slot,
                               float (&sum)[4]) {
  for (int64_t part = 0; part < count; ++part, parts += stride) {
    float x[4];
    unpack4(own_sum(parts, slot), x);
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[n] += x[n];
  }
}

// Writes four rows of a dim from row `row` of a tile on.
FASTATTN_DEVICE void write_rows(const View& to, int64_t offset, int row, int rows, int64_t d,
                                int64_t dims, const float (&x)[4]) {
  if (d >= dims) return;
  with_dtype(to.dtype, [&](auto type) {
    for (int n = 0; n < 4; ++n)
      if (row + n < rows)
        store_as<type>(to.data, offset + (row + n) * to.stride_r + d * to.stride_c, x[n]);
  });
}

FASTATTN_DEVICE const float* weights_of(const BackwardArgs& a, const Place& at) {
  return workspace(a) + a.plan.panels.weights + weights_head(tiles_of(a), at) * a.plan.panels.dims;
}

// One block per tile of queries.
__global__ void __launch_bounds__(kThreads, 4)
    additive_queries_kernel(const __grid_constant__ BackwardArgs a) {
  const Panels& panels = a.plan.panels;
  const Place at = query_place(a, blockIdx.x);
  const int64_t stride = panels.tiles_m * a.plan.block_q,
                offset = offset_of(a.p.grad_q, at.b, at.h, at.i0, 0);
  float* const parts = query_sums(a, at.b * a.p.H + at.h, 0, at.i0 / kTile);
  const float factor = is_gaussian(a.p) ? -1.f : 4.f;
  for (int slot = 0; slot < panels.stages * kOwnSlots; ++slot) {
    const int64_t d = dim_of_slot(slot);
    float sum[4] = {};
    add_parts(parts, a.plan.slices_n, stride, slot, sum);
    for (float& x : sum) x *= d < a.p.D ? factor * weights_of(a, at)[d] : 0.f;
    write_rows(a.p.grad_q, offset, last_row0(own_key0()) + row_of_slot(slot), at.rows, d, a.p.D,
               sum);
  }
}

// dV in the layout of its sums. Their rows are keys.
template <typename Layout>
FASTATTN_DEVICE void write_value_gradient(const BackwardArgs& a, const Place& at, float* parts) {
  const int64_t stride = a.plan.panels.tiles_n * a.plan.block_k;
  for (int64_t e0 = 0; e0 < a.p.E; e0 += kTile) {
    Pairs<Layout> sum = {};
#pragma unroll
    for (int n = 0; n < kRows; ++n)
      add_parts(parts, a.p.H / a.p.Hkv * a.plan.slices_m, stride, value_slot(a, e0) + n, sum[n]);
    store_tile<Layout>(a.p.grad_v, offset_of(a.p.grad_v, at.b, at.hkv, at.j0, e0), at.cols,
                       extent(a.p.E, e0), sum);
  }
}

// One block per tile of keys. Parts are those of all heads that share the keys.
__global__ void __launch_bounds__(kThreads, 4)
    additive_keys_kernel(const __grid_constant__ BackwardArgs a) {
  const BackwardParams& p = a.p;
  const Panels& panels = a.plan.panels;
  uint32_t block = blockIdx.x;
  const int64_t j0 = take_digit(&block, panels.tiles_n) * kTile;
  const int64_t hkv = take_digit(&block, p.Hkv), b = block, group = p.H / p.Hkv;
  Place at = place(p, b, hkv * group, 0, j0);
  float* const parts = key_sums(a, b * p.H + at.h, 0, j0 / kTile);
  const int64_t stride = panels.tiles_n * a.plan.block_k, of_head = stride * a.plan.slices_m;
  const int64_t offset = offset_of(p.grad_k, b, hkv, j0, 0);
  const float factor = is_gaussian(p) ? 1.f : 4.f;
  for (int slot = 0; slot < panels.stages * kOwnSlots; ++slot) {
    const int64_t d = dim_of_slot(slot);
    float sum[4] = {};
    for (int64_t g = 0; g < group; ++g) {
      float of_one[4] = {};
      at.h = static_cast<int>(hkv * group + g);
      add_parts(parts + g * of_head, a.plan.slices_m, stride, slot, of_one);
      const float weight = d < p.D ? factor * weights_of(a, at)[d] : 0.f;
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[n] += weight * of_one[n];
    }
    write_rows(p.grad_k, offset, own_key0() + row_of_slot(slot), at.cols, d, p.D, sum);
  }
  has_halves(p) ? write_value_gradient<QueryRows>(a, at, parts)
                : write_value_gradient<FragmentLayout>(a, at, parts);
}

// dw, one block per stage of dims of a head. A warp adds up every kWarps-th part.
__global__ void __launch_bounds__(kThreads)
    additive_weight_gradient_kernel(const __grid_constant__ BackwardArgs a) {
  __shared__ float sums[kThreads];
  const Panels& panels = a.plan.panels;
  uint32_t block = blockIdx.x;
  const int64_t d = take_digit(&block, panels.stages) * kStage + lane(), head = block;
  const int64_t parts = a.plan.slices_m * a.plan.slices_n;
  const float* const from = workspace(a) + a.plan.weights + head * parts * panels.dims + d;
  float sum = 0.f;
  for (int64_t part = warp(); d < a.p.D && part < parts; part += kWarps)
    sum += from[part * panels.dims];
  sums[thread()] = sum;
  __syncthreads();
  if (warp() > 0 || d >= a.p.D) return;
  for (int n = 1; n < kWarps; ++n) sum += sums[n * 32 + lane()];
  if (is_gaussian(a.p)) {  // w holds bandwidths h: dh = c r / h times the sum
    const float slope = workspace(a)[panels.weights + head * panels.dims + d];
    sum = sum * slope / load_element(a.p.w, offset_of(a.p.w, head / a.p.H, head % a.p.H, 0, d));
  }
  a.p.grad_w[head * a.p.D + d] = sum;
}

}  // namespace

void launch_gradients(const BackwardArgs& args, Launcher& launcher) {
  const BackwardParams& p = args.p;
  const Panels& panels = args.plan.panels;
  const int64_t heads = p.B * p.H;
  launcher.run(additive_gradients_kernel, heads * args.plan.slices_m * args.plan.slices_n, kThreads,
               sizeof(BackwardMemory), args);
  launcher.run(additive_queries_kernel, heads * panels.tiles_m, kThreads, 0, args);
  launcher.run(additive_keys_kernel, p.B * p.Hkv * panels.tiles_n, kThreads, 0, args);
  if (p.grad_w != nullptr)
    launcher.run(additive_weight_gradient_kernel, heads * panels.stages, kThreads, 0, args);
}

}  // namespace fastattn::cuda
