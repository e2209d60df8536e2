// Fused additive attention, backward. With P_ij recomputed from the saved stats of its row, R =
// dropout's factor, W = R P the weights that met V, and u, t = u (1 - u) of additive_terms.cuh:
//
//   dV_j = sum_i W_ij dO_i    dP_ij = R_ij (dO_i . V_j + dW_ij)    dS_ij = P_ij (dP_ij - delta_i)
//   delta_i = sum_e dO_ie O_ie + sum_j W_ij dW_ij - dlse_i
//   dq_id = 4 w_d sum_j dS_ij t_ijd    dk_jd = 4 w_d sum_i dS_ij t_ijd
//   dw_d = sum_ij dS_ij tanh_ijd    dbias = dS, summed where the bias broadcasts
//
//   delta                                 a block a tile of queries
//   queries   for (b, h, tile of queries) a block; for key tiles:    S, dP -> dS; dq, dw
//   keys      for (b, hkv, tile of keys)  a block; for heads, tiles: S, dP -> W, dS; dV, dk
//   bias      for (tile, slice of b, h)   a block; sums in order afterwards
//
// dS passes from the fragments of a tile to the threads that own (i, d) or (j, d) through shared
// memory. What a block adds up over its tiles lies in the workspace, each number read and written
// by one thread: no atomics, every sum in one order. Scores are computed again in each kernel,
// since nothing of size M N may be stored. Dao et al., "FlashAttention", 2022, appendix B.
#include "cuda/additive/prepare.cuh"
#include "cuda/additive/tile.cuh"
#include "cuda/scores.h"

namespace fastattn::cuda {
namespace {

struct BackwardArgs {
  BackwardParams p;
  AdditiveBackwardPlan plan;
};

struct __align__(16) BackwardMemory {
  StageMemory stage;
  float largest[kWarps];         // |dS|, of a warp's share of the tile
  float ds[kTile * kTile];       // kGradUnit dS / unit_of_ds [i][j]
  float weights[kTile * kTile];  // [i][j], of the keys' kernel alone
};
constexpr size_t kSharedWithoutWeights = offsetof(BackwardMemory, weights);

FASTATTN_DEVICE float* workspace(const BackwardArgs& a) {
  return static_cast<float*>(a.p.workspace);
}
FASTATTN_DEVICE AdditiveTiles tiles_of(const BackwardArgs& a) {
  return {a.p, a.plan.panels, workspace(a)};
}

FASTATTN_DEVICE Place query_place(const BackwardArgs& a, uint32_t block) {
  const int64_t i0 = take_digit(&block, a.plan.panels.tiles_m) * kTile;
  const int64_t h = take_digit(&block, a.p.H), b = block;
  return place(a.p, b, h, i0, 0);
}

// ---- dS ----

// dO V^T.
FASTATTN_DEVICE void value_products(const BackwardParams& p, const Place& at, StageMemory& memory,
                                    Fragment& product) {
  clear(product);
  for (int64_t e0 = 0; e0 < p.E; e0 += kStage) {
    const int count = static_cast<int>(min64(kStage, p.E - e0));
    __syncthreads();
    stage_transposed(p.grad_out, offset_of(p.grad_out, at.b, at.h, at.i0, e0), at.rows, count,
                     memory.queries);
    stage_transposed(p.v, offset_of(p.v, at.b, at.hkv, at.j0, e0), at.cols, count, memory.keys);
    __syncthreads();
    if (warp_has_rows(at)) outer_add<false>(memory.queries, 0, memory.keys, count, product);
  }
}

// W and dS of a tile, both exactly 0 where masked. Begins with a barrier if D or E is not 0.
FASTATTN_DEVICE void gradient_tile(const BackwardArgs& a, const Place& at, KeepBits bits,
                                   StageMemory& memory, Fragment& weights, Fragment& ds) {
  weights_tile(tiles_of(a), at, bits, a.p.stats, memory, weights);
  value_products(a.p, at, memory, ds);
  with_dtype(a.p.grad_weights.dtype, [&](auto type) {
    for_grad_weights<FragmentLayout, type>(
        a.p, at, bits, [&](int pair, float grad) { ds[pair / 4][pair % 4] += grad; });
  });
  const KeepBits survivors = surviving_bits<FragmentLayout>(a.p, at);
  drop(a.p, survivors, ds);
  const float* const deltas = workspace(a) + a.plan.delta;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float delta = row0() + r < at.rows ? deltas[row_number(a.p, at, r)] : 0.f;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const float grad = weights[r][c] * (ds[r][c] - delta);
      ds[r][c] = kept(bits, r, c) ? grad : 0.f;
    }
  }
  drop(a.p, survivors, weights);
}

