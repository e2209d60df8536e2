// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/backward.h and cpu/score/gaussian.h.
#include "cpu/loop/backward.h"
#include "cpu/score/gaussian.h"

namespace fastattn::FASTATTN_ISA {

void gaussian_backward(const BackwardParams& p, const Path& path, const Parallel& parallel) {
  backward<GaussianScore>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
