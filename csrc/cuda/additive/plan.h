// How an additive or gaussian problem is cut into tiles, and what the kernels keep in the
// workspace. Sums are cut by the shape, the score and the wanted results alone.
#pragma once

#include "cuda/tile/bias_parts.cuh"
#include "cuda/tile/few_queries.h"
#include "cuda/tile/line.cuh"
#include "cuda/tile/spans.cuh"
#include "cuda/tile/tile.cuh"

namespace fastattn::cuda {

// A row of queries and weights, and a tile's sums, must fit the shared memory of every device.
constexpr int64_t kSharedLimit = 99 << 10;  // of a block on sm_86, the least from sm_80 on
constexpr int64_t kMaxDims = 4096, kMaxValues = 256;

// What the prologue (prepare.cu) makes for the tiles; offsets into the workspace, in
// floats. A panel is an array [dims][kTile] over the rows of one tile.
struct Panels {
  int64_t dims;    // D, filled up to a multiple of kCols
  int64_t stages;  // of kStage dims each
  int64_t panel;   // floats
  int64_t tiles_m, tiles_n;
  bool few;                  // queries
  bool raw;                  // no panels: all tiles are direct, or differences
  int64_t units, weights;    // [H][dims]; of the gaussian score r and c r, [B][H][dims]
  int64_t halves;            // [H][stages]
  int64_t scales;            // a head (of the gaussian: of a batch) each
  int64_t centres;           // [B][Hkv][dims]
  int64_t direct;            // [B][Hkv][tiles_n], int32: whether keys are far from each other
  int64_t keys;              // [B][Hkv][tiles_n] panels of F
  int64_t queries;           // [B][H][tiles_m] panels of E / w
  int64_t gradient_queries;  // [B][H][tiles_m] panels of E, for backward
};

FASTATTN_FN bool is_gaussian(const AttentionParams& p) { return p.score == ScoreKind::kGaussian; }

FASTATTN_FN void take_terms(const AttentionParams& p, Panels* panels, int64_t* used) {
  const int64_t heads = is_gaussian(p) ? p.B * p.H : p.H;
  panels->dims = ceil_div(p.D, kCols) * kCols;
  panels->stages = ceil_div(panels->dims, kStage);
  panels->panel = panels->dims * kTile;
  panels->few = p.M <= kFewQueries && !is_gaussian(p);
  panels->raw = panels->few || is_gaussian(p);
  panels->tiles_m = ceil_div(p.M, kTile);
  panels->tiles_n = ceil_div(p.N, kTile);
  panels->units = take(used, heads * panels->dims);
  panels->weights = take(used, heads * panels->dims);
  panels->halves = take(used, p.H * panels->stages);
  panels->scales = take(used, heads);
}

FASTATTN_FN void take_panels(const AttentionParams& p, bool backward, Panels* panels,
                             int64_t* used) {
  take_terms(p, panels, used);
  if (panels->raw) return;
  const int64_t query_panels = p.B * p.H * panels->tiles_m * panels->panel;
  panels->centres = take(used, p.B * p.Hkv * panels->dims);
  panels->direct = take(used, p.B * p.Hkv * panels->tiles_n);
  panels->keys = take(used, p.B * p.Hkv * panels->tiles_n * panels->panel);
  panels->queries = take(used, query_panels);
  panels->gradient_queries = take(used, backward ? query_panels : 0);
}

// ---- forward ----

struct AdditiveForwardPlan {
  Panels panels;
  int64_t chunk_keys, chunks;  // of a row, or of a tile of queries; each has a block
  int64_t partials;            // merge.cuh, unless there is one chunk
  int64_t scores;              // [B][H][M][N] logits, when weights are wanted
  int64_t workspace_bytes;
};

// Blocks that keep a GPU busy: an H200 has 396 of them at a time. The number is fixed, so that sums
// depend on the shape, and not on the device; other GPUs were not measured. A chunk has several
// tiles, as its sums pass through the workspace: at most 200 MB of it. Few samples have more chunks
// a row than many have.
constexpr int64_t kForwardBlocks = 1536, kChunkTiles = 4;

FASTATTN_FN AdditiveForwardPlan plan_additive_forward(const ForwardParams& p) {
  AdditiveForwardPlan plan{};
  int64_t used = 0;
  take_panels(p, false, &plan.panels, &used);
  const bool few = plan.panels.few;
  const int64_t blocks = max64(1, p.B * p.H * plan.panels.tiles_m);
  const int64_t most = few ? kMaxParts : min64(kMaxParts, ceil_div(kForwardBlocks, blocks));
  const int64_t step = few ? kThreads : kTile, least = few ? 1 : kChunkTiles;
  plan.chunk_keys = max64(least, ceil_div(p.N, most * step)) * step;
  plan.chunks = max64(1, ceil_div(p.N, plan.chunk_keys));
  if (few || plan.chunks > 1) plan.partials = take(&used, partial_floats(p, plan.chunks));
  if (few && p.weights_mode != WeightsMode::kNone) plan.scores = take(&used, p.B * p.H * p.M * p.N);
  plan.workspace_bytes = 4 * used;
  return plan;
}

// ---- backward ----

struct AdditiveBackwardPlan {
  Panels panels;
  int64_t delta;  // [B][H][M]

