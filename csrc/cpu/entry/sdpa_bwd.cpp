// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/backward.h and cpu/score/dot.h.
#include "cpu/loop/backward.h"
#include "cpu/score/dot.h"
#include "cpu/score/dot_few_queries.h"

namespace fastattn::FASTATTN_ISA {

void sdpa_backward(const BackwardParams& p, const Path& path, const Parallel& parallel) {
  path.way == Way::kRowsInPlace ? backward<FewDotScore, FewValueGrads>(p, path, parallel)
                                : backward<DotScore>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
