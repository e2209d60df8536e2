// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/forward.h and cpu/score/dot.h.
#include "cpu/loop/forward.h"
#include "cpu/score/dot.h"

namespace fastattn::FASTATTN_ISA {

void sdpa_forward(const ForwardParams& p, const Path& path, const Parallel& parallel) {
  forward<DotScore>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
