#include "cuda/tile/bias_parts.cuh"

namespace fastattn::cuda {
namespace {

struct PartsArgs {
  BackwardParams p;
  int64_t offset, parts;
  int lanes;  // that share an element: a warp, if there are as many parts
};

__global__ void __launch_bounds__(kThreads) bias_parts_kernel(const __grid_constant__ PartsArgs a) {
  const BackwardParams& p = a.p;
  const int64_t size = p.bias_M * p.bias_N;
  const int64_t element = (blockIdx.x * int64_t{kThreads} + thread()) / a.lanes;
  if (element >= p.bias_B * p.bias_H * size) return;
  const int64_t bh = element / size, n = element % size;
  const float* const from =
      static_cast<const float*>(p.workspace) + a.offset + bh * a.parts * size + n;
  float sum = 0.f;
  for (int64_t part = thread() % a.lanes; part < a.parts; part += a.lanes) sum += from[part * size];
  sum = lanes_sum(sum, a.lanes);
  if (thread() % a.lanes != 0) return;
  const int64_t offset =
      offset_of(p.grad_bias, bh / p.bias_H, bh % p.bias_H, n / p.bias_N, n % p.bias_N);
  store_element(p.grad_bias, offset, sum);
}

}  // namespace

void launch_bias_parts(const BackwardParams& p, int64_t offset, int64_t parts, Launcher& launcher) {
  if (parts == 1) return;
  const PartsArgs args = {p, offset, parts, parts < 32 ? 1 : 32};
  const int64_t elements = p.bias_B * p.bias_H * p.bias_M * p.bias_N;
  launcher.run(bias_parts_kernel, ceil_div(elements * args.lanes, kThreads), kThreads, 0, args);
}

}  // namespace fastattn::cuda
