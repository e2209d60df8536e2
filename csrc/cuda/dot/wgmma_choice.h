// Whether the passes of the dot product by products of warpgroups are to run.
#pragma once

#include "problem/params.h"

namespace fastattn::cuda {

// By name for all devices (FASTATTN_CUDA_PATH=wgmma), or by choose_wgmma() for the current one.
bool wgmma_is_chosen();

// Whether the current device is of compute capability 9.0, and the build has code for sm_90a.
bool wgmma_can_run();

// How tiles come to blocks. A share is one tile. Where a band bounds the keys, it is two: a late
// tile and an early one. A block takes share after share.
struct Shares {
  int tiles;  // of a share: 1 or 2
  int64_t count, blocks;
};

// Where shares have about the same work, each multiprocessor gets a block, which loads the next
// tile while the last one ends. Else a block has one tile, and the device deals them out. Kernels
// that may not stay have one tile, too.
Shares share_out(const AttentionParams& p, int64_t heads, int64_t tiles, bool may_stay);

}  // namespace fastattn::cuda
