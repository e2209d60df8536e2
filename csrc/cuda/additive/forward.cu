// Fused additive attention, forward, exact (Bahdanau, Cho and Bengio, 2015):
//
//   out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = e^(s_ij - m_i)      lse_i = ln sum_j e^(s_ij)
//   s_ij = sum_d w_d tanh(q_id + k_jd)
//
//   prologue (prepare.cu)               exponentials of q and k, the range of each key tile
//   for (b, h, tile of 64 queries)      one block, or one for each chunk of its keys, if there are
//                                       few tiles; O, m and l in shared memory
//     for key tiles that some row keeps
//       S = scores                      32 per thread in registers; terms.cuh has the loop
//       S -> masked, biased -> weights  online softmax; P to shared memory
//       O = alpha O + P V               on tensor cores (half_products.cuh); of float32 on FMA
//                                       units, with V in stages of 32 keys x 64 columns
//     out = O / l, lse, stats           merge.cuh adds up chunks
//
// Forward saves the stats of each row for backward: m and 1 / l. If weights are returned, a second
// kernel computes scores again, and weights from scores and stats. Online softmax: Milakov and
// Gimelshein, 2018; Dao et al., "FlashAttention: fast and memory-efficient exact attention with
// IO-awareness", 2022.
#include "cuda/additive/few_queries.cuh"
#include "cuda/additive/half_products.cuh"
#include "cuda/additive/passes.h"
#include "cuda/additive/prepare.cuh"
#include "cuda/additive/tile.cuh"
#include "cuda/tile/merge.cuh"

