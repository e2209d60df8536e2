// Gradients of keys and values. A block has one tile of keys and all query heads that share the
// tile.
#include "cuda/additive/backward.cuh"

namespace fastattn::cuda {
namespace {

// The first slot in `sums` of dV's columns [e0, e0 + kTile), which take kRows slots. dk comes
// before dV, with kOwn slots per stage of dims.
FASTATTN_DEVICE int64_t value_slot(const BackwardArgs& a, int64_t e0) {
  return a.plan.panels.stages * kOwn + e0 / kTile * kRows;
}

FASTATTN_DEVICE void add_value_gradient(const BackwardArgs& a, const Place& at, bool full,
                                        BackwardMemory& memory, float* sums) {
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
#pragma unroll
    for (int r = 0; r < kRows; ++r) add_to_sum(sums, value_slot(a, e0) + r, acc[r]);
  }
}
FASTATTN_DEVICE void add_half_value_gradient(const BackwardArgs& a, const Place& at, bool full,
                                             BackwardMemory& memory, float* sums) {
  const View& from = a.p.grad_out;
  HalfTile& tile = *reinterpret_cast<HalfTile*>(memory.stage.queries);
  for (int64_t e0 = 0; e0 < a.p.E; e0 += kTile) {
    Sums sum = {};
    add_weighted<true>(from, offset_of(from, at.b, at.h, at.i0, e0), at.rows, extent(a.p.E, e0),
                       full, memory.halves, tile, sum);
#pragma unroll
    for (int n = 0; n < kRows; ++n) add_to_sum(sums, value_slot(a, e0) + n, sum[n]);
  }
}

template <Loop kLoop>
FASTATTN_DEVICE void add_key_gradient(const BackwardArgs& a, const Place& at,
                                      BackwardMemory& memory, float* sums) {
  const AdditiveTiles tiles = tiles_of(a);
  constexpr bool kDirect = kLoop != Loop::kFactors, kGaussian = kLoop == Loop::kDifferences;
  const float* const weights =
      workspace(a) + tiles.panels.weights + weights_head(tiles, at) * tiles.panels.dims;
  for (int64_t d0 = 0; d0 < tiles.panels.dims; d0 += kStage) {
    const int count = staged_dims(tiles, d0);
    __syncthreads();
    stage_queries(tiles, at, tiles.panels.gradient_queries, kDirect, d0, count,
                  memory.stage.queries);
    __syncthreads();
    if (own_dim0() >= count || own_row0() >= at.cols) continue;
    OwnTile own, acc = {};
    float unused[kOwn] = {};
    load_own<true>(tiles, at, kDirect, d0, own);
    add_in_loop<kLoop, true>(tiles, at, d0 + own_dim0(), own, memory.stage.queries, memory.ds,
                             at.rows, acc, unused);
    const float unit = unit_of_ds(memory);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int d = 0; d < kOwn; ++d) {
        const float sum = acc[r][d] * (tile_factor<kLoop>(own[r][d]) * unit);
        acc[r][d] = sum * ((kGaussian ? 1.f : 4.f) * weights[d0 + own_dim0() + d]);
      }
      add_to_sum(sums, d0 / kStage * kOwn + r, acc[r]);
    }
  }
}

// In the layout of the sums. Their rows are keys.
template <typename Layout>
FASTATTN_DEVICE void write_value_gradient(const BackwardArgs& a, const Place& at, float* sums) {
  const View& to = a.p.grad_v;
  for (int64_t e0 = 0; e0 < a.p.E; e0 += kTile) {
    Pairs<Layout> sum;
#pragma unroll
    for (int n = 0; n < kRows; ++n) unpack4(own_sum(sums, value_slot(a, e0) + n), sum[n]);
    store_tile<Layout>(to, offset_of(to, at.b, at.hkv, at.j0, e0), at.cols, extent(a.p.E, e0), sum);
  }
}

FASTATTN_DEVICE void write_key_gradients(const BackwardArgs& a, const Place& at, float* sums) {
  const View& k = a.p.grad_k;
  for (int64_t stage = 0; stage < a.plan.panels.stages; ++stage) {
    const int64_t d0 = stage * kStage + own_dim0();
    for (int r = 0; r < kOwn; ++r) {
      if (own_row0() + r >= at.cols) continue;
      float sum[kOwn];
      unpack4(own_sum(sums, stage * kOwn + r), sum);
      const int64_t offset = offset_of(k, at.b, at.hkv, at.j0 + own_row0() + r, d0);
      for (int d = 0; d < kOwn && d0 + d < a.p.D; ++d)
        with_dtype(k.dtype,
                   [&](auto type) { store_as<type>(k.data, offset + d * k.stride_c, sum[d]); });
    }
  }
  has_halves(a.p) ? write_value_gradient<QueryRows>(a, at, sums)
                  : write_value_gradient<FragmentLayout>(a, at, sums);
}

__global__ void __launch_bounds__(kThreads, 3)
    additive_keys_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  // Each use computes this address again, and the last head. Kept over the loop, they would take
  // registers too many.
  const auto sums = [&] {
    const int64_t block = opaque_here(static_cast<int>(blockIdx.x));
    return workspace(a) + a.plan.sums_k + block * a.plan.block_k;
  };
  uint32_t block = blockIdx.x;
  const int64_t j0 = take_digit(&block, a.plan.panels.tiles_n) * kTile;
  const int64_t hkv = take_digit(&block, p.Hkv), b = block;
  const int group = static_cast<int>(p.H) / static_cast<int>(p.Hkv);
  Place at = place(p, b, hkv * group, 0, j0);
  find_rows(p, a.spans, at, memory.visited);
  const auto end = [&] {
    return (opaque_here(at.hkv) + 1) * (static_cast<int>(p.H) / static_cast<int>(p.Hkv));
  };
  clear_sums(sums(), value_slot(a, ceil_div(p.E, kTile) * kTile));

  for (; at.h < end(); ++at.h)
    for (at.i0 = first_row(memory.visited); at.i0 < rows_end(memory.visited); at.i0 += kTile) {
      at.rows = extent(p.M, at.i0);
      // What depends on these stays in the loop, and is computed from them alone.
      at.i0 = opaque(at.i0), at.j0 = opaque_here(static_cast<int>(at.j0));
      const TileMask mask = mask_tile<FragmentLayout>(p, at, a.spans.keys);
      if (mask.empty) continue;
      Fragment weights, ds;
      gradient_tile(a, at, mask.bits, memory.stage, weights, ds, memory.ds);
      has_halves(p) ? store_weights(p.v.dtype, weights, mask.bits, memory.halves)
                    : store_fragment<false>(weights, memory.weights);
      store_ds(ds, memory);
      has_halves(p) ? add_half_value_gradient(a, at, mask.full, memory, sums())
                    : add_value_gradient(a, at, mask.full, memory, sums());
      if (is_gaussian(p)) {
        add_key_gradient<Loop::kDifferences>(a, at, memory, sums());
      } else if (is_direct(tiles_of(a), at)) {
        add_key_gradient<Loop::kDirect>(a, at, memory, sums());
      } else {
        add_key_gradient<Loop::kFactors>(a, at, memory, sums());
      }
    }
  write_key_gradients(a, at, sums());
}

}  // namespace

void launch_grad_key(const BackwardArgs& args, Launcher& launcher) {
  const int64_t tiles = args.p.B * args.p.Hkv * args.plan.panels.tiles_n;
  launcher.run(additive_keys_kernel, tiles, kThreads, sizeof(BackwardMemory), args);
}

}  // namespace fastattn::cuda
