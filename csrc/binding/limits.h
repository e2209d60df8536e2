// The operator that runs a loop of cpu/entry/limits.cpp on every thread.
#pragma once

#include "binding/on_cpu.h"
#include "binding/problem.h"
#include "binding/views.h"

namespace fastattn::binding {

// `memory`: float32, contiguous; empty for a loop that reads none. `rounds`: a second has 2^30 or
// so.
inline double cpu_loop(const Tensor& memory, int64_t loop, int64_t rounds) {
  STD_TORCH_CHECK(memory.scalar_type() == ScalarType::Float && memory.is_contiguous(),
                  "fastattn: memory: expected contiguous float32");
  STD_TORCH_CHECK(rounds >= 0 && rounds <= int64_t{1} << 40,
                  "fastattn: rounds: expected 0 to 2^40, got ", rounds);
  const LoopCall call{one_of(loop, Loop::kRead, "loop: expected 0 to 8"), rounds,
                      static_cast<const float*>(data_of(memory, "memory")), memory.numel()};
  return cpu::run_loop(call, device::torch_threads());
}

}  // namespace fastattn::binding