namespace fastattn::cuda {
namespace {

struct ForwardArgs {
  ForwardParams p;
  AdditiveForwardPlan plan;
  float unit;
};

FASTATTN_DEVICE AdditiveTiles tiles_of(const ForwardArgs& a) {
  return {a.p, a.plan.panels, static_cast<const float*>(a.p.workspace), a.unit};
}

// O follows this struct: [ceil(E / kTile)][kRows][kThreads] float4. Each float4 belongs to one
// thread.
struct __align__(16) ForwardMemory {
  union {  // P overwrites the operands once the scores are computed
    StageMemory stage;
    HalfWeights halves;
  };
  union {
    float values[kStageFloats];
    HalfTile half_values;
  };
  RowStates states;
};
static_assert(sizeof(StageMemory) >= sizeof(float) * kTile * kTile);

constexpr size_t forward_shared(int64_t E) {
  return sizeof(ForwardMemory) +
         static_cast<size_t>((E + kTile - 1) / kTile * kRows * kThreads) * sizeof(float4);
}
static_assert(forward_shared(kMaxValues) <= kSharedLimit);

// O of the columns [e0, e0 + kTile), times the factors of the rows.
template <typename Layout>
FASTATTN_DEVICE void load_sums(float* o, int64_t e0, const RowStates& states, Pairs<Layout>& sum) {
#pragma unroll
  for (int n = 0; n < kRows; ++n) unpack4(own_sum(o, e0 / kTile * kRows + n), sum[n]);
  multiply_rows<Layout>(states.factor, sum);
}
// O = alpha O + a tile's products. The sums have two levels: one sum over all keys loses digits.
template <typename Layout>
FASTATTN_DEVICE void add_products(const Pairs<Layout>& products, const RowStates& states, float* o,
                                  int64_t e0) {
  Pairs<Layout> sum;
  load_sums<Layout>(o, e0, states, sum);
  add(products, sum);
#pragma unroll
  for (int n = 0; n < kRows; ++n) own_sum(o, e0 / kTile * kRows + n) = pack4(sum[n]);
}

// O = alpha O + P V, for P in shared memory.
FASTATTN_DEVICE void add_values(const ForwardParams& p, const Place& at, bool full,
                                ForwardMemory& memory, float* o) {
  const float* const weights = memory.stage.queries;
  for (int64_t e0 = 0; e0 < p.E; e0 += kTile) {
    Fragment products;
    clear(products);
    for (int j = 0; j < at.cols; j += kStage) {
      const int count = min(kStage, at.cols - j);
      __syncthreads();
      const bool finite = __syncthreads_and(stage_rows(
          p.v, offset_of(p.v, at.b, at.hkv, at.j0 + j, e0), count, extent(p.E, e0), memory.values));
      if (!warp_has_rows(at)) continue;
      if (full || finite) {
        outer_add<false>(weights, j, memory.values, count, products);
      } else {
        outer_add<true>(weights, j, memory.values, count, products);
      }
    }
    add_products<FragmentLayout>(products, memory.states, o, e0);
  }
}
FASTATTN_DEVICE void add_half_values(const ForwardParams& p, const Place& at, bool full,
                                     ForwardMemory& memory, float* o) {
  for (int64_t e0 = 0; e0 < p.E; e0 += kTile) {
    Sums products = {};
    add_weighted<false>(p.v, offset_of(p.v, at.b, at.hkv, at.j0, e0), at.cols, extent(p.E, e0),
                        full, memory.halves, memory.half_values, products);
    add_products<QueryRows>(products, memory.states, o, e0);
  }
}

template <typename Layout>
FASTATTN_DEVICE void write_out(const View& to, const Place& at, int64_t E, const RowStates& states,
                               float* o) {
  for (int64_t e0 = 0; e0 < E; e0 += kTile) {
    Pairs<Layout> out;
    load_sums<Layout>(o, e0, states, out);
    store_tile<Layout>(to, offset_of(to, at.b, at.h, at.i0, e0), at.rows, extent(E, e0), out);
  }
}

// A chunk's part of each row in the workspace (merge.cuh), as a tensor [B, H, M, E + 2].
FASTATTN_DEVICE View parts_of(const ForwardArgs& a, int64_t chunk) {
  const ForwardParams& p = a.p;
  const int64_t row = a.plan.chunks * (p.E + 2);
  return {
      partial_at(p, a.plan.partials, chunk), DType::kFloat32, p.H * p.M * row, p.M * row, row, 1};
}

// Writes lse and stats, or m and l of a chunk, and leaves the factors of O in the states. Begins
// with a barrier.
FASTATTN_DEVICE void write_states(const ForwardArgs& a, const Place& at, const View& to,
                                  RowStates& states) {
  const ForwardParams& p = a.p;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row0() + r;
    const bool writer = is_row_writer() && row < at.rows;
    float factor = 1.f;
    if (a.plan.chunks == 1) {
      factor = write_row(p, at.b, at.h, row_number(p, at, r), states.m[row], states.l[row], writer);
    } else if (writer) {
      const int64_t offset = offset_of(to, at.b, at.h, at.i0 + row, p.E);
      store_as<DType::kFloat32>(to.data, offset, states.m[row]);
      store_as<DType::kFloat32>(to.data, offset + 1, states.l[row]);
    }
    if (is_row_writer()) states.factor[row] = factor;
  }
  __syncwarp();
}

__global__ void __launch_bounds__(kThreads, 3)
    additive_forward_kernel(const __grid_constant__ ForwardArgs a) {
  ForwardMemory& memory = *static_cast<ForwardMemory*>(shared_memory());
  float* const o = reinterpret_cast<float*>(&memory + 1);
  const ForwardParams& p = a.p;
  uint32_t block = blockIdx.x;
  const int64_t chunk = take_digit(&block, a.plan.chunks);
  Place at = query_place(p, a.plan.panels.tiles_m, block, true);
  const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  const int64_t begin = max64(chunk * a.plan.chunk_keys, keys.begin / kTile * kTile);
  const int64_t end = min64((chunk + 1) * a.plan.chunk_keys, keys.end);
  clear(memory.states);
  __syncthreads();
  clear_sums(o, ceil_div(p.E, kTile) * kRows);

  for (at.j0 = begin; at.j0 < end; at.j0 += kTile) {
    at.cols = extent(p.N, at.j0);
    const TileMask mask = mask_tile<FragmentLayout>(p, at);
    if (mask.empty) continue;
    Fragment s;
    score_tile(tiles_of(a), at, mask.bits, memory.stage, s);
    softmax_step(p, a.unit, at, mask.bits, memory.states, s);
    __syncthreads();
    if (has_halves(p)) {
      store_weights(p.v.dtype, s, mask.bits, memory.halves);
      add_half_values(p, at, mask.full, memory, o);
    } else {
      take_out_masked(mask.bits, s);
      store_fragment<true>(s, memory.stage.queries);
      add_values(p, at, mask.full, memory, o);
    }
  }
  const View to = a.plan.chunks == 1 ? p.out : parts_of(a, chunk);
  write_states(a, at, to, memory.states);
  has_halves(p) ? write_out<QueryRows>(to, at, p.E, memory.states, o)
                : write_out<FragmentLayout>(to, at, p.E, memory.states, o);
}

// ---- returned weights ----

// One block per tile of weights: of one head, or the mean of all heads, added up in head order.
__global__ void __launch_bounds__(kThreads, 3)
    additive_weights_kernel(const __grid_constant__ ForwardArgs a) {
  StageMemory& memory = *static_cast<StageMemory*>(shared_memory());
  const ForwardParams& p = a.p;
  const int heads = p.weights_mode == WeightsMode::kMean ? static_cast<int>(p.H) : 1;
  uint32_t block = blockIdx.x;
  const int64_t j0 = take_digit(&block, a.plan.panels.tiles_n) * kTile;
  const int64_t i0 = take_digit(&block, a.plan.panels.tiles_m) * kTile;
  const int64_t head_out = take_digit(&block, heads_out(p)), b = block;
  Fragment sum;
  clear(sum);
  for (int g = 0; g < heads; ++g) {
    // What depends on j0 stays in the loop.
    const Place at = place(p, b, head_out * heads + g, i0, opaque_here(static_cast<int>(j0)));
    const TileMask mask = mask_tile<FragmentLayout>(p, at);
    if (mask.empty) continue;
    Fragment weights;
    weights_tile(tiles_of(a), at, mask.bits, p.stats, memory, weights);
    drop(p, surviving_bits<FragmentLayout>(p, at), weights);
    add(weights, sum);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) sum[r][c] *= 1.f / static_cast<float>(heads);
  store_tile<FragmentLayout>(p.weights, offset_of(p.weights, b, head_out, i0, j0), extent(p.M, i0),
                             extent(p.N, j0), sum);
}

}  // namespace

int64_t additive_forward_workspace_bytes(const ForwardParams& p) {
  return plan_additive_forward(p).workspace_bytes;
}

const char* additive_forward(const ForwardParams& p, void* stream) {
  const ForwardArgs args = {p, plan_additive_forward(p), unit_of(p)};
  const Panels& panels = args.plan.panels;
  Launcher launcher(stream);
  if (panels.few) {
    additive_few(p, args.plan, launcher);
    return launcher.error();
  }
  prepare_panels(p, panels, static_cast<float*>(p.workspace), false, launcher);
  launcher.run(additive_forward_kernel, p.B * p.H * panels.tiles_m * args.plan.chunks, kThreads,
               {forward_shared(p.E), forward_shared(kMaxValues)}, args);
  if (args.plan.chunks > 1) merge_partials(p, args.plan.partials, args.plan.chunks, launcher);
  if (p.weights_mode == WeightsMode::kNone) return launcher.error();
  const int64_t heads = min64(p.H, heads_out(p));
  launcher.run(additive_weights_kernel, p.B * heads * panels.tiles_m * panels.tiles_n, kThreads,
               sizeof(StageMemory), args);
  return launcher.error();
}

}  // namespace fastattn::cuda
