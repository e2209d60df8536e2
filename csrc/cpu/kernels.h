// The CPU kernels as csrc/binding/attention.cpp sees them. One call per direction: p.score says
// which score. Nothing here depends on the instruction set; dispatch.cpp picks the widest one the
// machine has.
//
// Outputs may be uninitialised: every element is written. Any dim may be 0. Results do not depend
// on the number of threads or on their timing.
#pragma once

#include <string>
#include <vector>

#include "cpu/base/limits.h"
#include "problem/params.h"

namespace fastattn::cpu {

// Bytes that params.workspace must point to (64-byte aligned; may be nullptr when 0). Fill in
// everything but `workspace` first.
int64_t forward_workspace_bytes(const ForwardParams& params);
int64_t backward_workspace_bytes(const BackwardParams& params);

// Forward writes out, lse, stats and, unless weights_mode is kNone, weights.
void forward(const ForwardParams& params, const Parallel& parallel);

// Backward writes grad_q, grad_k and grad_v, and grad_w and grad_bias where they have memory. It
// reads grad_weights and grad_lse where these have some.
void backward(const BackwardParams& params, const Parallel& parallel);

// The path of the forward pass in words, such as "heads as rows, rows in place, keys in 4 chunks".
// Also names the value of FASTATTN_CPU_PATH if it is set. choose.h decides the path.
// select_path() does what that variable does; "auto" leaves the path to choose.h. Of an unknown
// name the result is false, and nothing changes. Do not call it while kernels run.
std::string path_of(const ForwardParams& params);
bool select_path(const char* name);

// Runs a loop on every thread, in the instruction set in use. Returns what the threads did
// together, in the unit of the loop; 0 if the set lacks it.
double run_loop(const LoopCall& call, const Parallel& parallel);

// The instruction set in use: "baseline", "avx2", "avx512", "avx512_bf16", "amx", "amx_fp16".
// select_isa() forces one. If that set was not built or does not run here, nothing changes and the
// result is false. "auto" returns to the widest that CPUID shows. Do not call it while kernels run.
// available_isas() lists those that can be forced, widest first.
const char* selected_isa();
bool select_isa(const char* name);
std::vector<std::string> available_isas();

}  // namespace fastattn::cpu
