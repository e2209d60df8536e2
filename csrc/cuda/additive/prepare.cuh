// The prologue of additive attention: what costs an exponential an element, or a look at all
// weights or keys.
#pragma once

#include "cuda/additive/plan.h"
#include "cuda/base/launcher.cuh"

namespace fastattn::cuda {

// Fills in units, weights, halves and scales.
void prepare_terms(const AttentionParams& p, const Panels& panels, float* workspace,
                   Launcher& launcher);

// Those and, unless queries are few, everything else.
void prepare_panels(const AttentionParams& p, const Panels& panels, float* workspace, bool backward,
                    Launcher& launcher);

}  // namespace fastattn::cuda
