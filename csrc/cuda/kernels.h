// The CUDA kernels as csrc/binding/attention.cpp sees them: the only door. Neither CUDA's nor
// torch's headers are needed to call them.
//
// params.w.data tells the additive score (FMA units, fp32, fp16 and bf16) from the dot product
// (nullptr; tensor cores, fp16 and bf16). All pointers are the device's; dropout.seed_ptr, if it is
// not nullptr, has the seed, which no host code then reads: a CUDA graph draws new bits when what
// it points to has changed.
//
// Outputs may come in uninitialised: every element is written. A dim of 0 is allowed everywhere.
// There are no atomics: results depend neither on timing nor on what else is in the batch. Every
// call returns nullptr, or what went wrong when its kernels were launched; it does not wait for
// them. The current device is the tensors'; `stream` is a cudaStream_t.
#pragma once

#include "problem/params.h"

namespace fastattn::cuda {

// Why these kernels cannot do a problem that is valid otherwise, or nullptr. Looks at the shape and
// at which of q's dtype and w there are, not at pointers.
const char* unsupported(const AttentionParams& params);

// Bytes that params.workspace must point to (256-byte aligned; may be nullptr when 0). Depends on
// the shape, the mode of the weights and, for backward, on which gradients are wanted: fill in
// everything but `workspace` first.
int64_t forward_workspace_bytes(const ForwardParams& params);
int64_t backward_workspace_bytes(const BackwardParams& params);

// Forward writes out, lse, stats and, unless weights_mode is kNone, weights.
const char* forward(const ForwardParams& params, void* stream);

// Backward writes grad_q, grad_k, grad_v, grad_w (additive; may be nullptr when not wanted) and
// grad_bias (absent when not wanted). grad_weights and grad_lse are read when they are not nullptr.
const char* backward(const BackwardParams& params, void* stream);

}  // namespace fastattn::cuda
