#include "cuda/tile/line.cuh"

namespace fastattn::cuda {
namespace {

struct LineArgs {
  BackwardParams p;
  int64_t parts, slices;
};

// A thread takes an element, in which the parts of two blocks meet.
__global__ void __launch_bounds__(kThreads) line_kernel(const __grid_constant__ LineArgs a) {
  const BackwardParams& p = a.p;
  const int64_t element = blockIdx.x * int64_t{kThreads} + thread(), blocks = line_blocks(p);
  if (element >= p.bias_B * p.bias_H * p.bias_N) return;
  const int64_t bh = element / p.bias_N, n = element % p.bias_N;
  const int64_t place = n + ceil_div(p.M, kTile) * kTile - p.M, block = place / kTile;
  const float* part = static_cast<const float*>(p.workspace) + a.parts +
                      (bh * a.slices * blocks + block) * kLinePart + place % kTile;
  float sum = 0.f;
  for (int64_t slice = 0; slice < a.slices; ++slice, part += blocks * kLinePart) {
    if (block < blocks) sum += part[0];
    if (block > 0) sum += part[kTile - kLinePart];
  }
  const int64_t offset = offset_of(p.grad_bias, bh / p.bias_H, bh % p.bias_H, 0, n);
  store_element(p.grad_bias, offset, sum);
}

}  // namespace

void launch_line(const BackwardParams& p, int64_t parts, int64_t slices, Launcher& launcher) {
  const LineArgs args = {p, parts, slices};
  const int64_t elements = p.bias_B * p.bias_H * p.bias_N;
  launcher.run(line_kernel, ceil_div(elements, kThreads), kThreads, 0, args);
}

}  // namespace fastattn::cuda
