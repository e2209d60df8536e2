// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/forward.h and cpu/score/amx/dot.h.
#include "cpu/loop/forward.h"
#include "cpu/score/amx/values.h"

namespace fastattn::FASTATTN_ISA {

void unit_forward(const ForwardParams& p, const Path& path, const Parallel& parallel) {
  forward<AmxDotScore, AmxValueTile>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
