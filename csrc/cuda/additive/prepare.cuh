// The prologue of additive attention. The prologue does all work that takes one exponential per
// element of q and k, or that reads all weights or keys.
#pragma once

#include "cuda/additive/plan.h"
#include "cuda/base/launcher.cuh"

namespace fastattn::cuda {

// Writes units, weights, scales and, for the additive score, halves.
void prepare_terms(const AttentionParams& p, const Panels& panels, float* workspace,
                   Launcher& launcher);

// Calls prepare_terms(). Unless panels.raw, also writes centres, direct, keys, queries and, for
// backward, gradient_queries.
void prepare_panels(const AttentionParams& p, const Panels& panels, float* workspace, bool backward,
                    Launcher& launcher);

}  // namespace fastattn::cuda
