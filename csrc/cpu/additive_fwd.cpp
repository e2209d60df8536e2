// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in cpu/forward.h
// and cpu/score_additive.h.
#include "cpu/additive_one.h"
#include "cpu/forward.h"
#include "cpu/score_additive.h"

namespace fastattn::FASTATTN_ISA {

void additive_forward(const ForwardParams& p, const Parallel& parallel) {
  if (one_query(p)) return forward<OneQueryAdditive>(p, parallel);
  forward<AdditiveScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
