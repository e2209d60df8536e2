// Fused additive attention, backward. P_ij is computed again with the saved stats of row i. R is
// the factor of dropout, and W = R P are the weights that multiplied V. terms.cuh defines u and t:
//
//   dV_j = sum_i W_ij dO_i    dP_ij = R_ij (dO_i . V_j + dW_ij)    dS_ij = P_ij (dP_ij - delta_i)
//   delta_i = sum_e dO_ie O_ie + sum_j W_ij dW_ij - dlse_i
//   dq_id = 4 w_d sum_j dS_ij t_ijd    dk_jd = 4 w_d sum_i dS_ij t_ijd
//   dw_d = sum_ij dS_ij tanh_ijd    dbias = dS, summed where the bias broadcasts
//
//   delta.cu       a block per (b, h, tile of queries); of a sink: tile/sink.cu
//   gradients.cu   a block per (b, h, slice of query tiles, slice of key tiles): S, dP -> W, dS;
//                  dq, dk, dV, dw; sums in order afterwards
//   grad_bias.cu   a block per (tile, slice of b, h); sums in order afterwards
//
// dS passes through shared memory, from the fragments of a tile to the threads that own (j, d). The
// sums of a block over its tiles lie in the workspace. Only one thread reads and writes a given
// sum, so there are no atomics, and every sum has one order. A bias computes scores again, because
// no array of size M N may be stored. Dao et al., "FlashAttention", 2022, appendix B.
#include "cuda/additive/backward.cuh"
#include "cuda/additive/passes.h"
#include "cuda/additive/prepare.cuh"
#include "cuda/tile/sink.cuh"

namespace fastattn::cuda {

int64_t additive_backward_workspace_bytes(const BackwardParams& p) {
  return plan_additive_backward(p).workspace_bytes;
}

const char* additive_backward(const BackwardParams& p, void* stream) {
  const AdditiveBackwardPlan plan = plan_additive_backward(p);
  Launcher launcher(stream);
  float* const spans = static_cast<float*>(p.workspace) + plan.spans;
  const BackwardArgs args = {p, plan, make_key_spans(p, spans, launcher), unit_of(p)};
  prepare_panels(p, args.plan.panels, static_cast<float*>(p.workspace), true, launcher);
  launch_delta(args, launcher);
  launch_sink(p, plan.delta, launcher);
  launch_gradients(args, launcher);
  if (p.grad_bias.data != nullptr) launch_grad_bias(args, launcher);
  return launcher.error();
}

}  // namespace fastattn::cuda
