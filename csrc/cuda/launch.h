// The CUDA kernels as csrc/ops.cpp sees them: the only door. Neither CUDA's nor torch's headers are
// needed to call them.
//
// Outputs may come in uninitialised: every element is written. A dim of 0 is allowed everywhere.
// There are no atomics: results depend neither on timing nor on what else is in the batch. Every
// call returns nullptr, or what went wrong when its kernels were launched; it does not wait for
// them. The current device is the tensors'; `stream` is a cudaStream_t.
#pragma once

#include "common/params.h"

namespace fastattn::cuda {

// Bytes that params.workspace must point to (256-byte aligned; may be nullptr when 0). Depends on
// the shape, the mode of the weights and, for backward, on which gradients are wanted: fill in
// everything but `workspace` first.
int64_t additive_forward_workspace_bytes(const ForwardParams& params);
int64_t additive_backward_workspace_bytes(const BackwardParams& params);

// Forward writes out, lse, stats and, unless weights_mode is kNone, weights.
const char* additive_forward(const ForwardParams& params, void* stream);

// Backward writes grad_q, grad_k, grad_v, grad_w (may be nullptr when not wanted) and grad_bias
// (absent when not wanted). grad_weights and grad_lse are read when they are not nullptr.
const char* additive_backward(const BackwardParams& params, void* stream);

// Scaled dot-product attention on tensor cores: fp16 and bf16, D and E up to 128.
int64_t sdpa_backward_workspace_bytes(const BackwardParams& params);
const char* sdpa_forward(const ForwardParams& params, void* stream);
const char* sdpa_backward(const BackwardParams& params, void* stream);

}  // namespace fastattn::cuda
