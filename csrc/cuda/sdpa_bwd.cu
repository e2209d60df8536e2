// Scaled dot-product attention, backward, on tensor cores, from the saved stats: no M x N matrix is
// stored. With P_ij = 2^(s_ij - m_i) / l_i recomputed, R dropout's factor and W = R P:
//
//   dP = R (dO V^T + dW)     dS = P (dP - delta)     delta_i = sum_j P_ij dP_ij - dlse_i
//   dV = W^T dO     dK = scale dS^T Q     dQ = scale dS K     dbias = dS, summed where it
//   broadcasts
//
//   delta:  for (b, h, tile of queries):     dO . O, and W . dW over the keys if there is dW
//   dq:     for (b, h, tile of queries):     Q, dO stay; K, V pass by       3 products a tile
//   dv, dk: for (b, key head, tile of keys): K, V stay; Q, dO of the heads  2 and 3 products
//           that share it pass by, on transposed tiles
//   dbias:  for (tile of the bias):          dS of all that share it, in order
//
// Every result has one owner, so there are no atomics and results are the same on every run. dV and
// dK come one after the other: the sums of both, 128 wide, would not fit the registers. Dao,
// "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023.
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/sdpa_step.cuh"

namespace fastattn::cuda {
namespace {

// Of the queries of a tile; factor is 0 past the last one.
struct RowMemory {
  float shift[kTile], factor[kTile], delta[kTile];
};

template <int kDim>
struct __align__(16) GradMemory {
  uint16_t q[kTile * kDim], grad_out[kTile * kDim];
  uint16_t k[kTile * kDim], v[kTile * kDim];
  uint32_t bad_rows[kWarps];
  RowMemory rows;
};

FASTATTN_DEVICE int64_t query_number(const AttentionParams& p, const Place& at, int query) {
  return (at.b * p.H + at.h) * p.M + at.i0 + query;
}

// Visible after a barrier.
template <bool kDelta>
FASTATTN_DEVICE void load_rows(const BackwardParams& p, const Place& at, RowMemory& rows) {
  if (thread() >= kTile) return;
  const bool inside = thread() < at.rows;
  const int64_t number = query_number(p, at, inside ? thread() : 0);
  const float2 stats = reinterpret_cast<const float2*>(p.stats)[number];
  rows.shift[thread()] = stats.x;
  rows.factor[thread()] = inside ? stats.y : 0.f;
  if (kDelta) rows.delta[thread()] = static_cast<const float*>(p.workspace)[number];
}

FASTATTN_DEVICE Place query_place(const AttentionParams& p, uint32_t block) {
  const int64_t tile = take_digit(&block, ceil_div(p.M, kTile)), h = take_digit(&block, p.H);
  return place(p, block, h, tile * kTile, 0);
}

// Scores become P, before dropout: exactly 0 where masked, even if the row is NaN.
template <bool kTransposed>
FASTATTN_DEVICE void known_pairs(const RowMemory& rows, KeepBits bits, float scale, Scores& s) {
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int query = pair_query<kTransposed>(n, v);
      const float weight = ex2_approx(fmaf(s[n][v], scale, -rows.shift[query]));
      s[n][v] = kept_pair(bits, n, v) ? weight * rows.factor[query] : 0.f;
    }
}

// dW of the kept pairs; 0 elsewhere, or if there is none.
template <bool kTransposed, DType kType>
FASTATTN_DEVICE void load_grad_weights(const BackwardParams& p, const Place& at, KeepBits bits,
                                       Scores& to) {
  clear(to);
  if (p.grad_weights.data == nullptr) return;
  const bool mean = p.weights_mode == WeightsMode::kMean;
  const float share = mean ? 1.f / static_cast<float>(p.H) : 1.f;
  const View& x = p.grad_weights;
  const int64_t offset = offset_of(x, at.b, mean ? 0 : at.h, at.i0, at.j0);
  for_kept_pairs<kTransposed, true>(
      bits, offset, x.stride_r, x.stride_c,
      [&](int n, int v, int64_t where) { to[n][v] = load_as<kType>(x.data, where) * share; });
}

// s becomes W and dp = dO V^T + dW becomes dS, both exactly 0 where masked.
template <bool kTransposed>
FASTATTN_DEVICE void grad_pairs(const BackwardParams& p, const Place& at, const TileMask& mask,
                                const RowMemory& rows, float scale, Scores& s, Scores& dp) {
  known_pairs<kTransposed>(rows, mask.bits, scale, s);
  const KeepBits survivors = p.dropout.enabled ? surviving_pairs<kTransposed>(p, at) : kAllKept;
  drop_pairs(p, survivors, dp);
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const float ds = s[n][v] * (dp[n][v] - rows.delta[pair_query<kTransposed>(n, v)]);
      dp[n][v] = kept_pair(mask.bits, n, v) ? ds : 0.f;
    }
  drop_pairs(p, survivors, s);
}

