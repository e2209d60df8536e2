// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in cpu/backward.h
// and cpu/score_dot.h.
#include "cpu/backward.h"
#include "cpu/score_dot.h"

namespace fastattn::FASTATTN_ISA {

void sdpa_backward(const BackwardParams& p, const Parallel& parallel) {
  backward<DotScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
