// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/forward.h and cpu/score/gaussian.h.
#include "cpu/loop/forward.h"
#include "cpu/score/gaussian.h"

namespace fastattn::FASTATTN_ISA {

void gaussian_forward(const ForwardParams& p, const Path& path, const Parallel& parallel) {
  forward<GaussianScore>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