// ---- delta ----

template <DType kType, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_delta_kernel(const __grid_constant__ BackwardParams p) {
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  Place at = query_place(p, blockIdx.x);
  float sum[2] = {0.f, 0.f};  // of this lane's share of rows g and g + 8
  for (int half = 0; half < 2; ++half) {
    const int row = sum_row(2 * half);
    if (row >= at.rows) continue;
    const int64_t out = offset_of(p.out, at.b, at.h, at.i0 + row, 0);
    const int64_t grad = offset_of(p.grad_out, at.b, at.h, at.i0 + row, 0);
    for (int64_t e = thread() % kQuad; e < p.E; e += kQuad)
      sum[half] += load_as<kType>(p.out.data, out + e * p.out.stride_c) *
                   load_as<kType>(p.grad_out.data, grad + e * p.grad_out.stride_c);
  }
  if (p.grad_weights.data != nullptr) {
    const Scale scale = scale_of(p);
    const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
    start_queries<kDim>(p.q, p.D, at, memory.q);
    load_rows<false>(p, at, memory.rows);
    for (at.j0 = keys.begin / kTile * kTile; at.j0 < keys.end; at.j0 += kTile) {
      at.cols = extent(p.N, at.j0);
      const TileMask mask = mask_pairs<false>(p, at);
      if (mask.empty) continue;
      __syncthreads();
      start_keys<kDim>(p.k, p.D, at, memory.k);
      wait_for_copies();
      __syncthreads();
      Scores s;
      sdpa_scores<false, kType, kDim>(p, at, mask, scale, memory.q, memory.k, s);
      known_pairs<false>(memory.rows, mask.bits, scale.later, s);
      if (p.dropout.enabled) drop_pairs(p, surviving_pairs<false>(p, at), s);
      Scores dw;
      load_grad_weights<false, kType>(p, at, mask.bits, dw);
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (int v = 0; v < 4; ++v) sum[v / 2] += s[n][v] * dw[n][v];
    }
    wait_for_copies();
  }
  for (int half = 0; half < 2; ++half) {
    const int row = sum_row(2 * half);
    const float total = lanes_sum(sum[half], kQuad);
    if (row >= at.rows || thread() % kQuad != 0) continue;
    const int64_t number = query_number(p, at, row);
    static_cast<float*>(p.workspace)[number] =
        total - (p.grad_lse == nullptr ? 0.f : p.grad_lse[number]);
  }
}

// ---- dq ----

template <DType kType, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_dq_kernel(const __grid_constant__ BackwardParams p) {
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  const Scale scale = scale_of(p);
  Place at = query_place(p, blockIdx.x);
  const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  float dq[kDim / 8][4] = {};
  start_queries<kDim>(p.q, p.D, at, memory.q);
  start_queries<kDim>(p.grad_out, p.E, at, memory.grad_out);
  load_rows<true>(p, at, memory.rows);
  for (at.j0 = keys.begin / kTile * kTile; at.j0 < keys.end; at.j0 += kTile) {
    at.cols = extent(p.N, at.j0);
    const TileMask mask = mask_pairs<false>(p, at);
    if (mask.empty) continue;
    __syncthreads();
    start_keys<kDim>(p.k, p.D, at, memory.k);
    start_keys<kDim>(p.v, p.E, at, memory.v);
    wait_for_copies();
    __syncthreads();
    Scores s, ds;
    load_grad_weights<false, kType>(p, at, mask.bits, ds);  // before S takes registers
    multiply_transposed<kType, kDim>(memory.grad_out, memory.v, ds);
    sdpa_scores<false, kType, kDim>(p, at, mask, scale, memory.q, memory.k, s);
    grad_pairs<false>(p, at, mask, memory.rows, scale.later, s, ds);
    __syncthreads();  // others may still read the rows of K that are taken out
    add_product<kType, kDim>(p.k, offset_of(p.k, at.b, at.hkv, at.j0, 0), p.D, mask, ds, memory.k,
                             memory.bad_rows, dq);
  }
  wait_for_copies();
  store_sums<kType, kDim>(p.grad_q, offset_of(p.grad_q, at.b, at.h, at.i0, 0), at.rows, p.D,
                          p.scale, dq);
}

