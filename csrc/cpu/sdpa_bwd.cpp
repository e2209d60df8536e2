// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in cpu/backward.h
// and cpu/score_dot.h.
#include "cpu/backward.h"
#include "cpu/score_dot.h"
#ifdef __AMX_BF16__
#include "cpu/dot_amx.h"
#endif

namespace fastattn::FASTATTN_ISA {

void sdpa_backward(const BackwardParams& p, const Parallel& parallel) {
#ifdef __AMX_BF16__
  if (p.M > kDirectRows) return backward<AmxDotScore<64, 256>, AmxValueGrads>(p, parallel);
#endif
  backward<DotScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
