// What the kernels of the additive backward pass share: the arguments, the shared memory of a
// block, W and dS of a tile. backward.cu has the formulas.
#pragma once

#include "cuda/additive/half_products.cuh"
#include "cuda/base/launcher.cuh"

namespace fastattn::cuda {

struct BackwardArgs {
  BackwardParams p;
  AdditiveBackwardPlan plan;
  TileSpan* spans;  // of keys, spans.cuh
  float unit;
};

// The tile of queries that a block is at, and the key tiles that its rows keep.
struct Visited {
  int32_t tile_m;
  Span keys;
};

struct __align__(16) BackwardMemory {
  StageMemory stage;
  float largest[kWarps];           // per warp: the largest |dS| of the warp's share of the tile
  float ds[kTile * kTile];         // dS / unit_of_ds [j][i], times kGradUnit for add_gradient()
  union {                          // only gradients.cu has these
    float weights[kTile * kTile];  // [i][j]
    HalfWeights halves;
  };
  Visited visited;  // and this
};
constexpr size_t kSharedWithoutWeights = offsetof(BackwardMemory, weights);

FASTATTN_DEVICE float* workspace(const BackwardArgs& a) {
  return static_cast<float*>(a.p.workspace);
}
FASTATTN_DEVICE AdditiveTiles tiles_of(const BackwardArgs& a) {
  return {a.p, a.plan.panels, workspace(a), a.unit};
}

// product = dO V^T of a tile.
FASTATTN_DEVICE void value_products(const BackwardParams& p, const Place& at, StageMemory& memory,
                                    Fragment& product) {
  if (has_halves(p)) return half_value_products(p, at, memory, product);
  clear(product);
  for (int64_t e0 = 0; e0 < p.E; e0 += kStage) {
    const int count = static_cast<int>(min64(kStage, p.E - e0));
    __syncthreads();
    stage_transposed(p.grad_out, offset_of(p.grad_out, at.b, at.h, at.i0, e0), at.rows, count,
                     memory.queries);
    stage_transposed(p.v, offset_of(p.v, at.b, at.hkv, at.j0, e0), at.cols, count, memory.keys);
    __syncthreads();
    if (warp_has_rows(at)) outer_add<false>(memory.queries, 0, memory.keys, count, product);
  }
}

// Multiplies dS by the slopes that this thread wrote.
FASTATTN_DEVICE void multiply_slopes(const float* slopes, Fragment& ds) {
  const int first = opaque_here(row0()), col = opaque_here(col0());
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float row[kCols];
    unpack4(load4(slopes, first + r, col), row);
#pragma unroll
    for (int c = 0; c < kCols; ++c) ds[r][c] *= row[c];
  }
}

// Computes W and dS of a tile, both exactly 0 where masked. Begins with a barrier unless D and E
// are both 0. With a curve dS is the gradient of the scores, and a tile `slopes` is overwritten.
// If `slopes` is nullptr, dS is the gradient of the logits.
FASTATTN_DEVICE void gradient_tile(const BackwardArgs& a, const Place& at, KeepBits bits,
                                   StageMemory& memory, Fragment& weights, Fragment& ds,
                                   float* slopes) {
  weights_tile(tiles_of(a), at, bits, a.p.stats, memory, weights, slopes);
  value_products(a.p, at, memory, ds);
  with_dtype(a.p.grad_weights.dtype, [&](auto type) {
    for_grad_weights<FragmentLayout, type>(
        a.p, at, bits, [&](int pair, float grad) { ds[pair / 4][pair % 4] += grad; });
  });
  const KeepBits survivors = surviving_bits<FragmentLayout>(a.p, at);
  drop(a.p, survivors, ds);
  const float* const deltas = workspace(a) + a.plan.delta;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float delta = row0() + r < at.rows ? deltas[row_number(a.p, at, r)] : 0.f;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const float grad = weights[r][c] * (ds[r][c] - delta);
      ds[r][c] = kept(bits, r, c) ? grad : 0.f;
    }
  }
  drop(a.p, survivors, weights);
  if (is_curved(a.p) && slopes != nullptr) multiply_slopes(slopes, ds);
}

// The power of two that divides the stored dS of a tile, near the largest |dS|. The sums of
// gradients have factors of 2^80 beside dS. Without this unit, ordinary gradients would overflow or
// underflow there. Callers read the unit where they use it, because keeping the unit over the
// loops would take a register.
FASTATTN_DEVICE float unit_of_ds(const BackwardMemory& memory) {
  float largest = 0.f;
  for (int n = 0; n < kWarps; ++n) largest = max_of(largest, memory.largest[n]);
  return fminf(fmaxf(power_below(largest), 0x1p-80f), 0x1p80f);
}

// Writes `unit` dS to memory.ds, as [j][i] in its unit, and each warp's largest |dS|. Has a barrier
// inside. The caller needs a barrier before reading memory.ds.
FASTATTN_DEVICE void store_ds(Fragment& ds, BackwardMemory& memory, float unit) {
  float largest = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) largest = max_of(largest, fabsf(ds[r][c]));
  largest = lanes_max(largest, 32);
  if (lane() == 0) memory.largest[warp()] = largest;
  __syncthreads();
  const float factor = unit / unit_of_ds(memory);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) ds[r][c] *= factor;
  store_fragment<true>(ds, memory.ds);
}

// Launch the kernels of each result. All but launch_delta() read delta.
void launch_delta(const BackwardArgs& args, Launcher& launcher);
void launch_gradients(const BackwardArgs& args, Launcher& launcher);  // of q, k, v; w if wanted
void launch_grad_bias(const BackwardArgs& args, Launcher& launcher);

}  // namespace fastattn::cuda
