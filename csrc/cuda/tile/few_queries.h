// Few queries, as in decoding: one block each would not keep a GPU busy. Blocks therefore share a
// row's keys, and a merge follows. What all kernels agree on here depends on the shape alone.
#pragma once

#include "problem/mask.h"

namespace fastattn::cuda {

constexpr int64_t kFewQueries = 16;  // most queries that count as few
constexpr int64_t kMaxParts = 128;   // most parts of a row

// A part has the unnormalised output of some keys, [E], their maximum and their sum, as in the
// online softmax (softmax.cuh). The workspace is [B][H][M][parts][E + 2].
FASTATTN_FN int64_t partial_floats(const AttentionParams& p, int64_t parts) {
  return p.B * p.H * p.M * parts * (p.E + 2);
}

}  // namespace fastattn::cuda
