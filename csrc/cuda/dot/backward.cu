// Scaled dot-product attention, backward, on tensor cores, from the saved stats. No M x N matrix is
// stored. P_ij = e^(s_ij - m_i) / l_i is recomputed, R is the factor of dropout, and W = R P:
//
//   dP = R (dO V^T + dW)     dS = P (dP - delta)     delta_i = sum_j P_ij dP_ij - dlse_i
//   dV = W^T dO     dK = scale dS^T Q     dQ = scale dS K     dbias = dS, summed where it
//   broadcasts
//
//   delta:  for (b, h, tile of queries):     dO . O, and W . dW over the keys if there is dW
//   dq:     for (b, h, tile of queries):     Q, dO stay; K, V pass by       3 products a tile
//   dk, dv: for (b, key head, tile of keys): K, V stay; Q, dO of the heads  4 products
//           that share it pass by, on transposed tiles; under a softcap a block has dk or dv
//   dbias:  for (tile of the bias, slice of what shares it): dS, added up in order; of a line: for
//           (diagonal of tiles), see line.cuh
//
// Every result has one owner: there are no atomics, and every run gives the same results. Dao,
// "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023.
#include "cuda/base/launcher.cuh"
#include "cuda/dot/backward.cuh"
#include "cuda/dot/backward_wgmma.h"
#include "cuda/dot/passes.h"
#include "cuda/tile/bias_parts.cuh"
#include "cuda/tile/line.cuh"
#include "cuda/tile/spans.cuh"

