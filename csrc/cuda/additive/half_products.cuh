// The products beside the scores, on tensor cores, where operands have 16 bits:
//
//   O += P V      dV += W^T dO      dP = dO V^T
//
// Scores stay in fragments (tile.cuh), whose loop has the fewest loads. Products have the sums of
// half_tile.cuh. In both layouts a warp has the same 16 queries. Weights pass to the products
// through shared memory as 16 bits, and dP comes back as floats.
#pragma once

#include "cuda/additive/tile.cuh"
#include "cuda/tile/half_tile.cuh"

namespace fastattn::cuda {

// q, k, v and the gradient of the output have one dtype.
FASTATTN_DEVICE bool has_halves(const AttentionParams& p) { return p.q.dtype != DType::kFloat32; }

using HalfTile = uint16_t[kTile * kTile];
using Sums = Pairs<QueryRows>;
static_assert(sizeof(Sums) == sizeof(Fragment) && sizeof(HalfTile) == sizeof(float) * kStageFloats);

// The weights of a tile, [i][j].
struct HalfWeights {
  HalfTile weights;
  KeepBits kept[kThreads];  // of FragmentLayout
  uint32_t bad_rows[kWarps];
};

FASTATTN_DEVICE void store_weights(DType dtype, const Fragment& s, KeepBits bits, HalfWeights& to) {
  const int own = opaque_here(row0()), col = opaque_here(col0());
  with_half<kAnyHalf>(dtype, [&](auto type) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint64_t low = pack_pair<type>(s[r][0], s[r][1]);
      const uint64_t high = pack_pair<type>(s[r][2], s[r][3]);
      uint16_t* const row = to.weights + chunk_index<kTile>(own + r, col / kChunk);
      *reinterpret_cast<uint64_t*>(row + col % kChunk) = high << 32 | low;
    }
  });
  to.kept[thread()] = bits;
}

// sum += W B, or W^T B if kTransposed. B is rows < rows and columns < cols of an array from element
// `offset` on, and passes through `tile`. Unless `full`, a pair that is not kept adds nothing,
// whatever B holds. Begins with a barrier.
template <bool kTransposed>
FASTATTN_DEVICE void add_weighted(const View& x, int64_t offset, int rows, int cols, bool full,
                                  HalfWeights& from, HalfTile& tile, Sums& sum) {
  __syncthreads();
  start_tile<kTile>(x, offset, rows, cols, tile);
  wait_for_copies();
  __syncthreads();
  const bool bad = !full && take_out_bad_rows<kAnyHalf, kTile>(x.dtype, tile, from.bad_rows);
  with_half<kAnyHalf>(
      x.dtype, [&](auto type) { multiply<kTransposed, type, kTile>(from.weights, tile, sum); });
  if (!bad) return;
  for (int row = 0; row < rows; ++row) {
    if (!is_bad_row(from.bad_rows, row)) continue;
    float factor[2];
    int keeps_it[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = opaque_here(sum_row(2 * half)), i = kTransposed ? row : own,
                j = kTransposed ? own : row;
      const KeepBits bits = from.kept[i / kRows * kRowLanes + j / kCols];
      const uint16_t weight = from.weights[chunk_index<kTile>(i, j / kChunk) + j % kChunk];
      with_half<kAnyHalf>(x.dtype, [&](auto type) { factor[half] = load_as<type>(&weight, 0); });
      keeps_it[half] = kept(bits, i % kRows, j % kCols);
    }
    add_bad_row<kAnyHalf, kTile>(x, offset + row * x.stride_r, cols, factor, keeps_it, sum);
  }
}

// Passes sums to the fragments of the same warp, through a tile of floats.
FASTATTN_DEVICE void sums_to_fragment(const Sums& sum, float* tile, Fragment& to) {
  int row = opaque_here(sum_row(0)), col = opaque_here(sum_col(0, 0));
#pragma unroll
  for (int n = 0; n < QueryRows::kTiles; ++n)
#pragma unroll
    for (int v = 0; v < 4; v += 2)
      *reinterpret_cast<float2*>(tile + chunk_index<kTile>(row + v / 2 * 8, n) + col) =
          make_float2(sum[n][v], sum[n][v + 1]);
  __syncwarp();
  row = opaque_here(row0()), col = opaque_here(col0());
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float* const from = tile + chunk_index<kTile>(row + r, col / kChunk) + col % kChunk;
    unpack4(*reinterpret_cast<const float4*>(from), to[r]);
  }
}

// product = dO V^T. The stage becomes dO and V, and then the product.
FASTATTN_DEVICE void half_value_products(const BackwardParams& p, const Place& at,
                                         StageMemory& memory, Fragment& product) {
  uint16_t* const grads = reinterpret_cast<uint16_t*>(memory.queries);
  uint16_t* const values = reinterpret_cast<uint16_t*>(memory.keys);
  Sums sum = {};
  for (int64_t e0 = 0; e0 < p.E; e0 += kTile) {
    const int cols = extent(p.E, e0);
    __syncthreads();
    start_tile<kTile>(p.grad_out, offset_of(p.grad_out, at.b, at.h, at.i0, e0), at.rows, cols,
                      grads);
    start_tile<kTile>(p.v, offset_of(p.v, at.b, at.hkv, at.j0, e0), at.cols, cols, values);
    wait_for_copies();
    __syncthreads();
    with_half<kAnyHalf>(p.v.dtype, [&](auto type) {
      multiply_transposed<QueryRows, type, kTile>(grads, values, sum);
    });
  }
  __syncthreads();
  sums_to_fragment(sum, memory.queries, product);
}

}  // namespace fastattn::cuda
