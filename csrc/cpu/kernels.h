// The CPU kernels as csrc/binding/attention.cpp sees them. One call per direction: p.w.data tells
// the dot score (nullptr) from the additive one. Nothing here depends on the instruction set;
// dispatch.cpp picks the widest one the machine has.
//
// Outputs may come in uninitialised: every element is written. A dim of 0 is allowed everywhere.
// Results depend on neither the number of threads nor their timing.
#pragma once

#include <string>
#include <vector>

#include "problem/params.h"

namespace fastattn::cpu {

// Bytes that params.workspace must point to (64-byte aligned; may be nullptr when 0). Depends on
// the shape, the mode of the weights and, for backward, on which gradients are wanted: fill in
// everything but `workspace` first.
int64_t forward_workspace_bytes(const ForwardParams& params);
int64_t backward_workspace_bytes(const BackwardParams& params);

// Forward writes out, lse, stats and, unless weights_mode is kNone, weights.
void forward(const ForwardParams& params, const Parallel& parallel);

// Backward writes grad_q, grad_k, grad_v, grad_w (additive; may be nullptr when not wanted) and
// grad_bias (absent when not wanted). grad_weights is read when its data is not nullptr.
void backward(const BackwardParams& params, const Parallel& parallel);

// The path of the forward pass in words, such as "heads as rows, rows in place, keys in 4 chunks",
// and what forces it, if FASTATTN_CPU_PATH does. choose.h decides it.
std::string path_of(const ForwardParams& params);

// The instruction set in use: "baseline", "avx2", "avx512", "avx512_bf16", "amx", "amx_fp16".
// select_isa() forces one and returns false, changing nothing, when it was not built or does not
// run here; "auto" returns to the widest that CPUID shows. Not to be called while kernels run.
// available_isas() are those that can be forced, widest first.
const char* selected_isa();
bool select_isa(const char* name);
std::vector<std::string> available_isas();

}  // namespace fastattn::cpu