namespace fastattn::cuda {
namespace {

// ---- delta ----

template <DType kType, int kDim, bool kCapped>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_delta_kernel(const __grid_constant__ BackwardParams p) {
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  Place at = query_place(p, blockIdx.x);
  float sum[2] = {0.f, 0.f};  // this lane's share of rows g and g + 8
  for (int half = 0; half < 2; ++half) {
    const int row = sum_row(2 * half);
    if (row >= at.rows) continue;
    const int64_t out = offset_of(p.out, at.b, at.h, at.i0 + row, 0);
    const int64_t grad = offset_of(p.grad_out, at.b, at.h, at.i0 + row, 0);
    for (int64_t e = lane() % kQuad; e < p.E; e += kQuad)
      sum[half] += load_half<kType>(p.out, out + e * p.out.stride_c) *
                   load_half<kType>(p.grad_out, grad + e * p.grad_out.stride_c);
  }
  if (p.grad_weights.data != nullptr) {
    const float unit = unit_of(p);
    const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
    start_queries<kDim>(p.q, p.D, at, memory.q);
    load_rows<false>(p, at, memory.rows);
    for (at.j0 = keys.begin / kTile * kTile; at.j0 < keys.end; at.j0 += kTile) {
      at.cols = extent(p.N, at.j0);
      const TileMask mask = mask_tile<QueryRows>(p, at);
      if (mask.empty) continue;
      __syncthreads();
      start_keys<kDim>(p.k, p.D, at, memory.k);
      wait_for_copies();
      __syncthreads();
      Pairs<QueryRows> s;
      sdpa_logits<QueryRows, kType, kDim, kCapped>(p, at, mask, memory.q, memory.k, s, look_away);
      known_pairs<QueryRows>(memory.rows, unit, mask.bits, s);
      drop(p, surviving_bits<QueryRows>(p, at), s);
      with_half<kType>(p.grad_weights.dtype, [&](auto type) {
        for_grad_weights<QueryRows, type>(p, at, mask.bits, [&](int pair, float grad) {
          sum[pair % 4 / 2] += s[pair / 4][pair % 4] * grad;
        });
      });
    }
    wait_for_copies();
  }
  for (int half = 0; half < 2; ++half) {
    const int row = sum_row(2 * half);
    const float total = lanes_sum(sum[half], kQuad);
    if (row >= at.rows || lane() % kQuad != 0) continue;
    const int64_t number = query_number(p, at, row);
    static_cast<float*>(p.workspace)[number] =
        total - (p.grad_lse == nullptr ? 0.f : p.grad_lse[number]);
  }
}

// ---- dq ----

// A second place for K. V is free once dP is made, and so the next V comes to its place.
template <int kDim>
struct __align__(16) QueryMemory {
  GradMemory<kDim> tile;
  uint16_t other_k[kTile * kDim];
};

// The next K and V are copied while this tile is multiplied. A softcap leaves too few registers to
// know the next tile so early.
template <DType kType, int kDim, bool kCapped>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_dq_kernel(const __grid_constant__ BackwardParams p,
                   const __grid_constant__ GradMarks marks) {
  if (marks.queries != nullptr && marks.queries[blockIdx.x] == 0) return;
  QueryMemory<kDim>& both = *static_cast<QueryMemory<kDim>*>(shared_memory());
  GradMemory<kDim>& memory = both.tile;
  const float unit = unit_of(p);
  Place at = query_place(p, blockIdx.x);
  const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  float dq[kDim / 8][4] = {};
  at.j0 = keys.begin / kTile * kTile;
  TileMask mask{};
  bool more = next_tile<QueryRows>(p, keys.end, at, mask);
  if (more) {
    start_queries<kDim>(p.q, p.D, at, memory.q);
    start_queries<kDim>(p.grad_out, p.E, at, memory.grad_out);
    load_rows<true>(p, at, memory.rows);
    start_keys<kDim>(p.k, p.D, at, memory.k);
    start_keys<kDim>(p.v, p.E, at, memory.v);
  }
  for (bool odd = false; more; odd = !kCapped && !odd) {
    const Place here = at;
    const TileMask mask_here = mask;
    uint16_t* const k = odd ? both.other_k : memory.k;
    wait_for_copies();
    __syncthreads();
    const auto find_next = [&] {
      at.j0 += kTile;
      more = next_tile<QueryRows>(p, keys.end, at, mask);
    };
    if constexpr (!kCapped) {
      find_next();
      if (more) start_keys<kDim>(p.k, p.D, at, odd ? memory.k : both.other_k);
    }
    Pairs<QueryRows> s, ds;
    gradient_tile<QueryRows, kType, kDim, kCapped>(p, here, mask_here, unit, memory, k, s, ds);
    __syncthreads();  // others may still read V, and the bad rows of K
    if (!kCapped && more) start_keys<kDim>(p.v, p.E, at, memory.v);
    add_product<QueryRows, kType, kDim>(p.k, offset_of(p.k, here.b, here.hkv, here.j0, 0), p.D,
                                        mask_here, ds, k, memory.bad_rows, dq);
    if constexpr (kCapped) {
      find_next();
      __syncthreads();
      if (more) {
        start_keys<kDim>(p.k, p.D, at, memory.k);
        start_keys<kDim>(p.v, p.E, at, memory.v);
      }
    }
  }
  wait_for_copies();
  store_sums<kType, kDim>(p.grad_q, offset_of(p.grad_q, at.b, at.h, at.i0, 0), at.rows, p.D,
                          p.scale, dq);
}

// ---- dk, dv ----

// The keys of a block, and the first of the heads that share them.
FASTATTN_DEVICE Place key_place(const AttentionParams& p, uint32_t block) {
  const int64_t tile = take_digit(&block, ceil_div(p.N, kTile)), hkv = take_digit(&block, p.Hkv);
  return place(p, block, hkv * (static_cast<int>(p.H) / static_cast<int>(p.Hkv)), 0, tile * kTile);
}

// Registers are full of sums, so the unit of logits is an argument. `opaque` hides values that can
// be recomputed, so that the compiler does not keep them.
template <DType kType, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_dkdv_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ Spans spans,
                     const __grid_constant__ float unit, const __grid_constant__ GradMarks marks) {
  if (marks.keys != nullptr && marks.keys[blockIdx.x] == 0) return;
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  Place at = key_place(p, blockIdx.x);
  find_rows(p, spans, at, memory.visited);
  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  start_keys<kDim>(p.k, p.D, at, memory.k);
  start_keys<kDim>(p.v, p.E, at, memory.v);
  at.j0 = opaque(at.j0);
  const auto first = [&] {
    return key_place(p, static_cast<uint32_t>(opaque_here(static_cast<int>(blockIdx.x))));
  };
  for (; at.h < first().h + static_cast<int>(p.H) / static_cast<int>(p.Hkv); ++at.h)
    for (at.i0 = first_row(memory.visited); at.i0 < rows_end(memory.visited); at.i0 += kTile) {
      at.rows = extent(p.M, at.i0);
      const TileMask mask = mask_tile<KeyRows>(p, at, spans.keys);
      if (mask.empty) continue;
      __syncthreads();
      start_queries<kDim>(p.q, p.D, at, memory.q);
      start_queries<kDim>(p.grad_out, p.E, at, memory.grad_out);
      load_rows<true>(p, at, memory.rows);
      wait_for_copies();
      __syncthreads();
      Pairs<KeyRows> s, ds;
      gradient_tile<KeyRows, kType, kDim, false>(p, at, mask, unit, memory, memory.k, s, ds);
      __syncthreads();  // others may still read the bad rows of Q and dO
      const int64_t i0 = opaque(at.i0);
      const int b = opaque_here(at.b), h = opaque_here(at.h);
      add_product<KeyRows, kType, kDim>(p.grad_out, offset_of(p.grad_out, b, h, i0, 0), p.E, mask,
                                        s, memory.grad_out, memory.bad_rows, dv);
      __syncthreads();  // others may also still read bad_rows
      add_product<KeyRows, kType, kDim>(p.q, offset_of(p.q, b, h, i0, 0), p.D, mask, ds, memory.q,
                                        memory.bad_rows, dk);
    }
  wait_for_copies();
  at = first();
  store_sums<kType, kDim>(p.grad_v, offset_of(p.grad_v, at.b, at.hkv, at.j0, 0), at.cols, p.E, 1.f,
                          dv);
  store_sums<kType, kDim>(p.grad_k, offset_of(p.grad_k, at.b, at.hkv, at.j0, 0), at.cols, p.D,
                          p.scale, dk);
}

// One of dk and dv, as the block's number says. The sums of both and a softcap's slopes together
// would spill.
template <DType kType, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_capped_keys_kernel(const __grid_constant__ BackwardParams p,
                            const __grid_constant__ Spans spans) {
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  const bool of_values = blockIdx.x % 2 == 0;
  const View& others = of_values ? p.grad_out : p.q;
  uint16_t* const tile = of_values ? memory.grad_out : memory.q;
  const int64_t dims = of_values ? p.E : p.D;
  const float unit = unit_of(p);
  const Place first = key_place(p, blockIdx.x / 2);
  find_rows(p, spans, first, memory.visited);
  float sum[kDim / 8][4] = {};
  start_keys<kDim>(p.k, p.D, first, memory.k);
  start_keys<kDim>(p.v, p.E, first, memory.v);
  const int end = first.h + static_cast<int>(p.H) / static_cast<int>(p.Hkv);
  for (Place at = first; at.h < end; ++at.h)
    for (at.i0 = first_row(memory.visited); at.i0 < rows_end(memory.visited); at.i0 += kTile) {
      at.rows = extent(p.M, at.i0);
      const TileMask mask = mask_tile<KeyRows>(p, at, spans.keys);
      if (mask.empty) continue;
      __syncthreads();
      start_queries<kDim>(p.q, p.D, at, memory.q);
      start_queries<kDim>(p.grad_out, p.E, at, memory.grad_out);
      load_rows<true>(p, at, memory.rows);
      wait_for_copies();
      __syncthreads();
      Pairs<KeyRows> s, ds;
      gradient_tile<KeyRows, kType, kDim, true>(p, at, mask, unit, memory, memory.k, s, ds);
#pragma unroll
      for (int n = 0; n < 4 * KeyRows::kTiles; ++n)
        s[n / 4][n % 4] = of_values ? s[n / 4][n % 4] : ds[n / 4][n % 4];
      __syncthreads();  // others may still read the bad rows of Q and dO
      add_product<KeyRows, kType, kDim>(others, offset_of(others, at.b, at.h, at.i0, 0), dims, mask,
                                        s, tile, memory.bad_rows, sum);
    }
  wait_for_copies();
  const View& to = of_values ? p.grad_v : p.grad_k;
  store_sums<kType, kDim>(to, offset_of(to, first.b, first.hkv, first.j0, 0), first.cols, dims,
                          of_values ? 1.f : p.scale, sum);
}

// ---- dbias ----

// Where the parts of blocks begin in the workspace: behind delta.
FASTATTN_FN int64_t bias_start(const BackwardParams& p) { return p.B * p.H * p.M; }

// Adds up the rows (columns) of a tile, in order, if the bias has one row (column).
FASTATTN_DEVICE void fold_tile(bool one_row, bool one_col, float* tile) {
  __syncthreads();
  if (one_row && thread() < kTile)
    for (int r = 1; r < kTile; ++r) tile[thread()] += tile[r * kTile + thread()];
  __syncthreads();
  if (one_col && thread() < (one_row ? 1 : kTile))
    for (int c = 1; c < kTile; ++c) tile[thread() * kTile] += tile[thread() * kTile + c];
  __syncthreads();
}

// Tiles of the bias, or diagonals of tiles of a line, of each of its batches and heads.
FASTATTN_FN int64_t bias_tiles(const BackwardParams& p) {
  if (p.bias_is_line) return line_blocks(p);
  return (p.bias_M == 1 ? 1 : ceil_div(p.M, kTile)) * (p.bias_N == 1 ? 1 : ceil_div(p.N, kTile));
}
// Slices of the tiles of dS that share one of these.
FASTATTN_FN int64_t slices_of(const BackwardParams& p) {
  const int64_t tiles_m = ceil_div(p.M, kTile), tiles_n = ceil_div(p.N, kTile);
  const int64_t tiles = p.bias_is_line
                            ? min64(tiles_m, tiles_n)
                            : (p.bias_M == 1 ? tiles_m : 1) * (p.bias_N == 1 ? tiles_n : 1);
  return bias_slices(p.bias_B * p.bias_H * bias_tiles(p), bias_sharers(p) * tiles);
}

// The tiles of dS of a block, `b` and `h` samples and heads, `m` and `n` tiles of queries and keys
// from these on. Of a line they are those of a diagonal. A block adds up a slice of them.
struct BiasTiles {
  int64_t b, h, m, n;
  int64_t count_b, count_h, count_m, count_n;
  int64_t slice, begin, end;
};

FASTATTN_DEVICE BiasTiles bias_tiles_of(const BackwardParams& p, uint32_t block, int64_t slices) {
  const int64_t tiles_m = ceil_div(p.M, kTile), tiles_n = ceil_div(p.N, kTile);
  BiasTiles own{};
  if (p.bias_is_line) {
    const TileDiagonal diagonal = tile_diagonal(p, take_digit(&block, line_blocks(p)));
    own.m = diagonal.m, own.n = diagonal.n, own.count_m = diagonal.count, own.count_n = 1;
  } else {
    own.n = take_digit(&block, p.bias_N == 1 ? 1 : tiles_n);
    own.m = take_digit(&block, p.bias_M == 1 ? 1 : tiles_m);
    own.count_m = p.bias_M == 1 ? tiles_m : 1, own.count_n = p.bias_N == 1 ? tiles_n : 1;
  }
  own.slice = take_digit(&block, slices);
  own.h = take_digit(&block, p.bias_H), own.b = block;
  own.count_b = p.bias_B == 1 ? p.B : 1, own.count_h = p.bias_H == 1 ? p.H : 1;
  const int64_t count = own.count_b * own.count_h * own.count_m * own.count_n;
  own.begin = own.slice * count / slices, own.end = (own.slice + 1) * count / slices;
  return own;
}

template <DType kType, int kDim, bool kCapped>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_dbias_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ Spans spans,
                      const __grid_constant__ int64_t slices) {
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  const float unit = unit_of(p);
  const BiasTiles own = bias_tiles_of(p, blockIdx.x, slices);
  Pairs<QueryRows> sum = {};
  for (int64_t n = own.begin; n < own.end; ++n) {
    uint32_t number = static_cast<uint32_t>(n);
    const int64_t tile_n = own.n + take_digit(&number, own.count_n);
    const int64_t step = take_digit(&number, own.count_m);
    const int64_t h = own.h + take_digit(&number, own.count_h);
    const int64_t j0 = (tile_n + (p.bias_is_line ? step : 0)) * kTile, i0 = (own.m + step) * kTile;
    const Place at = place(p, own.b + number, h, i0, j0);
    const TileMask mask = mask_tile<QueryRows>(p, at, spans.keys);
    if (mask.empty) continue;
    __syncthreads();
    start_queries<kDim>(p.q, p.D, at, memory.q);
    start_queries<kDim>(p.grad_out, p.E, at, memory.grad_out);
    load_rows<true>(p, at, memory.rows);
    start_keys<kDim>(p.k, p.D, at, memory.k);
    start_keys<kDim>(p.v, p.E, at, memory.v);
    wait_for_copies();
    __syncthreads();
    Pairs<QueryRows> s, ds;
    gradient_tile<QueryRows, kType, kDim, kCapped, false>(p, at, mask, unit, memory, memory.k, s,
                                                          ds);
#pragma unroll
    for (int t = 0; t < QueryRows::kTiles; ++t)
#pragma unroll
      for (int v = 0; v < 4; ++v) sum[t][v] += ds[t][v];
  }
  float* const tile = reinterpret_cast<float*>(&memory);
  static_assert(sizeof(memory) >= kTile * kTile * sizeof(float));
  __syncthreads();
#pragma unroll
  for (int t = 0; t < QueryRows::kTiles; ++t)
#pragma unroll
    for (int v = 0; v < 4; ++v) tile[sum_row(v) * kTile + sum_col(t, v)] = sum[t][v];
  if (p.bias_is_line) {
    __syncthreads();
    float* const parts = static_cast<float*>(p.workspace) + bias_start(p);
    store_diagonals([&](int r, int c) { return tile[r * kTile + c]; },
                    parts + int64_t{blockIdx.x} * kLinePart);
    return;
  }
  fold_tile(p.bias_M == 1, p.bias_N == 1, tile);
  const int rows = p.bias_M == 1 ? 1 : extent(p.M, own.m * kTile);
  const int cols = p.bias_N == 1 ? 1 : extent(p.N, own.n * kTile);
  const View to = bias_part(p, bias_start(p), slices, own.b, own.h, own.slice);
  const int64_t offset = offset_of(to, 0, 0, own.m * kTile, own.n * kTile);
  with_dtype(to.dtype, [&](auto type) {
    for (int n = thread(); n < rows * kTile; n += kThreads)
      if (n % kTile < cols)
        store_as<type>(to.data, offset + n / kTile * to.stride_r + n % kTile * to.stride_c,
                       tile[n]);
  });
}

