// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/backward.h and cpu/score/additive/score.h.
#include "cpu/loop/backward.h"
#include "cpu/score/additive/one_query.h"
#include "cpu/score/additive/score.h"
#include "cpu/score/dot_few_queries.h"

namespace fastattn::FASTATTN_ISA {

void additive_backward(const BackwardParams& p, const Parallel& parallel) {
  if (one_query(p)) return backward<OneQueryAdditive, FewValueGrads>(p, parallel);
  backward<AdditiveScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
