// Entry points of both kernels for one instruction set (FASTATTN_ISA) with tile products; the code
// is in cpu/loop/, cpu/score/amx/values.h and cpu/score/amx/grads.h.
#define FASTATTN_ALONE
#include "cpu/loop/backward.h"
#include "cpu/loop/forward.h"
#include "cpu/score/amx/grads.h"
#include "cpu/score/amx/values.h"
#include "cpu/tile/find_masking.h"

namespace fastattn::FASTATTN_ISA {

void unit_forward(const ForwardParams& p, const Path& path, const Parallel& parallel) {
  forward<AmxDotScore, AmxValueTile>(p, path, parallel);
}

void unit_backward(const BackwardParams& p, const Path& path, const Parallel& parallel) {
  backward<AmxDotScore, AmxValueGrads>(p, path, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
