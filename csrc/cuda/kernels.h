// The CUDA kernels as csrc/binding/attention.cpp sees them: the only entrance. Calling them needs
// neither CUDA's nor torch's headers.
//
// params.score: the additive and the gaussian score run on FMA units (fp32, fp16 and bf16), the dot
// product on tensor cores (fp16 and bf16). All pointers are the device's. Where there is a
// dropout.seed_ptr, no host code reads the seed. A CUDA graph then draws new bits when it changes.
//
// Outputs may be uninitialised: every element is written. Any dim may be 0. There are no atomics:
// results do not depend on timing. Those of forward do not depend on the rest of the batch. But of
// the scores of elements, and of gradients, the number of samples may decide how sums are cut, and
// so their rounding (plan.h). Every call returns nullptr, or the error of launching its kernels; it
// does not wait for them. The current device must be that of the tensors; `stream` is a
// cudaStream_t.
#pragma once

#include "problem/params.h"

namespace fastattn::cuda {

// Why these kernels cannot compute a valid problem, or nullptr. Depends on the shape, the score and
// the dtype of q alone. Of a dot product with D or E over 128, forward() and backward() may refuse
// more.
const char* unsupported(const AttentionParams& params);

// Bytes that params.workspace must point to (256-byte aligned; may be nullptr when 0), on the
// current device. Fill in everything but `workspace` first.
int64_t forward_workspace_bytes(const ForwardParams& params);
int64_t backward_workspace_bytes(const BackwardParams& params);

// Forward writes out, lse, stats and, unless weights_mode is kNone, weights.
const char* forward(const ForwardParams& params, void* stream);

// Backward writes grad_q, grad_k and grad_v, and grad_w, grad_bias and grad_sink where they have
// memory. It reads grad_weights and grad_lse where these have some.
const char* backward(const BackwardParams& params, void* stream);

// Whether the dot product runs by products of warpgroups (dot/*_wgmma.cu) on a device, where it
// can. The first 64 devices have this choice. At first it is not chosen.
void choose_wgmma(int64_t device, bool chosen);

}  // namespace fastattn::cuda
