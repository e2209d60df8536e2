// Additive attention of a few queries, as in decoding.
#pragma once

#include "cuda/additive/plan.h"
#include "cuda/base/launcher.cuh"

namespace fastattn::cuda {

// The whole forward pass, for a plan whose panels are those of few queries.
void additive_few(const ForwardParams& p, const AdditiveForwardPlan& plan, Launcher& launcher);

}  // namespace fastattn::cuda
