// Gradients of the queries and of w, one block per tile of queries. A second kernel adds up the
// gradients of w over the tiles.
#include "cuda/additive/backward.cuh"

namespace fastattn::cuda {
namespace {

// Adds the tile's share of dq, without the factor 4 w (gaussian: -c r), and of dw. Per stage of
// dims, `sums` has kOwn slots of dq and one slot of dw.
template <Loop kLoop>
FASTATTN_DEVICE void add_query_gradient(const BackwardArgs& a, const Place& at,
                                        BackwardMemory& memory, float* sums) {
  constexpr bool kDirect = kLoop != Loop::kFactors;
  const AdditiveTiles tiles = tiles_of(a);
  for (int64_t d0 = 0; d0 < tiles.panels.dims; d0 += kStage) {
    const int count = staged_dims(tiles, d0);
    __syncthreads();
    stage_keys(tiles, at, kDirect, d0, count, memory.stage.keys);
    __syncthreads();
    if (own_dim0() >= count || own_row0() >= at.rows) continue;
    OwnTile own, acc = {};
    float weight[kOwn] = {};
    load_own<false>(tiles, at, kDirect, d0, own);
    add_in_loop<kLoop, false>(tiles, at, d0 + own_dim0(), own, memory.stage.keys, memory.ds,
                              at.cols, acc, weight);
    const int64_t slot = d0 / kStage * (kOwn + 1);
    const float unit = unit_of_ds(memory);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int d = 0; d < kOwn; ++d) acc[r][d] *= tile_factor<kLoop>(own[r][d]) * unit;
      add_to_sum(sums, slot + r, acc[r]);
      weight[r] *= unit * (1.f / kGradUnit);
    }
    add_to_sum(sums, slot + kOwn, weight);
  }
}

FASTATTN_DEVICE void write_query_gradient(const BackwardArgs& a, const Place& at, float* sums) {
  const View& to = a.p.grad_q;
  const float factor = is_gaussian(a.p) ? -1.f : 4.f;
  const int64_t head = weights_head(tiles_of(a), at);
  const float* const weights = workspace(a) + a.plan.panels.weights + head * a.plan.panels.dims;
  for (int64_t stage = 0; stage < a.plan.panels.stages; ++stage) {
    const int64_t d0 = stage * kStage + own_dim0();
    for (int r = 0; r < kOwn; ++r) {
      if (own_row0() + r >= at.rows) continue;
      float sum[kOwn];
      unpack4(own_sum(sums, stage * (kOwn + 1) + r), sum);
      const int64_t offset = offset_of(to, at.b, at.h, at.i0 + own_row0() + r, d0);
      for (int d = 0; d < kOwn && d0 + d < a.p.D; ++d)
        with_dtype(to.dtype, [&](auto type) {
          store_as<type>(to.data, offset + d * to.stride_c, factor * weights[d0 + d] * sum[d]);
        });
    }
  }
}

// Writes dw of this tile of queries.
FASTATTN_DEVICE void write_weight_gradient(const BackwardArgs& a, float* sums, float* staged) {
  const Panels& panels = a.plan.panels;
  float* const to = workspace(a) + a.plan.weights + blockIdx.x * panels.dims;
  for (int64_t stage = 0; stage < panels.stages; ++stage) {
    __syncthreads();
    reinterpret_cast<float4*>(staged)[thread()] = own_sum(sums, stage * (kOwn + 1) + kOwn);
    __syncthreads();
    const int64_t d = stage * kStage + thread();
    if (thread() >= kStage || d >= panels.dims) continue;
    float sum = 0.f;
    for (int n = 0; n < kTile / kOwn; ++n) sum += staged[n * kStage + thread()];
    to[d] = sum;
  }
}

__global__ void __launch_bounds__(kThreads, 3)
    additive_queries_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  // Each use computes this address again. Keeping the address over the loop would take two
  // registers too many.
  const auto sums = [&] {
    const int64_t block = opaque_here(static_cast<int>(blockIdx.x));
    return workspace(a) + a.plan.sums_q + block * a.plan.block_q;
  };
  Place at = query_place(a, blockIdx.x);
  clear_sums(sums(), a.plan.panels.stages * (kOwn + 1));

  const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  at.j0 = keys.begin / kTile * kTile;
  // The loop counts tiles, which takes one register. The last key would take two.
  for (int left = static_cast<int>(ceil_div(keys.end - at.j0, kTile)); left > 0;
       --left, at.j0 += kTile) {
    // Both are computed in each tile: the rows and their sign, kept over the loop, would spill.
    at.rows = extent(p.M, opaque(at.i0)), at.cols = extent(p.N, at.j0);
    const TileMask mask = mask_tile<FragmentLayout>(p, at);
    if (mask.empty) continue;
    Fragment weights, ds;
    gradient_tile(a, at, mask.bits, memory.stage, weights, ds, memory.ds);
    store_ds(ds, memory);
    if (is_gaussian(p)) {
      add_query_gradient<Loop::kDifferences>(a, at, memory, sums());
    } else if (is_direct(tiles_of(a), at)) {
      add_query_gradient<Loop::kDirect>(a, at, memory, sums());
    } else {
      add_query_gradient<Loop::kFactors>(a, at, memory, sums());
    }
  }

  write_query_gradient(a, at, sums());
  write_weight_gradient(a, sums(), memory.stage.queries);
}

// Adds up dw over the tiles of queries, one block per head of a batch.
__global__ void __launch_bounds__(kThreads, 3)
    additive_weight_gradient_kernel(const __grid_constant__ BackwardArgs a) {
  const Panels& panels = a.plan.panels;
  const float* const from = workspace(a) + a.plan.weights;
  for (int64_t d = thread(); d < a.p.D; d += kThreads) {
    float sum = 0.f;
    for (int64_t tile = 0; tile < panels.tiles_m; ++tile)
      sum += from[(blockIdx.x * panels.tiles_m + tile) * panels.dims + d];
    if (is_gaussian(a.p)) {  // w holds bandwidths h: dh = c r / h times the sum
      const int64_t b = blockIdx.x / a.p.H, h = blockIdx.x % a.p.H;
      const float slope = workspace(a)[panels.weights + blockIdx.x * panels.dims + d];
      sum = sum * slope / load_element(a.p.w, offset_of(a.p.w, b, h, 0, d));
    }
    a.p.grad_w[blockIdx.x * a.p.D + d] = sum;
  }
}

}  // namespace

void launch_grad_query(const BackwardArgs& args, Launcher& launcher) {
  const BackwardParams& p = args.p;
  const int64_t tiles = p.B * p.H * args.plan.panels.tiles_m;
  launcher.run(additive_queries_kernel, tiles, kThreads, kSharedWithoutWeights, args);
  if (p.grad_w != nullptr)
    launcher.run(additive_weight_gradient_kernel, p.B * p.H, kThreads, 0, args);
}

}  // namespace fastattn::cuda
