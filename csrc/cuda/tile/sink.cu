#include "cuda/tile/sink.cuh"
#include "cuda/tile/softmax.cuh"
#include "problem/sink.h"

namespace fastattn::cuda {
namespace {

struct SinkArgs {
  BackwardParams p;
  int64_t delta;
  double natural;
};

// One block per (b, h), whose threads take rows in turns. Not run on a GPU.
__global__ void __launch_bounds__(kThreads) sink_kernel(const __grid_constant__ SinkArgs a) {
  __shared__ double sums[kThreads];
  const BackwardParams& p = a.p;
  const int64_t b = blockIdx.x / p.H, h = blockIdx.x % p.H, first = int64_t{blockIdx.x} * p.M;
  const double sink = load_element(p.sink, offset_of(p.sink, b, h, 0, 0));
  const float* const delta = static_cast<const float*>(p.workspace) + a.delta;
  double sum = 0.;
#pragma unroll 4
  for (int64_t n = first + thread(); n < first + p.M; n += kThreads)
    sum += sink_term(p, sink, a.natural, n, delta[n], exp_of_double);
  sums[thread()] = sum;
  for (int others = kThreads / 2; others > 0; others /= 2) {
    __syncthreads();
    if (thread() < others) sums[thread()] += sums[thread() + others];
  }
  if (thread() == 0)
    static_cast<float*>(p.grad_sink.data)[offset_of(p.grad_sink, b, h, 0, 0)] =
        static_cast<float>(sums[0]);
}

}  // namespace

void launch_sink(const BackwardParams& p, int64_t delta, Launcher& launcher) {
  if (p.grad_sink.data == nullptr) return;
  const SinkArgs args = {p, delta, natural_of_logit(p)};
  launcher.run(sink_kernel, p.B * p.H, kThreads, 0, args);
}

}  // namespace fastattn::cuda
