// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/forward.h and cpu/score/dot.h.
#include "cpu/loop/forward.h"
#include "cpu/score/dot.h"
#ifdef __AMX_BF16__
#include "cpu/score/amx/values.h"
#endif

namespace fastattn::FASTATTN_ISA {

void sdpa_forward(const ForwardParams& p, const Parallel& parallel) {
#ifdef __AMX_BF16__
  if (packing_pays(p)) {
    // The matrix unit sleeps after 0.7 us, and takes 0.27 us to wake: large tiles, unless small
    // ones are skipped. A row's result does not depend on how many rows a tile has.
    const bool skips = p.mask.band_lo > -p.M || p.mask.band_hi < p.N || p.bias.data != nullptr;
    if (may_have_blocks(p)) return forward<AmxDotScore<64, 64>, AmxValueTile>(p, parallel);
    if (p.M > 64 && !skips) return forward<AmxDotScore<256, 128>, AmxValueTile>(p, parallel);
    return forward<AmxDotScore<64, 128>, AmxValueTile>(p, parallel);
  }
#endif
  forward<DotScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