// The power of two that a tile's dS is kept over, near the largest: factors of 2^80 stand beside it
// in a gradient's sums, which would overflow, or underflow, with ordinary gradients. Read where it
// is used: kept over the loops it would take a register.
FASTATTN_DEVICE float unit_of_ds(const BackwardMemory& memory) {
  float largest = 0.f;
  for (int n = 0; n < kWarps; ++n) largest = max_of(largest, memory.largest[n]);
  return fminf(fmaxf(power_below(largest), 0x1p-80f), 0x1p80f);
}

// Has a barrier inside, and needs one behind it.
FASTATTN_DEVICE void store_ds(Fragment& ds, BackwardMemory& memory) {
  float largest = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) largest = max_of(largest, fabsf(ds[r][c]));
  largest = lanes_max(largest, 32);
  if (lane() == 0) memory.largest[warp()] = largest;
  __syncthreads();
  const float factor = kGradUnit / unit_of_ds(memory);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) ds[r][c] *= factor;
  store_fragment<false>(ds, memory.ds);
}

// ---- delta ----

// Rows of the tile, 32 lanes a row.
FASTATTN_DEVICE void out_terms(const BackwardParams& p, const Place& at, float* terms) {
  for (int i = thread() / 32; i < at.rows; i += kWarps) {
    const int64_t out = offset_of(p.out, at.b, at.h, at.i0 + i, 0);
    const int64_t grad = offset_of(p.grad_out, at.b, at.h, at.i0 + i, 0);
    float sum = 0.f;
    for (int64_t e = thread() % 32; e < p.E; e += 32)
      sum += load_element(p.out, out + e * p.out.stride_c) *
             load_element(p.grad_out, grad + e * p.grad_out.stride_c);
    sum = lanes_sum(sum, 32);
    if (thread() % 32 == 0) terms[i] = sum;
  }
}

// sums[r] += sum_j W_ij dW_ij, of this thread's columns.
FASTATTN_DEVICE void add_weight_terms(const BackwardArgs& a, const Place& at, KeepBits bits,
                                      StageMemory& memory, float (&sums)[kRows]) {
  Fragment weights;
  weights_tile(tiles_of(a), at, bits, a.p.stats, memory, weights);
  drop(a.p, surviving_bits<FragmentLayout>(a.p, at), weights);
  with_dtype(a.p.grad_weights.dtype, [&](auto type) {
    for_grad_weights<FragmentLayout, type>(a.p, at, bits, [&](int pair, float grad) {
      sums[pair / 4] += weights[pair / 4][pair % 4] * grad;
    });
  });
}

__global__ void __launch_bounds__(kThreads, 3)
    additive_delta_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  Place at = query_place(a, blockIdx.x);
  float* const terms = memory.ds;
  out_terms(p, at, terms);
  __syncthreads();

  float sums[kRows] = {};
  const KeyRange keys = p.grad_weights.data == nullptr
                            ? KeyRange{0, 0}
                            : tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  for (at.j0 = keys.begin / kTile * kTile; at.j0 < keys.end; at.j0 += kTile) {
    at.cols = extent(p.N, at.j0);
    const TileMask mask = mask_tile<FragmentLayout>(p, at);
    if (!mask.empty) add_weight_terms(a, at, mask.bits, memory.stage, sums);
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = lanes_sum(sums[r], kRowLanes);
    if (thread() % kRowLanes != 0 || row0() + r >= at.rows) continue;
    const int64_t row = row_number(p, at, r);
    const float grad_lse = p.grad_lse == nullptr ? 0.f : p.grad_lse[row];
    workspace(a)[a.plan.delta + row] = terms[row0() + r] + sum - grad_lse;
  }
}

// ---- gradients of queries and weights ----

