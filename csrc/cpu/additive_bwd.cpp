// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in cpu/backward.h
// and cpu/score_additive.h.
#include "cpu/additive_one.h"
#include "cpu/backward.h"
#include "cpu/few_grad.h"
#include "cpu/score_additive.h"

namespace fastattn::FASTATTN_ISA {

void additive_backward(const BackwardParams& p, const Parallel& parallel) {
  if (one_query(p)) return backward<OneQueryAdditive, FewValueGrads>(p, parallel);
  backward<AdditiveScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
