// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in cpu/forward.h
// and cpu/score_dot.h.
#include "cpu/forward.h"
#include "cpu/score_dot.h"

namespace fastattn::FASTATTN_ISA {

void sdpa_forward(const ForwardParams& p, const Parallel& parallel) {
  forward<DotScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