// ---- dk, dv ----

// kValues: dV, else dK.
template <bool kValues, DType kType, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_dkdv_kernel(const __grid_constant__ BackwardParams p) {
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  const Scale scale = scale_of(p);
  uint32_t block = blockIdx.x;
  const int64_t tile = take_digit(&block, ceil_div(p.N, kTile)), hkv = take_digit(&block, p.Hkv);
  const int group = static_cast<int>(p.H / p.Hkv);
  Place at = place(p, block, hkv * group, 0, tile * kTile);
  float sum[kDim / 8][4] = {};
  start_keys<kDim>(p.k, p.D, at, memory.k);
  if (!kValues) start_keys<kDim>(p.v, p.E, at, memory.v);
  for (int n = 0; n < group * static_cast<int>(ceil_div(p.M, kTile)); ++n) {
    uint32_t number = static_cast<uint32_t>(n);
    at.i0 = take_digit(&number, ceil_div(p.M, kTile)) * kTile;
    at.h = at.hkv * group + static_cast<int>(number);
    at.rows = extent(p.M, at.i0);
    const TileMask mask = mask_pairs<true>(p, at);
    if (mask.empty) continue;
    __syncthreads();
    start_queries<kDim>(p.q, p.D, at, memory.q);
    start_queries<kDim>(p.grad_out, p.E, at, memory.grad_out);
    load_rows<!kValues>(p, at, memory.rows);
    wait_for_copies();
    __syncthreads();
    Scores s;
    if constexpr (kValues) {
      sdpa_scores<true, kType, kDim>(p, at, mask, scale, memory.k, memory.q, s);
      known_pairs<true>(memory.rows, mask.bits, scale.later, s);
      if (p.dropout.enabled) drop_pairs(p, surviving_pairs<true>(p, at), s);
      add_product<kType, kDim>(p.grad_out, offset_of(p.grad_out, at.b, at.h, at.i0, 0), p.E, mask,
                               s, memory.grad_out, memory.bad_rows, sum);
    } else {
      Scores ds;
      load_grad_weights<true, kType>(p, at, mask.bits, ds);  // before S takes registers
      multiply_transposed<kType, kDim>(memory.v, memory.grad_out, ds);
      sdpa_scores<true, kType, kDim>(p, at, mask, scale, memory.k, memory.q, s);
      grad_pairs<true>(p, at, mask, memory.rows, scale.later, s, ds);
      __syncthreads();
      add_product<kType, kDim>(p.q, offset_of(p.q, at.b, at.h, at.i0, 0), p.D, mask, ds, memory.q,
                               memory.bad_rows, sum);
    }
  }
  wait_for_copies();
  const View& to = kValues ? p.grad_v : p.grad_k;
  store_sums<kType, kDim>(to, offset_of(to, at.b, at.hkv, at.j0, 0), at.cols, kValues ? p.E : p.D,
                          kValues ? 1.f : p.scale, sum);
}

// ---- dbias ----

// Adds up the rows (columns) of a tile, in order, where the bias has one row (column).
FASTATTN_DEVICE void fold_tile(bool one_row, bool one_col, float* tile) {
  __syncthreads();
  if (one_row && thread() < kTile)
    for (int r = 1; r < kTile; ++r) tile[thread()] += tile[r * kTile + thread()];
  __syncthreads();
  if (one_col && thread() < (one_row ? 1 : kTile))
    for (int c = 1; c < kTile; ++c) tile[thread() * kTile] += tile[thread() * kTile + c];
  __syncthreads();
}

