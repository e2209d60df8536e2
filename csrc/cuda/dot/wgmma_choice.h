// Whether the passes of the dot product by products of warpgroups are to run.
#pragma once

namespace fastattn::cuda {

// By name for all devices (FASTATTN_CUDA_PATH=wgmma), or by choose_wgmma() for the current one.
bool wgmma_is_chosen();

// Whether the current device is of compute capability 9.0, and the build has code for sm_90a.
bool wgmma_can_run();

// Of the current device.
int multiprocessors();

}  // namespace fastattn::cuda