// Adds the tile's share of dq, over 4 w, and of dw. Slots of `sums`: per stage of dims, kOwn rows
// of the one and one of the other.
template <bool kDirect>
FASTATTN_DEVICE void add_query_gradient(const BackwardArgs& a, const Place& at,
                                        BackwardMemory& memory, float* sums) {
  const AdditiveTiles tiles = tiles_of(a);
  for (int64_t d0 = 0; d0 < tiles.panels.dims; d0 += kStage) {
    const int count = staged_dims(tiles, d0);
    __syncthreads();
    stage_keys(tiles, at, kDirect, d0, count, memory.stage.keys);
    __syncthreads();
    if (own_dim0() >= count || own_row0() >= at.rows) continue;
    OwnTile own, acc = {};
    float weight[kOwn] = {};
    load_own<false>(tiles, at, kDirect, d0, own);
    add_gradient<kDirect, false>(own, memory.stage.keys, memory.ds, at.cols, acc, weight);
    const int64_t slot = d0 / kStage * (kOwn + 1);
    const float unit = unit_of_ds(memory);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int d = 0; d < kOwn; ++d) acc[r][d] *= kDirect ? unit : own[r][d] * unit;
      add_to_sum(sums, slot + r, acc[r]);
      weight[r] *= unit * (1.f / kGradUnit);
    }
    add_to_sum(sums, slot + kOwn, weight);
  }
}

FASTATTN_DEVICE void write_query_gradient(const BackwardArgs& a, const Place& at, float* sums) {
  const View& to = a.p.grad_q;
  const float* const weights = workspace(a) + a.plan.panels.weights + at.h * a.plan.panels.dims;
  for (int64_t stage = 0; stage < a.plan.panels.stages; ++stage) {
    const int64_t d0 = stage * kStage + own_dim0();
    for (int r = 0; r < kOwn; ++r) {
      if (own_row0() + r >= at.rows) continue;
      float sum[kOwn];
      unpack4(own_sum(sums, stage * (kOwn + 1) + r), sum);
      const int64_t offset = offset_of(to, at.b, at.h, at.i0 + own_row0() + r, d0);
      for (int d = 0; d < kOwn && d0 + d < a.p.D; ++d)
        with_dtype(to.dtype, [&](auto type) {
          store_as<type>(to.data, offset + d * to.stride_c, 4.f * weights[d0 + d] * sum[d]);
        });
    }
  }
}

// dw of this tile of queries.
FASTATTN_DEVICE void write_weight_gradient(const BackwardArgs& a, float* sums, float* staged) {
  const Panels& panels = a.plan.panels;
  float* const to = workspace(a) + a.plan.weights + blockIdx.x * panels.dims;
  for (int64_t stage = 0; stage < panels.stages; ++stage) {
    __syncthreads();
    reinterpret_cast<float4*>(staged)[thread()] = own_sum(sums, stage * (kOwn + 1) + kOwn);
    __syncthreads();
    const int64_t d = stage * kStage + thread();
    if (thread() >= kStage || d >= panels.dims) continue;
    float sum = 0.f;
    for (int n = 0; n < kTile / kOwn; ++n) sum += staged[n * kStage + thread()];
    to[d] = sum;
  }
}

__global__ void __launch_bounds__(kThreads, 3)
    additive_queries_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  // Found anew where it is used: kept over the loop it would cost two registers too many.
  const auto sums = [&] {
    const int64_t block = opaque_here(static_cast<int>(blockIdx.x));
    return workspace(a) + a.plan.sums_q + block * a.plan.block_q;
  };
  Place at = query_place(a, blockIdx.x);
  clear_sums(sums(), a.plan.panels.stages * (kOwn + 1));

  const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  for (at.j0 = keys.begin / kTile * kTile; at.j0 < keys.end; at.j0 += kTile) {
    at.cols = extent(p.N, at.j0);
    const TileMask mask = mask_tile<FragmentLayout>(p, at);
    if (mask.empty) continue;
    Fragment weights, ds;
    gradient_tile(a, at, mask.bits, memory.stage, weights, ds);
    store_ds(ds, memory);
    if (is_direct(tiles_of(a), at)) {
      add_query_gradient<true>(a, at, memory, sums());
    } else {
      add_query_gradient<false>(a, at, memory, sums());
    }
  }

  write_query_gradient(a, at, sums());
  write_weight_gradient(a, sums(), memory.stage.queries);
}

