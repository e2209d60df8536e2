// Adds up the parts of the gradients. Parts keep the layout of the threads that made them.
#include "cuda/additive/gradient_sums.cuh"

namespace fastattn::cuda {
namespace {

// A slot holds four rows or keys of a dim.
FASTATTN_DEVICE int row_of_slot(int slot) { return slot % kOwnSlots / kOwnDims * 4; }
FASTATTN_DEVICE int64_t dim_of_slot(int slot) {
  return slot / kOwnSlots * kStage + own_dim0(lane()) + slot % kOwnDims;
}

// ---- sums of the parts ----

// sum += this thread's sum in each of `count` parts, `stride` floats apart.
FASTATTN_DEVICE void add_parts(float* parts, int64_t count, int64_t stride, int64_t slot,
                               float (&sum)[4]) {
  for (int64_t part = 0; part < count; ++part, parts += stride) {
    float x[4];
    unpack4(own_sum(parts, slot), x);
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[n] += x[n];
  }
}

// Writes four rows of a dim from row `row` of a tile on.
FASTATTN_DEVICE void write_rows(const View& to, int64_t offset, int row, int rows, int64_t d,
                                int64_t dims, const float (&x)[4]) {
  if (d >= dims) return;
  with_dtype(to.dtype, [&](auto type) {
    for (int n = 0; n < 4; ++n)
      if (row + n < rows)
        store_as<type>(to.data, offset + (row + n) * to.stride_r + d * to.stride_c, x[n]);
  });
}

FASTATTN_DEVICE const float* weights_of(const BackwardArgs& a, const Place& at) {
  return workspace(a) + a.plan.panels.weights + weights_head(tiles_of(a), at) * a.plan.panels.dims;
}

// One block per tile of queries.
__global__ void __launch_bounds__(kThreads, 4)
    additive_queries_kernel(const __grid_constant__ BackwardArgs a) {
  const Panels& panels = a.plan.panels;
  const Place at = query_place(a.p, panels.tiles_m, blockIdx.x);
  const int64_t stride = panels.tiles_m * a.plan.block_q,
                offset = offset_of(a.p.grad_q, at.b, at.h, at.i0, 0);
  float* const parts = query_sums(a, at.b * a.p.H + at.h, 0, at.i0 / kTile);
  const float factor = is_gaussian(a.p) ? -1.f : 4.f;
  for (int slot = 0; slot < panels.stages * kOwnSlots; ++slot) {
    const int64_t d = dim_of_slot(slot);
    float sum[4] = {};
    add_parts(parts, a.plan.slices_n, stride, slot, sum);
    for (float& x : sum) x *= d < a.p.D ? factor * weights_of(a, at)[d] : 0.f;
    write_rows(a.p.grad_q, offset, last_row0(own_key0()) + row_of_slot(slot), at.rows, d, a.p.D,
               sum);
  }
}

// dV in the layout of its sums. Their rows are keys.
template <typename Layout>
FASTATTN_DEVICE void write_value_gradient(const BackwardArgs& a, const Place& at, float* parts) {
  const int64_t stride = a.plan.panels.tiles_n * a.plan.block_k;
  for (int64_t e0 = 0; e0 < a.p.E; e0 += kTile) {
    Pairs<Layout> sum = {};
#pragma unroll
    for (int n = 0; n < kRows; ++n)
      add_parts(parts, a.p.H / a.p.Hkv * a.plan.slices_m, stride, value_slot(a, e0) + n, sum[n]);
    store_tile<Layout>(a.p.grad_v, offset_of(a.p.grad_v, at.b, at.hkv, at.j0, e0), at.cols,
                       extent(a.p.E, e0), sum);
  }
}

// One block per tile of keys. Parts are those of all heads that share the keys.
__global__ void __launch_bounds__(kThreads, 4)
    additive_keys_kernel(const __grid_constant__ BackwardArgs a) {
  const BackwardParams& p = a.p;
  const Panels& panels = a.plan.panels;
  uint32_t block = blockIdx.x;
  const int64_t j0 = take_digit(&block, panels.tiles_n) * kTile;
  const int64_t hkv = take_digit(&block, p.Hkv), b = block, group = p.H / p.Hkv;
  Place at = key_place(p, b, hkv, j0);
  float* const parts = key_sums(a, b * p.H + at.h, 0, j0 / kTile);
  const int64_t stride = panels.tiles_n * a.plan.block_k, of_head = stride * a.plan.slices_m;
  const int64_t offset = offset_of(p.grad_k, b, hkv, j0, 0);
  const float factor = is_gaussian(p) ? 1.f : 4.f;
  for (int slot = 0; slot < panels.stages * kOwnSlots; ++slot) {
    const int64_t d = dim_of_slot(slot);
    float sum[4] = {};
    for (int64_t g = 0; g < group; ++g) {
      float of_one[4] = {};
      at.h = static_cast<int>(hkv * group + g);
      add_parts(parts + g * of_head, a.plan.slices_m, stride, slot, of_one);
      const float weight = d < p.D ? factor * weights_of(a, at)[d] : 0.f;
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[n] += weight * of_one[n];
    }
    write_rows(p.grad_k, offset, own_key0() + row_of_slot(slot), at.cols, d, p.D, sum);
  }
  has_halves(p) ? write_value_gradient<QueryRows>(a, at, parts)
                : write_value_gradient<FragmentLayout>(a, at, parts);
}

// dw, one block per stage of dims of a head. A warp adds up every kWarps-th part.
__global__ void __launch_bounds__(kThreads)
    additive_weight_gradient_kernel(const __grid_constant__ BackwardArgs a) {
  __shared__ float sums[kThreads];
  const Panels& panels = a.plan.panels;
  uint32_t block = blockIdx.x;
  const int64_t d = take_digit(&block, panels.stages) * kStage + lane(), head = block;
  const int64_t parts = a.plan.slices_m * a.plan.slices_n;
  const float* const from = workspace(a) + a.plan.weights + head * parts * panels.dims + d;
  float sum = 0.f;
  for (int64_t part = warp(); d < a.p.D && part < parts; part += kWarps)
    sum += from[part * panels.dims];
  sums[thread()] = sum;
  __syncthreads();
  if (warp() > 0 || d >= a.p.D) return;
  for (int n = 1; n < kWarps; ++n) sum += sums[n * 32 + lane()];
  if (is_gaussian(a.p)) {  // w holds bandwidths h: dh = c / h times the sum; a scale is -c / 2
    const float factor = -2.f * workspace(a)[panels.scales + head];
    sum = sum * factor / load_element(a.p.w, offset_of(a.p.w, head / a.p.H, head % a.p.H, 0, d));
  }
  a.p.grad_w[head * a.p.D + d] = sum;
}

}  // namespace

void launch_gradient_sums(const BackwardArgs& args, Launcher& launcher) {
  const BackwardParams& p = args.p;
  const Panels& panels = args.plan.panels;
  const int64_t heads = p.B * p.H;
  launcher.run(additive_queries_kernel, heads * panels.tiles_m, kThreads, 0, args);
  launcher.run(additive_keys_kernel, p.B * p.Hkv * panels.tiles_n, kThreads, 0, args);
  if (p.grad_w != nullptr)
    launcher.run(additive_weight_gradient_kernel, heads * panels.stages, kThreads, 0, args);
}

}  // namespace fastattn::cuda
