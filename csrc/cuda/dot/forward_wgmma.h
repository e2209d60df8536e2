// The forward pass by products of warpgroups (forward_wgmma.cu), as forward.cu calls it.
#pragma once

#include "cuda/base/launcher.cuh"
#include "problem/params.h"

namespace fastattn::cuda {

// Why the forward pass has no kernel for D or E over 128, or nullptr. All that compute such heads
// are for GPUs with this path.
const char* against_large_heads(const ForwardParams& p);

// Bytes of the workspace where launch_wgmma() is to run, else 0.
int64_t wgmma_forward_bytes(const ForwardParams& p);

// Writes out, lse and stats, and at p.workspace the marks, [B][H][tiles of 64 queries][4 warps]. A
// mark is not 0 where a result is not finite. A kernel that keeps NaN behind the mask is to compute
// the rows of that warp again. Returns false, and writes nothing, unless this path is chosen
// (FASTATTN_CUDA_PATH=wgmma or choose_wgmma()), the device, the build and the driver have it, and
// the problem can take it: more than a few queries, strides that a tensor map can describe, and no
// more tiles of keys under a dense mask than a block has places for.
bool launch_wgmma(const ForwardParams& p, Launcher& launcher);

}  // namespace fastattn::cuda
