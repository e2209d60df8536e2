// Gradient of the bias. A block has one tile, and one slice of the batches and heads that share the
// tile. If the bias is a line, a block has one diagonal of tiles. A second kernel adds up the
// parts.
#include "cuda/additive/backward.cuh"
#include "cuda/tile/line.cuh"

namespace fastattn::cuda {
namespace {

struct BiasTile {
  int64_t b, h, tile_m, tile_n, slice;  // of the bias's own batches and heads
  int64_t count;                        // of tiles, on a diagonal from this one on
};

FASTATTN_DEVICE BiasTile bias_tile(const BackwardArgs& a, uint32_t block) {
  BiasTile tile{};
  if (a.p.bias_is_line) {
    const TileDiagonal diagonal = tile_diagonal(a.p, take_digit(&block, line_blocks(a.p)));
    tile.tile_m = diagonal.m, tile.tile_n = diagonal.n, tile.count = diagonal.count;
    tile.h = take_digit(&block, a.p.bias_H);
    tile.b = block;
    return tile;
  }
  tile.count = 1;
  tile.tile_n = take_digit(&block, a.plan.panels.tiles_n);
  tile.tile_m = take_digit(&block, a.plan.panels.tiles_m);
  tile.slice = take_digit(&block, a.plan.slices);
  tile.h = take_digit(&block, a.p.bias_H);
  tile.b = block;
  return tile;
}

// dS of the tiles, summed over the batches and heads of a slice.
FASTATTN_DEVICE void sum_slice(const BackwardArgs& a, const BiasTile& tile, StageMemory& memory,
                               Fragment& sum) {
  const BackwardParams& p = a.p;
  const int64_t sharers = bias_sharers(p), heads = p.bias_H == 1 ? p.H : 1;
  const int64_t begin = tile.slice * sharers / a.plan.slices * tile.count;
  clear(sum);
  for (int64_t step = begin; step < (tile.slice + 1) * sharers / a.plan.slices * tile.count;
       ++step) {
    const int64_t n = step / tile.count, along = step % tile.count;
    const Place at =
        place(p, p.bias_B == 1 ? n / heads : tile.b, p.bias_H == 1 ? n % heads : tile.h,
              (tile.tile_m + along) * kTile, (tile.tile_n + along) * kTile);
    const TileMask mask = mask_tile<FragmentLayout>(p, at, a.spans);
    if (mask.empty) continue;
    Fragment weights, ds;
    gradient_tile(a, at, mask.bits, memory, weights, ds, nullptr);
    add(ds, sum);
  }
}

// Sums a tile over its rows into row 0, or over its columns into column 0.
FASTATTN_DEVICE void reduce_tile(bool over_rows, float* memory, Fragment& tile) {
  __syncthreads();
  store_fragment<false>(tile, memory);
  __syncthreads();
  if (thread() < kTile) {
    float sum = 0.f;
    for (int n = 0; n < kTile; ++n)
      sum += memory[over_rows ? tile_index(n, thread()) : tile_index(thread(), n)];
    memory[over_rows ? tile_index(0, thread()) : tile_index(thread(), 0)] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) load_cols(memory, row0() + r, tile[r]);
}

// Where a tile's sums go.
FASTATTN_DEVICE View bias_target(const BackwardArgs& a, const BiasTile& tile) {
  const AdditiveBackwardPlan& plan = a.plan;
  const int64_t part_m = plan.parts_m == 1 ? 0 : tile.tile_m;
  const int64_t part_n = plan.parts_n == 1 ? 0 : tile.tile_n;
  const int64_t part = (tile.slice * plan.parts_m + part_m) * plan.parts_n + part_n;
  return bias_part(a.p, plan.bias, bias_parts(plan), tile.b, tile.h, part);
}

// Holds two fragments besides dP: two blocks an SM.
__global__ void __launch_bounds__(kThreads, 2)
    additive_bias_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  const BiasTile tile = bias_tile(a, blockIdx.x);
  const int64_t i0 = tile.tile_m * kTile, j0 = tile.tile_n * kTile;
  Fragment sum;
  sum_slice(a, tile, memory.stage, sum);
  if (p.bias_is_line) {
    __syncthreads();
    store_fragment<false>(sum, memory.ds);
    __syncthreads();
    store_diagonals([&](int r, int c) { return memory.ds[tile_index(r, c)]; },
                    workspace(a) + a.plan.bias + int64_t{blockIdx.x} * kLinePart);
    return;
  }
  if (p.bias_M == 1) reduce_tile(true, memory.ds, sum);
  if (p.bias_N == 1) reduce_tile(false, memory.ds, sum);
  const View to = bias_target(a, tile);
  store_tile<FragmentLayout>(
      to, offset_of(to, 0, 0, p.bias_M == 1 ? 0 : i0, p.bias_N == 1 ? 0 : j0),
      p.bias_M == 1 ? 1 : extent(p.M, i0), p.bias_N == 1 ? 1 : extent(p.N, j0), sum);
}

}  // namespace

void launch_grad_bias(const BackwardArgs& args, Launcher& launcher) {
  const BackwardParams& p = args.p;
  const Panels& panels = args.plan.panels;
  const int64_t tiles = p.bias_is_line ? line_blocks(p) : panels.tiles_m * panels.tiles_n;
  const int64_t heads = p.bias_B * p.bias_H;
  launcher.run(additive_bias_kernel, heads * args.plan.slices * tiles, kThreads,
               kSharedWithoutWeights, args);
  if (p.bias_is_line) return launch_line(p, args.plan.bias, 1, launcher);
  launch_bias_parts(p, args.plan.bias, bias_parts(args.plan), launcher);
}

}  // namespace fastattn::cuda
