// Where blocks of gradients.cu add up their parts of dq, dk, dV and dw, and who adds up the parts.
#pragma once

#include "cuda/additive/backward.cuh"

namespace fastattn::cuda {

// Of dq: kOwnSlots slots per stage of dims.
FASTATTN_DEVICE float* query_sums(const BackwardArgs& a, int64_t head, int64_t slice_n,
                                  int64_t tile_m) {
  const int64_t number = (head * a.plan.slices_n + slice_n) * a.plan.panels.tiles_m + tile_m;
  return workspace(a) + a.plan.sums_q + number * a.plan.block_q;
}
// Of dk, kOwnSlots slots per stage of dims, and then of dV.
FASTATTN_DEVICE float* key_sums(const BackwardArgs& a, int64_t head, int64_t slice_m,
                                int64_t tile_n) {
  const int64_t number = (head * a.plan.slices_m + slice_m) * a.plan.panels.tiles_n + tile_n;
  return workspace(a) + a.plan.sums_k + number * a.plan.block_k;
}
// The first slot of dV's columns [e0, e0 + kTile), which take kRows slots.
FASTATTN_DEVICE int64_t value_slot(const BackwardArgs& a, int64_t e0) {
  return a.plan.panels.stages * kOwnSlots + e0 / kTile * kRows;
}

// The rows of a group in each of its turns.
FASTATTN_DEVICE int turn_row0(int key0, int turn) { return (key0 + turn * kOwnKeys) % kTile; }
FASTATTN_DEVICE int last_row0(int key0) { return turn_row0(key0, kOwnGroups - 1); }

// Adds up the parts of all blocks, in order, and writes the gradients of q, k, v and, if wanted, w.
void launch_gradient_sums(const BackwardArgs& args, Launcher& launcher);

}  // namespace fastattn::cuda
