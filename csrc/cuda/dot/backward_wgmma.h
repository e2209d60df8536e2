// The backward pass by products of warpgroups (backward_wgmma.cu), as backward.cu calls it.
#pragma once

#include "cuda/base/launcher.cuh"
#include "cuda/tile/spans.cuh"
#include "problem/params.h"

namespace fastattn::cuda {

// A word a tile of 64 queries or keys, in the order of the blocks that have one each. Not 0 where a
// gradient is not finite: a kernel that keeps NaN behind the mask is to compute the tile again.
struct GradMarks {
  uint32_t *queries, *keys;  // [B][H][tiles], [B][Hkv][tiles]; nullptr: all
};
FASTATTN_FN int64_t query_marks(const AttentionParams& p) { return p.B * p.H * ((p.M + 63) / 64); }
FASTATTN_FN int64_t key_marks(const AttentionParams& p) { return p.B * p.Hkv * ((p.N + 63) / 64); }

// Bytes of workspace besides the marks. Chosen or not: another thread may choose at any time.
int64_t wgmma_backward_bytes(const BackwardParams& p);

// Writes the gradients of q, k and v, and the marks. delta is in the workspace, and `memory` is the
// part of it for wgmma_backward_bytes(). Returns false, and writes nothing, where launch_wgmma() of
// forward_wgmma.h does, under a curve, and where no tensor map describes the output's gradient.
bool launch_wgmma(const BackwardParams& p, const Spans& spans, const GradMarks& marks, void* memory,
                  Launcher& launcher);

}  // namespace fastattn::cuda
