// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/backward.h and cpu/score/amx/dot.h.
#include "cpu/loop/backward.h"
#include "cpu/score/amx/grads.h"

namespace fastattn::FASTATTN_ISA {

// Without AMX, choose.h takes one tile size.
void unit_backward(const BackwardParams& p, const Path& path, const Parallel& parallel) {
  switch (path.way) {
#ifdef __AMX_BF16__
    case Way::kUnit64x256:
      return backward<AmxDotScore<64, 256>, AmxValueGrads>(p, path, parallel);
    case Way::kUnit64x64:
      return backward<AmxDotScore<64, 64>, AmxValueGrads>(p, path, parallel);
#endif
    default:
      return backward<AmxDotScore<64, 128>, AmxValueGrads>(p, path, parallel);
  }
}

}  // namespace fastattn::FASTATTN_ISA