// ---- launch ----

int64_t bias_floats(const BackwardParams& p) {
  if (p.grad_bias.data == nullptr) return 0;
  return p.bias_is_line ? line_floats(p, slices_of(p)) : bias_part_floats(p, slices_of(p));
}

// Behind the parts of a bias.
int64_t span_start(const BackwardParams& p) {
  return ceil_div(bias_start(p) + bias_floats(p), 2) * 2;
}

// Behind the tables of spans.
GradMarks marks_of(const BackwardParams& p) {
  float* const queries = static_cast<float*>(p.workspace) + span_start(p) + span_floats(p);
  return {reinterpret_cast<uint32_t*>(queries),
          reinterpret_cast<uint32_t*>(queries + query_marks(p))};
}

template <DType kType, int kDim, bool kCapped>
void launch(const BackwardParams& p, Launcher& launcher) {
  const size_t shared = sizeof(GradMemory<kDim>);
  const int64_t tiles_m = ceil_div(p.M, kTile), tiles_n = ceil_div(p.N, kTile);
  const int64_t queries = p.B * p.H * tiles_m, keys = p.B * p.Hkv * tiles_n;
  const Spans spans = make_spans(p, span_start(p), launcher);
  launcher.run(sdpa_delta_kernel<kType, kDim, kCapped>, queries, kThreads, shared, p);
  GradMarks marks{nullptr, nullptr};
  if (!kCapped && takes_wgmma(p) && launch_wgmma(p, spans, marks_of(p), launcher))
    marks = marks_of(p);
  launcher.run(sdpa_dq_kernel<kType, kDim, kCapped>, queries, kThreads, sizeof(QueryMemory<kDim>),
               p, marks);
  if constexpr (kCapped) {
    launcher.run(sdpa_capped_keys_kernel<kType, kDim>, 2 * keys, kThreads, shared, p, spans);
  } else {
    launcher.run(sdpa_dkdv_kernel<kType, kDim>, keys, kThreads, shared, p, spans, unit_of(p),
                 marks);
  }
  if (p.grad_bias.data == nullptr) return;
  const int64_t slices = slices_of(p);
  launcher.run(sdpa_dbias_kernel<kType, kDim, kCapped>,
               p.bias_B * p.bias_H * slices * bias_tiles(p), kThreads, shared, p, spans, slices);
  if (p.bias_is_line) return launch_line(p, bias_start(p), slices, launcher);
  launch_bias_parts(p, bias_start(p), slices, launcher);
}

}  // namespace

int64_t sdpa_backward_workspace_bytes(const BackwardParams& p) {
  return 4 * (span_start(p) + span_floats(p) + query_marks(p) + key_marks(p));
}

const char* sdpa_backward(const BackwardParams& p, void* stream) {
  Launcher launcher(stream);
  with_operands(p,
                [&](auto type, auto dim, auto capped) { launch<type, dim, capped>(p, launcher); });
  return launcher.error();
}

}  // namespace fastattn::cuda
