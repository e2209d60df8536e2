// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/backward.h and cpu/score/additive/score.h.
#include "cpu/loop/backward.h"
#include "cpu/score/additive/one_query.h"
#include "cpu/score/additive/score.h"
#include "cpu/score/dot_few_queries.h"

namespace fastattn::FASTATTN_ISA {

void additive_backward(const BackwardParams& p, const Path& path, const Parallel& parallel) {
  path.way == Way::kOneQuery ? backward<OneQueryAdditive, FewValueGrads>(p, path, parallel)
                             : backward<AdditiveScore>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
