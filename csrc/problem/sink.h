// The gradient of a sink, one more logit of every row i of a head, without a value:
//
//   -sum_i e^(sink - lse_i) delta_i        e^(sink - lse) = e^(sink - natural shift) factor
//
// (shift, factor) is what forward saved of a row, and `natural` the logit of a shift of 1.
#pragma once

#include <cfloat>

#include "problem/params.h"

namespace fastattn {

// The term of row n, of all rows. `exp` is e^x of a double x. The sink's distance is a double, as
// its last digits count.
template <typename Exp>
FASTATTN_FN double sink_term(const BackwardParams& p, double sink, double natural, int64_t n,
                             float delta, Exp exp) {
  constexpr float kLeast = 1e-35f;  // below it a factor has lost its digits: the sink has all
  const float shift = p.stats[2 * n], factor = p.stats[2 * n + 1];
  const double known = factor * exp(sink - natural * shift);
  const double alone = sink < -FLT_MAX ? 0. : sink > FLT_MAX ? sink : 1.;
  // A row without keys has the output 0, whatever its gradient is.
  const float empty = p.grad_lse == nullptr ? 0.f : -p.grad_lse[n];
  return -(factor < kLeast ? alone : known) * (factor == 0.f ? empty : delta);
}

}  // namespace fastattn
