// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/backward.h and cpu/score/amx/dot.h.
#include "cpu/loop/backward.h"
#include "cpu/score/amx/grads.h"

namespace fastattn::FASTATTN_ISA {

void unit_backward(const BackwardParams& p, const Path& path, const Parallel& parallel) {
  backward<AmxDotScore, AmxValueGrads>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
