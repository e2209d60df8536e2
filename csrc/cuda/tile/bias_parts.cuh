// The gradient of a bias that many share: blocks add up a slice of what shares a tile of it, and
// write parts of the result to the workspace. A second kernel adds up the parts, in order.
#pragma once

#include "cuda/base/launcher.cuh"
#include "cuda/tile/tile.cuh"

namespace fastattn::cuda {

// Enough to keep a GPU busy. The number is fixed, so that sums do not depend on the device.
constexpr int64_t kBiasBlocks = 512;

// Batches times heads that share an element of the bias.
FASTATTN_FN int64_t bias_sharers(const BackwardParams& p) {
  return (p.bias_B == 1 ? p.B : 1) * (p.bias_H == 1 ? p.H : 1);
}
// In how many slices `blocks` blocks add up what `shared` share each.
FASTATTN_FN int64_t bias_slices(int64_t blocks, int64_t shared) {
  return max64(1, min64(shared, ceil_div(kBiasBlocks, max64(1, blocks))));
}
// Floats of [bias_B][bias_H][parts][bias_M][bias_N]; one part is the gradient itself.
FASTATTN_FN int64_t bias_part_floats(const BackwardParams& p, int64_t parts) {
  return parts == 1 ? 0 : p.bias_B * p.bias_H * parts * p.bias_M * p.bias_N;
}

// Where a part of sample b and head h of the bias goes. Parts begin at `offset` in the workspace.
FASTATTN_DEVICE View bias_part(const BackwardParams& p, int64_t offset, int64_t parts, int64_t b,
                               int64_t h, int64_t part) {
  View to = p.grad_bias;
  if (parts == 1) {
    const int64_t size = to.dtype == DType::kFloat32 ? 4 : 2;
    to.data = static_cast<char*>(to.data) + offset_of(to, b, h, 0, 0) * size;
    return to;
  }
  const int64_t number = (b * p.bias_H + h) * parts + part;
  float* const data = static_cast<float*>(p.workspace) + offset + number * p.bias_M * p.bias_N;
  return {data, DType::kFloat32, 0, 0, p.bias_N, 1};
}

// Adds up the parts to grad_bias, unless there is one.
void launch_bias_parts(const BackwardParams& p, int64_t offset, int64_t parts, Launcher& launcher);

}  // namespace fastattn::cuda