  // A block of the gradients has one slice of the query tiles and one of the key tiles of a head.
  int64_t slices_m, slices_n;
  int64_t sums_q;  // [B][H][slices_n][tiles_m][block_q]: parts of dq, as blocks add them (own_sum)
  int64_t sums_k;  // [B][H][slices_m][tiles_n][block_k]: of dk and dV
  int64_t sums_w;  // [B][H][slices_m][slices_n][stages][kThreads][kOwnDims]: of dw
  int64_t block_q, block_k;
  int64_t weights;  // [B][H][slices_m][slices_n][dims]: dw of each block

  // The gradient of a bias is added up by tiles, over slices of the batches and heads that share
  // it. Parts are [bias_B][bias_H][parts][bias_M][bias_N]; one part is the gradient itself. That of
  // a line is added up by diagonals of tiles (line.cuh).
  int64_t slices, parts_m, parts_n, bias;
  int64_t spans;  // of keys, spans.cuh
  int64_t workspace_bytes;
};

FASTATTN_FN int64_t bias_parts(const AdditiveBackwardPlan& plan) {
  return plan.slices * plan.parts_m * plan.parts_n;
}

FASTATTN_FN void plan_bias(const BackwardParams& p, AdditiveBackwardPlan* plan, int64_t* used) {
  plan->slices = plan->parts_m = plan->parts_n = 1;
  if (p.bias_is_line) {
    plan->bias = take(used, line_floats(p, 1));
    return;
  }
  const int64_t tiles_m = plan->panels.tiles_m, tiles_n = plan->panels.tiles_n;
  const int64_t blocks = p.bias_B * p.bias_H * tiles_m * tiles_n;
  plan->slices = bias_slices(blocks, bias_sharers(p));
  plan->parts_m = p.bias_M == 1 ? tiles_m : 1;
  plan->parts_n = p.bias_N == 1 ? tiles_n : 1;
  plan->bias = take(used, bias_part_floats(p, bias_parts(*plan)));
}

// Enough blocks to keep a GPU busy, in bounded space: parts are at most kMaxSlices times as large
// as the gradients of the longer side. The number is fixed, so that sums do not depend on the
// device. 1024 blocks take 0.77 to 0.82 of the time of 512 on an H200 alone, and 2048 no less.
constexpr int64_t kGradientBlocks = 1024, kMaxSlices = 16;

FASTATTN_FN void plan_slices(const BackwardParams& p, AdditiveBackwardPlan* plan) {
  const int64_t tiles_m = plan->panels.tiles_m, tiles_n = plan->panels.tiles_n;
  const int64_t wanted = ceil_div(kGradientBlocks, max64(1, p.B * p.H));
  int64_t root = 1;
  while (root * root < wanted) ++root;
  plan->slices_m = max64(1, min64(root, min64(tiles_m, kMaxSlices)));
  const int64_t longer = max64(1, tiles_n / max64(1, tiles_m));
  plan->slices_n = ceil_div(wanted, plan->slices_m);
  plan->slices_n = max64(1, min64(plan->slices_n, min64(tiles_n, kMaxSlices * longer)));
}

FASTATTN_FN AdditiveBackwardPlan plan_additive_backward(const BackwardParams& p) {
  AdditiveBackwardPlan plan{};
  int64_t used = 0;
  take_panels(p, true, &plan.panels, &used);
  const Panels& panels = plan.panels;
  plan_slices(p, &plan);
  const int64_t heads = p.B * p.H, blocks = heads * plan.slices_m * plan.slices_n;
  plan.block_q = 4 * kThreads * panels.stages * kOwnSlots;
  plan.block_k = plan.block_q + 4 * kThreads * ceil_div(p.E, kTile) * kRows;
  plan.delta = take(&used, p.B * p.H * p.M);
  plan.sums_q = take(&used, heads * plan.slices_n * panels.tiles_m * plan.block_q);
  plan.sums_k = take(&used, heads * plan.slices_m * panels.tiles_n * plan.block_k);
  plan.sums_w = take(&used, blocks * panels.stages * kThreads * kOwnDims);
  plan.weights = take(&used, blocks * panels.dims);
  if (p.grad_bias.data != nullptr) plan_bias(p, &plan, &used);
  plan.spans = take(&used, key_span_floats(p));
  plan.workspace_bytes = 4 * used;
  return plan;
}

}  // namespace fastattn::cuda
