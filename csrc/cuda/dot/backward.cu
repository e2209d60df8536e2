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
//           that share it pass by, on transposed tiles; with a curve a block has dk or dv
//   dbias:  for (tile of the bias, slice of what shares it): dS, added up in order; of a line: for
//           (diagonal of tiles), see line.cuh
//   dsink:  for (b, h): delta of all rows, see tile/sink.cu
//
// Every result has one owner: there are no atomics, and every run gives the same results. Dao,
// "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023.
#include "cuda/base/launcher.cuh"
#include "cuda/dot/backward_wgmma.h"
#include "cuda/dot/passes.h"
#include "cuda/dot/turns.cuh"
#include "cuda/tile/bias_parts.cuh"
#include "cuda/tile/line.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/tile/spans.cuh"

namespace fastattn::cuda {
namespace {

// ---- delta ----

// The sums of dO . O of this lane's two rows, over its eight neighbours of every 32 columns. Chunks
// are all asked for before one is used.
template <DType kType, int kDim>
FASTATTN_DEVICE void sum_products(const BackwardParams& p, const Place& at, float (&sum)[2]) {
  constexpr int kStep = kQuad * kChunk, kSteps = kDim / kStep, kColumns = kDim / kQuad;
  const int first = lane() % kQuad * kChunk;
  const int64_t out = offset_of(p.out, at.b, at.h, at.i0 + sum_row(0), 0);
  const int64_t grad = offset_of(p.grad_out, at.b, at.h, at.i0 + sum_row(0), 0);
  sum[0] = sum[1] = 0.f;
  if (lies_in_chunks(p.out, out, p.E) && lies_in_chunks(p.grad_out, grad, p.E)) {
    Chunk x[2][kSteps] = {}, y[2][kSteps] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t cols = sum_row(2 * half) < at.rows ? p.E : 0;
#pragma unroll
      for (int n = 0; n < kSteps; ++n)
        if (const int e = first + n * kStep; e < cols) {
          x[half][n] = chunk_at(p.out, out + 8 * half * p.out.stride_r + e);
          y[half][n] = chunk_at(p.grad_out, grad + 8 * half * p.grad_out.stride_r + e);
        }
    }
#pragma unroll
    for (int n = 0; n < 2 * kColumns; ++n) {
      const int half = n / kColumns, step = n % kColumns / kChunk;
      sum[half] += from_chunk<kType>(p.out, x[half][step], n % kChunk) *
                   from_chunk<kType>(p.grad_out, y[half][step], n % kChunk);
    }
    return;
  }
#pragma unroll 1
  for (int n = 0; n < 2 * kColumns; ++n) {
    const int half = n / kColumns, e = first + n % kColumns / kChunk * kStep + n % kChunk;
    if (sum_row(2 * half) >= at.rows || e >= p.E) continue;
    const int64_t i = out + 8 * half * p.out.stride_r + e * p.out.stride_c;
    const int64_t j = grad + 8 * half * p.grad_out.stride_r + e * p.grad_out.stride_c;
    const float product = load_half<kType>(p.out, i) * load_half<kType>(p.grad_out, j);
    sum[0] += half == 0 ? product : 0.f, sum[1] += half == 0 ? 0.f : product;
  }
}

template <DType kType, int kDim, bool kCurved>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_delta_kernel(const __grid_constant__ BackwardParams p) {
  GradMemory<kDim>& memory = *static_cast<GradMemory<kDim>*>(shared_memory());
  Place at = query_place(p, ceil_div(p.M, kTile), blockIdx.x);
  float sum[2];  // this lane's share of rows g and g + 8
  sum_products<kType, kDim>(p, at, sum);
  if (p.grad_weights.data != nullptr) {
    const float unit = unit_of(p);
    const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
    start_queries<kDim>(p.q, p.D, at, memory.q);
    start_rows<false>(p, at, memory.rows);
    for (at.j0 = keys.begin / kTile * kTile; at.j0 < keys.end; at.j0 += kTile) {
      at.cols = extent(p.N, at.j0);
      const TileMask mask = mask_tile<QueryRows>(p, at);
      if (mask.empty) continue;
      __syncthreads();
      start_keys<kDim>(p.k, p.D, at, memory.k);
      wait_for_copies();
      __syncthreads();
      Pairs<QueryRows> s;
      sdpa_logits<QueryRows, kType, kDim, kCurved>(p, at, mask, memory.q, memory.k, s);
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

template <int kDim>
FASTATTN_DEVICE uint32_t& marks_left() {
  return static_cast<PassingMemory<kDim>*>(shared_memory())->left;
}

template <DType kType, int kDim, bool kCurved>
FASTATTN_DEVICE void sdpa_dq_tile(const BackwardParams& p, const TileSpan* table, uint32_t tile) {
  Turns<kDim> turns{*static_cast<PassingMemory<kDim>*>(shared_memory())};
  GradMemory<kDim>& memory = turns.memory.tile;
  const float unit = unit_of(p);
  const Place own = query_place(p, ceil_div(p.M, kTile), tile);
  const KeyRange keys = visited_keys(p, own, table);
  turns.begin(own);
  start_queries<kDim>(p.q, p.D, own, memory.q);
  start_queries<kDim>(p.grad_out, p.E, own, memory.grad_out);
  start_rows<true>(p, own, memory.rows);
  __syncthreads();
  float dq[kDim / 8][4] = {};
#pragma unroll 1
  for (int64_t j0 = keys.begin / kTile * kTile;; j0 += kTile) {
    Place at = turns.here().at;
    TileMask mask = {0, true, false};
    if (j0 < keys.end) {
      at.j0 = j0, at.cols = extent(p.N, j0);
      mask = mask_tile<QueryRows>(p, at, table);
      if (mask.empty) continue;
    }
    turns.wait();
    if (!mask.empty) start_keys<kDim>(p.k, p.D, at, turns.next_place(memory.k));
    turns.set_next(at, mask);
    Pairs<QueryRows> s, ds;
    uint16_t* const k = turns.place(memory.k);
    if (!turns.here().none)
      gradient_tile<QueryRows, kType, kDim, kCurved>(p, turns.here().at, turns.mask(), unit, memory,
                                                     memory.q, k, s, ds);
    __syncthreads();  // others may still read V, and the bad rows of K
    if (!turns.next().none) start_keys<kDim>(p.v, p.E, turns.next().at, memory.v);
    if (!turns.here().none) {
      const Place x = turns.here().at;
      add_product<QueryRows, kType, kDim>(p.k, offset_of(p.k, x.b, x.hkv, x.j0, 0), p.D,
                                          turns.mask(), ds, k, memory.bad_rows, dq);
    }
    if (turns.next().none) break;
    turns.go_on(mask.bits);
  }
  wait_for_copies();
  const Place to = turns.here().at;
  store_sums<kType, kDim>(p.grad_q, offset_of(p.grad_q, to.b, to.h, to.i0, 0), to.rows, p.D,
                          {p.scale, p.scale}, dq);
}

template <DType kType, int kDim, bool kCurved>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_dq_kernel(const __grid_constant__ BackwardParams p, const TileSpan* table,
                   const __grid_constant__ GradMarks marks) {
  for_tiles(marks.queries, query_marks(p), marks_left<kDim>(),
            [&](uint32_t tile) { sdpa_dq_tile<kType, kDim, kCurved>(p, table, tile); });
}

// ---- dk, dv ----

// The keys of a block.
FASTATTN_DEVICE Place own_keys(const AttentionParams& p, uint32_t block) {
  const int64_t tile = take_digit(&block, ceil_div(p.N, kTile)), hkv = take_digit(&block, p.Hkv);
  return key_place(p, block, hkv, tile * kTile);
}

// Moves to the n-th tile of queries that the keys at `at` visit, of all heads that share them.
FASTATTN_DEVICE bool go_to(const AttentionParams& p, const Span& visited, uint32_t n, Place& at) {
  const int first = first_row(visited), rows = rows_end(visited) - first;
  const uint32_t tiles = (rows + kTile - 1) / kTile;
  const uint32_t heads = static_cast<uint32_t>(p.H) / static_cast<uint32_t>(p.Hkv);
  if (n >= heads * tiles) return false;
  at.h = static_cast<int>(at.hkv * heads + n / tiles);
  at.i0 = first + static_cast<int>(n % tiles * kTile);
  at.rows = extent(p.M, at.i0);
  return true;
}

// The unit of logits is an argument, because registers are full. With a curve a block has one of
// dk and dv, as its number says: the sums of both and the slopes would spill.
template <DType kType, int kDim, bool kCurved>
FASTATTN_DEVICE void sdpa_dkdv_tile(const BackwardParams& p, const Spans& spans, float unit,
                                    uint32_t tile) {
  Turns<kDim> turns{*static_cast<PassingMemory<kDim>*>(shared_memory())};
  GradMemory<kDim>& memory = turns.memory.tile;
  {
    const Place own = own_keys(p, kCurved ? tile / 2 : tile);
    turns.begin(own);
    find_rows(p, spans, own, memory.visited);
    start_keys<kDim>(p.k, p.D, own, memory.k);
    start_keys<kDim>(p.v, p.E, own, memory.v);
  }
  const bool of_values = !kCurved || tile % 2 == 0;  // the first product
  const View& others = of_values ? p.grad_out : p.q;
  const int64_t dims = of_values ? p.E : p.D;
  float sum[kDim / 8][4] = {}, dk[kDim / 8][4] = {};
#pragma unroll 1
  for (uint32_t n = 0;; ++n) {
    Place at = turns.here().at;
    TileMask mask = {0, true, false};
    if (go_to(p, memory.visited, n, at)) {
      mask = mask_tile<KeyRows>(p, at, spans.keys);
      if (mask.empty) continue;
    }
    turns.wait();
    if (!mask.empty) start_queries<kDim>(p.q, p.D, at, turns.next_place(memory.q));
    turns.set_next(at, mask);
    Pairs<KeyRows> s, ds;
    uint16_t* const q = turns.place(memory.q);
    if (!turns.here().none)
      gradient_tile<KeyRows, kType, kDim, kCurved>(p, turns.here().at, turns.mask(), unit, memory,
                                                   q, memory.k, s, ds);
    __syncthreads();  // others may still read the stats, and the bad rows of Q and dO
    if (!turns.next().none) start_rows<true>(p, turns.next().at, memory.rows);
    if (!turns.here().none) {
#pragma unroll
      for (int i = 0; i < 4 * KeyRows::kTiles; ++i)
        s[i / 4][i % 4] = of_values ? s[i / 4][i % 4] : ds[i / 4][i % 4];
      const Place x = turns.here().at;
      add_product<KeyRows, kType, kDim>(others, offset_of(others, x.b, x.h, x.i0, 0), dims,
                                        turns.mask(), s, of_values ? memory.grad_out : q,
                                        memory.bad_rows, sum);
    }
    __syncthreads();  // others may still read dO, and bad_rows
    if (!turns.next().none) start_queries<kDim>(p.grad_out, p.E, turns.next().at, memory.grad_out);
    if (!kCurved && !turns.here().none) {
      const Place x = turns.here().at;
      add_product<KeyRows, kType, kDim>(p.q, offset_of(p.q, x.b, x.h, x.i0, 0), p.D, turns.mask(),
                                        ds, q, memory.bad_rows, dk);
    }
    if (turns.next().none) break;
    turns.go_on(mask.bits);
  }
  wait_for_copies();
  const Place to = turns.here().at;
  const View& result = of_values ? p.grad_v : p.grad_k;
  const float factor = of_values ? 1.f : p.scale;
  store_sums<kType, kDim>(result, offset_of(result, to.b, to.hkv, to.j0, 0), to.cols, dims,
                          {factor, factor}, sum);
  if constexpr (!kCurved)
    store_sums<kType, kDim>(p.grad_k, offset_of(p.grad_k, to.b, to.hkv, to.j0, 0), to.cols, p.D,
                            {p.scale, p.scale}, dk);
}

template <DType kType, int kDim, bool kCurved>
__global__ void __launch_bounds__(kThreads, 2)
    sdpa_dkdv_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ Spans spans,
                     const __grid_constant__ float unit, const __grid_constant__ GradMarks marks) {
  for_tiles(marks.keys, key_marks(p), marks_left<kDim>(),
            [&](uint32_t tile) { sdpa_dkdv_tile<kType, kDim, kCurved>(p, spans, unit, tile); });
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

template <DType kType, int kDim, bool kCurved>
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
    start_rows<true>(p, at, memory.rows);
    start_keys<kDim>(p.k, p.D, at, memory.k);
    start_keys<kDim>(p.v, p.E, at, memory.v);
    wait_for_copies();
    __syncthreads();
    Pairs<QueryRows> s, ds;
    gradient_tile<QueryRows, kType, kDim, kCurved, false>(p, at, mask, unit, memory, memory.q,
                                                          memory.k, s, ds);
    add(ds, sum);
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
  return ceil_div(bias_start(p) + bias_floats(p), 4) * 4;
}

// Behind the tables of spans.
GradMarks marks_of(const BackwardParams& p) {
  float* const queries = static_cast<float*>(p.workspace) + span_start(p) + span_floats(p);
  return {reinterpret_cast<uint32_t*>(queries),
          reinterpret_cast<uint32_t*>(queries + query_marks(p))};
}

template <DType kType, int kDim, bool kCurved>
void launch(const BackwardParams& p, Launcher& launcher) {
  const size_t shared = sizeof(GradMemory<kDim>);
  const int64_t tiles_m = ceil_div(p.M, kTile), tiles_n = ceil_div(p.N, kTile);
  const int64_t queries = p.B * p.H * tiles_m, keys = p.B * p.Hkv * tiles_n;
  const Spans spans = make_spans(p, static_cast<float*>(p.workspace) + span_start(p), launcher);
  // Without shared memory, more blocks wait for their reads at the same time.
  launcher.run(sdpa_delta_kernel<kType, kDim, kCurved>, queries, kThreads,
               {p.grad_weights.data == nullptr ? 0 : shared, shared}, p);
  launch_sink(p, 0, launcher);
  GradMarks marks{nullptr, nullptr};
  if (launch_wgmma(p, spans, marks_of(p), marks_of(p).keys + key_marks(p), launcher))
    marks = marks_of(p);
  launcher.run(sdpa_dq_kernel<kType, kDim, kCurved>, blocks_for(marks.queries, queries), kThreads,
               sizeof(PassingMemory<kDim>), p, spans.keys, marks);
  launcher.run(sdpa_dkdv_kernel<kType, kDim, kCurved>,
               blocks_for(marks.keys, kCurved ? 2 * keys : keys), kThreads,
               sizeof(PassingMemory<kDim>), p, spans, unit_of(p), marks);
  if (p.grad_bias.data == nullptr) return;
  const int64_t slices = slices_of(p);
  launcher.run(sdpa_dbias_kernel<kType, kDim, kCurved>,
               p.bias_B * p.bias_H * slices * bias_tiles(p), kThreads, shared, p, spans, slices);
  if (p.bias_is_line) return launch_line(p, bias_start(p), slices, launcher);
  launch_bias_parts(p, bias_start(p), slices, launcher);
}

}  // namespace

int64_t sdpa_backward_workspace_bytes(const BackwardParams& p) {
  const int64_t floats = span_start(p) + span_floats(p) + query_marks(p) + key_marks(p);
  return 4 * floats + wgmma_backward_bytes(p);
}

const char* sdpa_backward(const BackwardParams& p, void* stream) {
  Launcher launcher(stream);
  with_operands(p,
                [&](auto type, auto dim, auto curved) { launch<type, dim, curved>(p, launcher); });
  return launcher.error();
}

}  // namespace fastattn::cuda