// Adds up the tiles of queries, a head a block.
__global__ void __launch_bounds__(kThreads, 3)
    additive_weight_gradient_kernel(const __grid_constant__ BackwardArgs a) {
  const Panels& panels = a.plan.panels;
  const float* const from = workspace(a) + a.plan.weights;
  for (int64_t d = thread(); d < a.p.D; d += kThreads) {
    float sum = 0.f;
    for (int64_t tile = 0; tile < panels.tiles_m; ++tile)
      sum += from[(blockIdx.x * panels.tiles_m + tile) * panels.dims + d];
    a.p.grad_w[blockIdx.x * a.p.D + d] = sum;
  }
}

// ---- gradients of keys and values ----

// Slots of `sums`: per stage of dims, kOwn rows of dk; per kTile columns of values, kRows of dV.
FASTATTN_DEVICE int64_t value_slot(const BackwardArgs& a, int64_t e0) {
  return a.plan.panels.stages * kOwn + e0 / kTile * kRows;
}

FASTATTN_DEVICE void add_value_gradient(const BackwardArgs& a, const Place& at, bool full,
                                        BackwardMemory& memory, float* sums) {
  const View& from = a.p.grad_out;
  for (int64_t e0 = 0; e0 < a.p.E; e0 += kTile) {
    Fragment acc;
    clear(acc);
    for (int i = 0; i < at.rows; i += kStage) {
      const int count = min(kStage, at.rows - i);
      __syncthreads();
      const bool finite =
          __syncthreads_and(stage_rows(from, offset_of(from, at.b, at.h, at.i0 + i, e0), count,
                                       extent(a.p.E, e0), memory.stage.queries));
      if (full || finite) {
        outer_add<false>(memory.weights, i, memory.stage.queries, count, acc);
      } else {
        outer_add<true>(memory.weights, i, memory.stage.queries, count, acc);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) add_to_sum(sums, value_slot(a, e0) + r, acc[r]);
  }
}

template <bool kDirect>
FASTATTN_DEVICE void add_key_gradient(const BackwardArgs& a, const Place& at,
                                      BackwardMemory& memory, float* sums) {
  const AdditiveTiles tiles = tiles_of(a);
  const float* const weights = workspace(a) + tiles.panels.weights + at.h * tiles.panels.dims;
  for (int64_t d0 = 0; d0 < tiles.panels.dims; d0 += kStage) {
    const int count = staged_dims(tiles, d0);
    __syncthreads();
    stage_queries(tiles, at, tiles.panels.gradient_queries, kDirect, d0, count,
                  memory.stage.queries);
    __syncthreads();
    if (own_dim0() >= count || own_row0() >= at.cols) continue;
    OwnTile own, acc = {};
    float unused[kOwn] = {};
    load_own<true>(tiles, at, kDirect, d0, own);
    add_gradient<kDirect, true>(own, memory.stage.queries, memory.ds, at.rows, acc, unused);
    const float unit = unit_of_ds(memory);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int d = 0; d < kOwn; ++d) {
        const float sum = acc[r][d] * (kDirect ? unit : own[r][d] * unit);
        acc[r][d] = sum * (4.f * weights[d0 + own_dim0() + d]);
      }
      add_to_sum(sums, d0 / kStage * kOwn + r, acc[r]);
    }
  }
}

FASTATTN_DEVICE void write_key_gradients(const BackwardArgs& a, const Place& at, float* sums) {
  const View &k = a.p.grad_k, &v = a.p.grad_v;
  for (int64_t stage = 0; stage < a.plan.panels.stages; ++stage) {
    const int64_t d0 = stage * kStage + own_dim0();
    for (int r = 0; r < kOwn; ++r) {
      if (own_row0() + r >= at.cols) continue;
      float sum[kOwn];
      unpack4(own_sum(sums, stage * kOwn + r), sum);
      const int64_t offset = offset_of(k, at.b, at.hkv, at.j0 + own_row0() + r, d0);
      for (int d = 0; d < kOwn && d0 + d < a.p.D; ++d)
        with_dtype(k.dtype,
                   [&](auto type) { store_as<type>(k.data, offset + d * k.stride_c, sum[d]); });
    }
  }
  for (int64_t e0 = 0; e0 < a.p.E; e0 += kTile) {
    Fragment sum;
#pragma unroll
    for (int r = 0; r < kRows; ++r) unpack4(own_sum(sums, value_slot(a, e0) + r), sum[r]);
    store_tile(v, offset_of(v, at.b, at.hkv, at.j0, e0), at.cols, extent(a.p.E, e0), sum);
  }
}

