// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/forward.h and cpu/score/amx/dot.h.
#include "cpu/loop/forward.h"
#include "cpu/score/amx/values.h"

namespace fastattn::FASTATTN_ISA {

// Without AMX, choose.h takes one tile size.
void unit_forward(const ForwardParams& p, const Path& path, const Parallel& parallel) {
  switch (path.way) {
#ifdef __AMX_BF16__
    case Way::kUnit256x128:
      return forward<AmxDotScore<256, 128>, AmxValueTile>(p, path, parallel);
    case Way::kUnit64x64:
      return forward<AmxDotScore<64, 64>, AmxValueTile>(p, path, parallel);
#endif
    default:
      return forward<AmxDotScore<64, 128>, AmxValueTile>(p, path, parallel);
  }
}

}  // namespace fastattn::FASTATTN_ISA
