// One query a head: the query heads that share keys, as rows of one head. Then the keys are read
// once for all of them. That is the same problem where nothing tells rows from heads but strides.
#pragma once

#include "problem/mask.h"

namespace fastattn {

// Whether it is. Both passes must ask this: scores are to be summed in the same order in both.
FASTATTN_FN bool heads_can_be_rows(const AttentionParams& p) {
  return p.M == 1 && p.H > p.Hkv && p.w.data == nullptr && band_keeps_all(p.mask, p.M, p.N) &&
         !p.dropout.enabled && p.weights_mode == WeightsMode::kNone;
}

FASTATTN_FN void take_heads_as_rows(int64_t group, View* view) {
  view->stride_r = view->stride_h;
  view->stride_h *= group;
}
FASTATTN_FN void take_common_heads_as_rows(AttentionParams* p) {
  const int64_t group = p->H / p->Hkv;
  p->M = group, p->H = p->Hkv;
  p->mask = heads_as_rows(p->mask, group);
  take_heads_as_rows(group, &p->q);
  take_heads_as_rows(group, &p->bias);
}

// What has no strides is contiguous over heads and queries: its places do not change.
FASTATTN_FN void take_heads_as_rows(ForwardParams* p) {
  take_common_heads_as_rows(p);
  take_heads_as_rows(p->M, &p->out);
  take_heads_as_rows(p->M, &p->sink);
}
FASTATTN_FN void take_heads_as_rows(BackwardParams* p) {
  take_common_heads_as_rows(p);
  View* const views[] = {&p->out, &p->grad_out, &p->grad_q, &p->grad_bias, &p->sink, &p->grad_sink};
  for (View* view : views) take_heads_as_rows(p->M, view);
  if (p->bias_H > 1) p->bias_H = p->H, p->bias_M = p->M;
}

}  // namespace fastattn
