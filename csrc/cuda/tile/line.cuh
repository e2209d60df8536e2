// The gradient of a bias that is a line: sums of dS over diagonals. A block adds up the tiles of
// one diagonal, or of a slice of it, in order, and then the diagonals of that sum. Those of
// neighbouring blocks overlap, so every block has a part of its own in the workspace.
#pragma once

#include "cuda/base/launcher.cuh"
#include "cuda/tile/tile.cuh"

namespace fastattn::cuda {

constexpr int kLinePart = 2 * kTile;  // numbers of a block, the last of which is 0
static_assert(kLinePart == kThreads);

FASTATTN_FN int64_t line_blocks(const AttentionParams& p) {
  return ceil_div(p.M, kTile) + ceil_div(p.N, kTile) - 1;
}
// Floats of all parts, [bias_B][bias_H][slices][line_blocks()][kLinePart].
FASTATTN_FN int64_t line_floats(const BackwardParams& p, int64_t slices) {
  return p.bias_B * p.bias_H * slices * line_blocks(p) * kLinePart;
}

// The tiles of a block, from (m, n) on.
struct TileDiagonal {
  int64_t m, n, count;
};
FASTATTN_DEVICE TileDiagonal tile_diagonal(const AttentionParams& p, int64_t number) {
  const int64_t tiles_m = ceil_div(p.M, kTile), tiles_n = ceil_div(p.N, kTile);
  const int64_t ahead = number - (tiles_m - 1), m = max64(0, -ahead), n = max64(0, ahead);
  return {m, n, min64(tiles_m - m, tiles_n - n)};
}

// Writes the sums over the diagonals of a tile [r][c], whose elements at(r, c) gives: that of
// c - r = t - (kTile - 1) to part[t].
template <typename F>
FASTATTN_DEVICE void store_diagonals(F at, float* part) {
  float sum = 0.f;
  for (int r = 0; r < kTile; ++r) {
    const int c = r + thread() - (kTile - 1);
    if (c >= 0 && c < kTile) sum += at(r, c);
  }
  part[thread()] = sum;
}

// Adds up the parts, which begin at `parts` in the workspace, to grad_bias.
void launch_line(const BackwardParams& p, int64_t parts, int64_t slices, Launcher& launcher);

}  // namespace fastattn::cuda
