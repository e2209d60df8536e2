// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in cpu/forward.h
// and cpu/score_dot.h.
#include "cpu/forward.h"
#include "cpu/score_dot.h"
#ifdef __AMX_BF16__
#include "cpu/dot_amx.h"
#endif

namespace fastattn::FASTATTN_ISA {

void sdpa_forward(const ForwardParams& p, const Parallel& parallel) {
#ifdef __AMX_BF16__
  if (p.M > kDirectRows) return forward<AmxDotScore, AmxValueTile>(p, parallel);
#endif
  forward<DotScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