__global__ void __launch_bounds__(kThreads, 3)
    additive_keys_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  float* const sums = workspace(a) + a.plan.sums_k + blockIdx.x * a.plan.block_k;
  uint32_t block = blockIdx.x;
  const int64_t j0 = take_digit(&block, a.plan.panels.tiles_n) * kTile;
  const int64_t hkv = take_digit(&block, p.Hkv), b = block;
  const int group = static_cast<int>(p.H) / static_cast<int>(p.Hkv);
  Place at = place(p, b, hkv * group, 0, j0);
  const int end = at.h + group;
  clear_sums(sums, value_slot(a, ceil_div(p.E, kTile) * kTile));
  const bool direct = is_direct(tiles_of(a), at);

  for (; at.h < end; ++at.h)
    for (at.i0 = 0; at.i0 < p.M; at.i0 += kTile) {
      at.rows = extent(p.M, at.i0);
      const TileMask mask = mask_tile<FragmentLayout>(p, at);
      if (mask.empty) continue;
      Fragment weights, ds;
      gradient_tile(a, at, mask.bits, memory.stage, weights, ds);
      store_fragment<false>(weights, memory.weights);
      store_ds(ds, memory);
      add_value_gradient(a, at, mask.full, memory, sums);
      if (direct) {
        add_key_gradient<true>(a, at, memory, sums);
      } else {
        add_key_gradient<false>(a, at, memory, sums);
      }
    }
  write_key_gradients(a, at, sums);
}

// ---- gradient of the bias ----

struct BiasTile {
  int64_t b, h, tile_m, tile_n, slice;  // of the bias's own batches and heads
};

FASTATTN_DEVICE BiasTile bias_tile(const BackwardArgs& a, uint32_t block) {
  BiasTile tile;
  tile.tile_n = take_digit(&block, a.plan.panels.tiles_n);
  tile.tile_m = take_digit(&block, a.plan.panels.tiles_m);
  tile.slice = take_digit(&block, a.plan.slices);
  tile.h = take_digit(&block, a.p.bias_H);
  tile.b = block;
  return tile;
}

// dS of one tile, summed over the batches and heads of a slice.
FASTATTN_DEVICE void sum_slice(const BackwardArgs& a, const BiasTile& tile, StageMemory& memory,
                               Fragment& sum) {
  const BackwardParams& p = a.p;
  const int64_t sharers = bias_sharers(p), heads = p.bias_H == 1 ? p.H : 1;
  clear(sum);
  for (int64_t n = tile.slice * sharers / a.plan.slices;
       n < (tile.slice + 1) * sharers / a.plan.slices; ++n) {
    const Place at =
        place(p, p.bias_B == 1 ? n / heads : tile.b, p.bias_H == 1 ? n % heads : tile.h,
              tile.tile_m * kTile, tile.tile_n * kTile);
    const TileMask mask = mask_tile<FragmentLayout>(p, at);
    if (mask.empty) continue;
    Fragment weights, ds;
    gradient_tile(a, at, mask.bits, memory, weights, ds);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) sum[r][c] += ds[r][c];
  }
}

// Sums a tile over its rows into row 0, or over its columns into column 0.
FASTATTN_DEVICE void reduce_tile(bool over_rows, float* memory, Fragment& tile) {
  __syncthreads();
  store_fragment<false>(tile, memory);
  __syncthreads();
  if (thread() < kTile) {
    float sum = 0.f;
    for (int n = 0; n < kTile; ++n)
      sum += memory[over_rows ? tile_index(n, thread()) : tile_index(thread(), n)];
    memory[over_rows ? tile_index(0, thread()) : tile_index(thread(), 0)] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) load_cols(memory, row0() + r, tile[r]);
}

// Where a tile's sums go: the gradient itself, or one part of [bias_M][bias_N] in the workspace.
FASTATTN_DEVICE View bias_target(const BackwardArgs& a, const BiasTile& tile) {
  const AdditiveBackwardPlan& plan = a.plan;
  const BackwardParams& p = a.p;
  View to = p.grad_bias;
  if (bias_parts(plan) == 1) {
    const int64_t size = to.dtype == DType::kFloat32 ? 4 : 2;
    to.data = static_cast<char*>(to.data) + offset_of(to, tile.b, tile.h, 0, 0) * size;
    return to;
  }
  const int64_t part_m = plan.parts_m == 1 ? 0 : tile.tile_m;
  const int64_t part_n = plan.parts_n == 1 ? 0 : tile.tile_n;
  const int64_t part = (tile.slice * plan.parts_m + part_m) * plan.parts_n + part_n;
  const int64_t number = (tile.b * p.bias_H + tile.h) * bias_parts(plan) + part;
  return {
      workspace(a) + plan.bias + number * p.bias_M * p.bias_N, DType::kFloat32, 0, 0, p.bias_N, 1};
}

