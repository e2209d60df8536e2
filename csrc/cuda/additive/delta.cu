// delta = dO . O + W . dW - dlse, one block per tile of queries. The sum W . dW runs over the keys,
// and only if there is dW.
#include "cuda/additive/backward.cuh"

namespace fastattn::cuda {
namespace {

// Writes terms[i] = dO_i . O_i for the rows of the tile, 32 lanes per row.
FASTATTN_DEVICE void out_terms(const BackwardParams& p, const Place& at, float* terms) {
  for (int i = thread() / 32; i < at.rows; i += kWarps) {
    const int64_t out = offset_of(p.out, at.b, at.h, at.i0 + i, 0);
    const int64_t grad = offset_of(p.grad_out, at.b, at.h, at.i0 + i, 0);
    float sum = 0.f;
    for (int64_t e = thread() % 32; e < p.E; e += 32)
      sum += load_element(p.out, out + e * p.out.stride_c) *
             load_element(p.grad_out, grad + e * p.grad_out.stride_c);
    sum = lanes_sum(sum, 32);
    if (thread() % 32 == 0) terms[i] = sum;
  }
}

// sums[r] += sum_j W_ij dW_ij over this thread's columns.
FASTATTN_DEVICE void add_weight_terms(const BackwardArgs& a, const Place& at, KeepBits bits,
                                      StageMemory& memory, float (&sums)[kRows]) {
  Fragment weights;
  weights_tile(tiles_of(a), at, bits, a.p.stats, memory, weights);
  drop(a.p, surviving_bits<FragmentLayout>(a.p, at), weights);
  with_dtype(a.p.grad_weights.dtype, [&](auto type) {
    for_grad_weights<FragmentLayout, type>(a.p, at, bits, [&](int pair, float grad) {
      sums[pair / 4] += weights[pair / 4][pair % 4] * grad;
    });
  });
}

__global__ void __launch_bounds__(kThreads, 3)
    additive_delta_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  Place at = query_place(p, a.plan.panels.tiles_m, blockIdx.x);
  float* const terms = memory.ds;
  out_terms(p, at, terms);
  __syncthreads();

  float sums[kRows] = {};
  const KeyRange keys = p.grad_weights.data == nullptr
                            ? KeyRange{0, 0}
                            : tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  for (at.j0 = keys.begin / kTile * kTile; at.j0 < keys.end; at.j0 += kTile) {
    at.cols = extent(p.N, at.j0);
    const TileMask mask = mask_tile<FragmentLayout>(p, at);
    if (!mask.empty) add_weight_terms(a, at, mask.bits, memory.stage, sums);
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = lanes_sum(sums[r], kRowLanes);
    if (thread() % kRowLanes != 0 || row0() + r >= at.rows) continue;
    const int64_t row = row_number(p, at, r);
    const float grad_lse = p.grad_lse == nullptr ? 0.f : p.grad_lse[row];
    workspace(a)[a.plan.delta + row] = terms[row0() + r] + sum - grad_lse;
  }
}

}  // namespace

void launch_delta(const BackwardArgs& args, Launcher& launcher) {
  const int64_t tiles = args.p.B * args.p.H * args.plan.panels.tiles_m;
  launcher.run(additive_delta_kernel, tiles, kThreads, kSharedWithoutWeights, args);
}

}  // namespace fastattn::cuda
