// Additive and gaussian attention on CUDA, for dispatch.cu. cuda/kernels.h says what these
// functions do.
#pragma once

#include "problem/params.h"

namespace fastattn::cuda {

int64_t additive_forward_workspace_bytes(const ForwardParams& params);
int64_t additive_backward_workspace_bytes(const BackwardParams& params);
const char* additive_forward(const ForwardParams& params, void* stream);
const char* additive_backward(const BackwardParams& params, void* stream);

}  // namespace fastattn::cuda
