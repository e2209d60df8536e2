// The gradient of a sink: a sum over the rows of a head, of which delta is there.
#pragma once

#include "cuda/base/launcher.cuh"
#include "problem/params.h"

namespace fastattn::cuda {

// Writes grad_sink, if it has memory. delta [B, H, M] begins at a place of the workspace.
void launch_sink(const BackwardParams& p, int64_t delta, Launcher& launcher);

}  // namespace fastattn::cuda
