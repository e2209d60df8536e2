// Additive attention of a few queries, as in decoding.
#pragma once

#include "cuda/additive/plan.h"
#include "cuda/base/launcher.cuh"

namespace fastattn::cuda {

// Launches the whole forward pass. plan.panels.few must be true.
void additive_few(const ForwardParams& p, const AdditiveForwardPlan& plan, Launcher& launcher);

}  // namespace fastattn::cuda
