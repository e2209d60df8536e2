// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/forward.h and cpu/score/additive/score.h.
#include "cpu/loop/forward.h"
#include "cpu/score/additive/one_query.h"
#include "cpu/score/additive/score.h"

namespace fastattn::FASTATTN_ISA {

void additive_forward(const ForwardParams& p, const Path& path, const Parallel& parallel) {
  path.way == Way::kOneQuery ? forward<OneQueryAdditive>(p, path, parallel)
                             : forward<AdditiveScore>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
