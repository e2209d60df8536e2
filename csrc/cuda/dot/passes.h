// Scaled dot-product attention on CUDA, for dispatch.cu. cuda/kernels.h documents these functions.
#pragma once

#include "problem/params.h"

namespace fastattn::cuda {

int64_t sdpa_forward_workspace_bytes(const ForwardParams& params);
int64_t sdpa_backward_workspace_bytes(const BackwardParams& params);
const char* sdpa_forward(const ForwardParams& params, void* stream);
const char* sdpa_backward(const BackwardParams& params, void* stream);

}  // namespace fastattn::cuda
