// Few queries, as in decoding: too few for a block each to keep a GPU busy, so that blocks share a
// row's keys, and a merge follows. What all of them agree on; functions of the shape alone.
#pragma once

#include "problem/mask.h"

namespace fastattn::cuda {

constexpr int64_t kFewQueries = 16;  // at most
constexpr int64_t kMaxParts = 128;   // of a row

// A part is the unnormalised output of some keys, [E], their maximum and their sum, as the online
// softmax (softmax.cuh) has them: workspace [B][H][M][parts][E + 2].
FASTATTN_FN int64_t partial_floats(const AttentionParams& p, int64_t parts) {
  return p.B * p.H * p.M * parts * (p.E + 2);
}

}  // namespace fastattn::cuda
