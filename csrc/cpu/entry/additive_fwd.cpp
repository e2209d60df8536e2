// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/forward.h and cpu/score/additive/score.h.
#include "cpu/loop/forward.h"
#include "cpu/score/additive/one_query.h"
#include "cpu/score/additive/score.h"

namespace fastattn::FASTATTN_ISA {

void additive_forward(const ForwardParams& p, const Parallel& parallel) {
  if (one_query(p)) return forward<OneQueryAdditive>(p, parallel);
  forward<AdditiveScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
