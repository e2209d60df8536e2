// Merges the results of blocks that each took some keys of a row (Dao et al., "Flash-Decoding",
// 2023).
#pragma once

#include "cuda/base/launcher.cuh"
#include "cuda/base/ptx.cuh"
#include "cuda/tile/few_queries.h"

namespace fastattn::cuda {

// Part `number` of those that begin at `partials` in the workspace. Parts of a row are neighbours.
FASTATTN_DEVICE float* partial_at(const ForwardParams& p, int64_t partials, int64_t number) {
  return static_cast<float*>(p.workspace) + partials + number * (p.E + 2);
}

// Writes out, lse and stats from the parts, added up in order.
void merge_partials(const ForwardParams& p, int64_t partials, int64_t parts, Launcher& launcher);

}  // namespace fastattn::cuda