template <DType kType, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_dbias_kernel(const __grid_constant__ BackwardParams p) {
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  const Scale scale = scale_of(p);
  const int64_t tiles_m = ceil_div(p.M, kTile), tiles_n = ceil_div(p.N, kTile);
  uint32_t block = blockIdx.x;
  const int64_t own_n = take_digit(&block, p.bias_N == 1 ? 1 : tiles_n);
  const int64_t own_m = take_digit(&block, p.bias_M == 1 ? 1 : tiles_m);
  const int64_t own_h = take_digit(&block, p.bias_H), own_b = block;
  const int64_t shared_b = p.bias_B == 1 ? p.B : 1, shared_h = p.bias_H == 1 ? p.H : 1;
  const int64_t shared_m = p.bias_M == 1 ? tiles_m : 1, shared_n = p.bias_N == 1 ? tiles_n : 1;
  Scores sum = {};
  for (int64_t n = 0; n < shared_b * shared_h * shared_m * shared_n; ++n) {
    uint32_t number = static_cast<uint32_t>(n);
    const int64_t j0 = (own_n + take_digit(&number, shared_n)) * kTile;
    const int64_t i0 = (own_m + take_digit(&number, shared_m)) * kTile;
    const int64_t h = own_h + take_digit(&number, shared_h);
    const Place at = place(p, own_b + number, h, i0, j0);
    const TileMask mask = mask_pairs<false>(p, at);
    if (mask.empty) continue;
    __syncthreads();
    start_queries<kDim>(p.q, p.D, at, memory.q);
    start_queries<kDim>(p.grad_out, p.E, at, memory.grad_out);
    load_rows<true>(p, at, memory.rows);
    start_keys<kDim>(p.k, p.D, at, memory.k);
    start_keys<kDim>(p.v, p.E, at, memory.v);
    wait_for_copies();
    __syncthreads();
    Scores s, ds;
    load_grad_weights<false, kType>(p, at, mask.bits, ds);  // before S takes registers
    multiply_transposed<kType, kDim>(memory.grad_out, memory.v, ds);
    sdpa_scores<false, kType, kDim>(p, at, mask, scale, memory.q, memory.k, s);
    grad_pairs<false>(p, at, mask, memory.rows, scale.later, s, ds);
#pragma unroll
    for (int t = 0; t < kScoreTiles; ++t)
#pragma unroll
      for (int v = 0; v < 4; ++v) sum[t][v] += ds[t][v];
  }
  float* const tile = reinterpret_cast<float*>(&memory);
  static_assert(sizeof(memory) >= kTile * kTile * sizeof(float));
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kScoreTiles; ++t)
#pragma unroll
    for (int v = 0; v < 4; ++v) tile[sum_row(v) * kTile + sum_col(t, v)] = sum[t][v];
  fold_tile(p.bias_M == 1, p.bias_N == 1, tile);
  const int rows = p.bias_M == 1 ? 1 : extent(p.M, own_m * kTile);
  const int cols = p.bias_N == 1 ? 1 : extent(p.N, own_n * kTile);
  const int64_t offset = offset_of(p.grad_bias, own_b, own_h, own_m * kTile, own_n * kTile);
  with_dtype(p.grad_bias.dtype, [&](auto type) {
    for (int n = thread(); n < rows * kTile; n += kThreads)
      if (n % kTile < cols)
        store_as<type>(p.grad_bias.data,
                       offset + n / kTile * p.grad_bias.stride_r + n % kTile * p.grad_bias.stride_c,
                       tile[n]);
  });
}

// ---- launch ----

template <DType kType, int kDim>
void launch(const BackwardParams& p, Launcher& launcher) {
  const size_t shared = sizeof(GradMemory<kDim>);
  const int64_t tiles_m = ceil_div(p.M, kTile), tiles_n = ceil_div(p.N, kTile);
  const int64_t queries = p.B * p.H * tiles_m, keys = p.B * p.Hkv * tiles_n;
  launcher.run(sdpa_delta_kernel<kType, kDim>, queries, kThreads, shared, p);
  launcher.run(sdpa_dq_kernel<kType, kDim>, queries, kThreads, shared, p);
  launcher.run(sdpa_dkdv_kernel<true, kType, kDim>, keys, kThreads, shared, p);
  launcher.run(sdpa_dkdv_kernel<false, kType, kDim>, keys, kThreads, shared, p);
  if (p.grad_bias.data == nullptr) return;
  const int64_t tiles = (p.bias_M == 1 ? 1 : tiles_m) * (p.bias_N == 1 ? 1 : tiles_n);
  launcher.run(sdpa_dbias_kernel<kType, kDim>, p.bias_B * p.bias_H * tiles, kThreads, shared, p);
}

}  // namespace

int64_t sdpa_backward_workspace_bytes(const BackwardParams& p) { return 4 * p.B * p.H * p.M; }

const char* sdpa_backward(const BackwardParams& p, void* stream) {
  Launcher launcher(stream);
  const bool narrow = max64(p.D, p.E) <= 64;
  if (p.q.dtype == DType::kFloat16) {
    narrow ? launch<DType::kFloat16, 64>(p, launcher) : launch<DType::kFloat16, 128>(p, launcher);
  } else {
    narrow ? launch<DType::kBFloat16, 64>(p, launcher) : launch<DType::kBFloat16, 128>(p, launcher);
  }
  return launcher.error();
}

}  // namespace fastattn::cuda
