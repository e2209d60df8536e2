#include "cuda/tile/merge.cuh"
#include "cuda/tile/softmax.cuh"

namespace fastattn::cuda {
namespace {

struct MergeArgs {
  ForwardParams p;
  int64_t partials, parts;
};
static_assert(kMaxParts <= kThreads);

// A block takes a row. It adds part after part with the arithmetic of an online softmax step.
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeArgs a) {
  __shared__ float scratch[kWarps], factors[kMaxParts];
  const ForwardParams& p = a.p;
  const int64_t number = blockIdx.x, stride = p.E + 2;
  const float* const parts = partial_at(p, a.partials, number * a.parts);
  const bool has_part = thread() < a.parts;
  const float m_part = has_part ? parts[thread() * stride + p.E] : -kInfinity;
  const float m = block_max(m_part, scratch);
  if (has_part) factors[thread()] = rescaling(m_part, finite_max(m), unit_of(p));
  __syncthreads();

  float l = 0.f;
  for (int64_t n = 0; n < a.parts; ++n) l += factors[n] * parts[n * stride + p.E + 1];
  uint32_t row = blockIdx.x;
  const int64_t i = take_digit(&row, p.M), h = take_digit(&row, p.H), b = row;
  const float factor = write_row(p, b, h, number, m, l, thread() == 0);
  for (int64_t e = thread(); e < p.E; e += kThreads) {
    float sum = 0.f;
    for (int64_t n = 0; n < a.parts; ++n) sum += factors[n] * parts[n * stride + e];
    store_element(p.out, offset_of(p.out, b, h, i, e), sum * factor);
  }
}

}  // namespace

void merge_partials(const ForwardParams& p, int64_t partials, int64_t parts, Launcher& launcher) {
  const MergeArgs args = {p, partials, parts};
  launcher.run(merge_kernel, p.B * p.H * p.M, kThreads, 0, args);
}

}  // namespace fastattn::cuda