// Holds two fragments besides dP: two blocks an SM.
__global__ void __launch_bounds__(kThreads, 2)
    additive_bias_kernel(const __grid_constant__ BackwardArgs a) {
  BackwardMemory& memory = *static_cast<BackwardMemory*>(shared_memory());
  const BackwardParams& p = a.p;
  const BiasTile tile = bias_tile(a, blockIdx.x);
  const int64_t i0 = tile.tile_m * kTile, j0 = tile.tile_n * kTile;
  Fragment sum;
  sum_slice(a, tile, memory.stage, sum);
  if (p.bias_M == 1) reduce_tile(true, memory.ds, sum);
  if (p.bias_N == 1) reduce_tile(false, memory.ds, sum);
  const View to = bias_target(a, tile);
  store_tile(to, offset_of(to, 0, 0, p.bias_M == 1 ? 0 : i0, p.bias_N == 1 ? 0 : j0),
             p.bias_M == 1 ? 1 : extent(p.M, i0), p.bias_N == 1 ? 1 : extent(p.N, j0), sum);
}

// Adds up the parts, 32 lanes an element.
__global__ void __launch_bounds__(kThreads, 3)
    additive_bias_sum_kernel(const __grid_constant__ BackwardArgs a) {
  const BackwardParams& p = a.p;
  const int64_t size = p.bias_M * p.bias_N, parts = bias_parts(a.plan);
  const int64_t element = blockIdx.x * int64_t{kWarps} + thread() / 32;
  if (element >= p.bias_B * p.bias_H * size) return;
  const int64_t bh = element / size, n = element % size;
  const float* const from = workspace(a) + a.plan.bias + bh * parts * size + n;
  float sum = 0.f;
  for (int64_t part = thread() % 32; part < parts; part += 32) sum += from[part * size];
  sum = lanes_sum(sum, 32);
  if (thread() % 32 != 0) return;
  const int64_t offset =
      offset_of(p.grad_bias, bh / p.bias_H, bh % p.bias_H, n / p.bias_N, n % p.bias_N);
  with_dtype(p.grad_bias.dtype, [&](auto type) { store_as<type>(p.grad_bias.data, offset, sum); });
}

void bias_gradient(const BackwardArgs& args, Launcher& launcher) {
  const BackwardParams& p = args.p;
  const int64_t tiles = args.plan.panels.tiles_m * args.plan.panels.tiles_n;
  const int64_t heads = p.bias_B * p.bias_H;
  launcher.run(additive_bias_kernel, heads * args.plan.slices * tiles, kThreads,
               kSharedWithoutWeights, args);
  if (bias_parts(args.plan) == 1) return;
  const int64_t elements = heads * p.bias_M * p.bias_N;
  launcher.run(additive_bias_sum_kernel, ceil_div(elements, kWarps), kThreads, 0, args);
}

}  // namespace

int64_t additive_backward_workspace_bytes(const BackwardParams& p) {
  return plan_additive_backward(p).workspace_bytes;
}

const char* additive_backward(const BackwardParams& p, void* stream) {
  const BackwardArgs args = {p, plan_additive_backward(p)};
  const Panels& panels = args.plan.panels;
  const int64_t query_tiles = p.B * p.H * panels.tiles_m;
  Launcher launcher(stream);
  prepare_panels(p, panels, static_cast<float*>(p.workspace), true, launcher);
  launcher.run(additive_delta_kernel, query_tiles, kThreads, kSharedWithoutWeights, args);
  launcher.run(additive_queries_kernel, query_tiles, kThreads, kSharedWithoutWeights, args);
  if (p.grad_w != nullptr)
    launcher.run(additive_weight_gradient_kernel, p.B * p.H, kThreads, 0, args);
  launcher.run(additive_keys_kernel, p.B * p.Hkv * panels.tiles_n, kThreads, sizeof(BackwardMemory),
               args);
  if (p.grad_bias.data != nullptr) bias_gradient(args, launcher);
  return launcher.error();
}

}  // namespace fastattn::cuda
