// Entry point of one kernel for one instruction set (FASTATTN_ISA); the code is in
// cpu/loop/backward.h and cpu/score/dot.h.
#include "cpu/loop/backward.h"
#include "cpu/score/dot.h"
#include "cpu/score/dot_few_queries.h"
#ifdef __AMX_BF16__
#include "cpu/score/amx/grads.h"
#endif

namespace fastattn::FASTATTN_ISA {

void sdpa_backward(const BackwardParams& p, const Parallel& parallel) {
  if (is_direct(p.M, p.k)) return backward<FewDotScore, FewValueGrads>(p, parallel);
#ifdef __AMX_BF16__
  if (packing_pays(p)) {
    // Tiles as small as blocks of a mask may be. With one part, products take so little of the time
    // that what each tile costs besides counts more.
    if (!may_have_blocks(p)) return backward<AmxDotScore<64, 256>, AmxValueGrads>(p, parallel);
    if (p.q.dtype == DType::kBFloat16)
      return backward<AmxDotScore<64, 128>, AmxValueGrads>(p, parallel);
    return backward<AmxDotScore<64, 64>, AmxValueGrads>(p, parallel);
  }
#endif
  backward<DotScore>(p, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
