// Steps that the passes of scaled dot-product attention share: loading operands into shared memory,
// a tile of masked scores, and products that keep NaN behind the mask.
#pragma once

#include <type_traits>

#include "cuda/tile/curve.cuh"
#include "cuda/tile/half_tile.cuh"
#include "cuda/tile/softmax.cuh"

namespace fastattn::cuda {

// The largest head that with_operands() knows.
constexpr int kMostColumns = 128;

// Calls f(dtype, size, curved) with the operands' dtype, the columns of a tile and whether there is
// a curve as compile-time constants. All kernels with a curve have wide tiles of any dtype: they
// would double the library otherwise.
template <typename F>
void with_operands(const AttentionParams& p, F f) {
  constexpr std::integral_constant<int, kMostColumns> kWide{};
  const auto with_size = [&](auto type) {
    if (max64(p.D, p.E) > 64) return f(type, kWide, std::false_type{});
    f(type, std::integral_constant<int, 64>{}, std::false_type{});
  };
  if (is_curved(p)) return f(TypeTag<kAnyHalf>{}, kWide, std::true_type{});
  if (p.q.dtype == DType::kFloat16) return with_size(TypeTag<DType::kFloat16>{});
  with_size(TypeTag<DType::kBFloat16>{});
}

// ---- which tiles ----

// What wgmma's kernels marked is computed again: a word a tile. Marks are rare, so a block looks
// for them among neighbours.
constexpr int kNeighbours = 8;
inline int64_t blocks_for(const uint32_t* marks, int64_t tiles) {
  return marks == nullptr ? tiles : ceil_div(tiles, kNeighbours);
}

// Calls f(tile) for the tile of a block, or, given marks of all tiles, for those marked among its
// neighbours. Which are left is in shared memory: registers are full.
template <typename F>
__device__ __forceinline__ void for_tiles(const uint32_t* marks, int64_t tiles, uint32_t& left,
                                          F f) {
  const int64_t first = int64_t{blockIdx.x} * kNeighbours;
  if (marks != nullptr) {
    if (warp() == 0) {
      const bool inside = lane() < kNeighbours && first + lane() < tiles;
      const uint32_t marked = __ballot_sync(kAllLanes, inside && marks[first + lane()] != 0);
      if (lane() == 0) left = marked;
    }
    __syncthreads();
    if (left == 0) return;
  }
  for (;;) {
    f(marks == nullptr ? blockIdx.x : static_cast<uint32_t>(first) + __ffs(left) - 1);
    if (marks == nullptr) return;
    __syncthreads();
    if (thread() == 0) left &= left - 1;
    __syncthreads();
    if (left == 0) return;
  }
}

// ---- operands ----

// Starts rows [first, first + rows) of a head, with start_tile().
template <int kDim>
FASTATTN_DEVICE void start_rows(const View& x, int64_t b, int64_t h, int64_t first, int rows,
                                int64_t dims, uint16_t* to) {
  start_tile<kDim>(x, offset_of(x, b, h, first, 0), rows, static_cast<int>(dims), to);
}
template <int kDim>
FASTATTN_DEVICE void start_queries(const View& x, int64_t dims, const Place& at, uint16_t* to) {
  start_rows<kDim>(x, at.b, at.h, at.i0, at.rows, dims, to);
}
template <int kDim>
FASTATTN_DEVICE void start_keys(const View& x, int64_t dims, const Place& at, uint16_t* to) {
  start_rows<kDim>(x, at.b, at.hkv, at.j0, at.cols, dims, to);
}

// Moves to the first nonempty tile from at.j0 on.
template <typename Layout>
FASTATTN_DEVICE bool next_tile(const AttentionParams& p, int64_t end, Place& at, TileMask& mask) {
  for (; at.j0 < end; at.j0 += kTile) {
    at.cols = extent(p.N, at.j0);
    mask = mask_tile<Layout>(p, at);
    if (!mask.empty) return true;
  }
  return false;
}

// ---- scores ----

// Makes logits of the scores of the tile at `at`: -inf where they are masked.
template <typename Layout>
FASTATTN_DEVICE void mask_scores(const AttentionParams& p, const Place& at, KeepBits bits,
                                 Pairs<Layout>& s) {
  make_logits<Layout>(p, at, bits, s);
#pragma unroll
  for (int n = 0; n < Layout::kTiles; ++n)
#pragma unroll
    for (int v = 0; v < 4; ++v) s[n][v] = kept(bits, n, v) ? s[n][v] : -kInfinity;
}

// Logits of the tile at `at`. The layout says whether rows are queries and columns keys, or the
// reverse. With a curve calls look(pair, slope).
template <typename Layout, DType kType, int kDim, bool kCurved, typename F = decltype(look_away)>
FASTATTN_DEVICE void sdpa_logits(const AttentionParams& p, const Place& at, const TileMask& mask,
                                 const uint16_t* rows, const uint16_t* columns, Pairs<Layout>& s,
                                 F look = look_away) {
  clear(s);
  with_half<kType>(p.q.dtype,
                   [&](auto type) { multiply_transposed<Layout, type, kDim>(rows, columns, s); });
  if constexpr (kCurved) curve_scores(p, s, look);
  if (!mask.full) mask_scores<Layout>(p, at, mask.bits, s);
}

// ---- products with rows of values, queries or gradients ----

// Adds the rows that take_out_bad_rows() took out of the tile at `offset` to `sum` += factors x
// tile, only for rows of `sum` that keep them.
template <typename Layout, DType kType, int kDim>
FASTATTN_DEVICE void add_bad_rows(const View& x, int64_t offset, int64_t dims, KeepBits bits,
                                  const Pairs<Layout>& factors, const uint32_t (&bad_rows)[kWarps],
                                  float (&sum)[kDim / 8][4]) {
  for (int column = 0; column < 8 * Layout::kTiles; ++column) {
    const int row = Layout::col0() + column;  // of the tile
    if (!is_bad_row(bad_rows, row)) continue;
    float factor[2] = {0.f, 0.f};
    int keeps_it[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < Layout::kTiles; ++n)
#pragma unroll
      for (int v = 0; v < 4; ++v)
        if (8 * n + v % 2 == column / 8 * 8 + column % 2)
          factor[v / 2] = factors[n][v], keeps_it[v / 2] = kept(bits, n, v);
    const int owner = lane() / kQuad * kQuad + column % 8 / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = __shfl_sync(kAllLanes, factor[half], owner);
      keeps_it[half] = __shfl_sync(kAllLanes, keeps_it[half], owner);
    }
    add_bad_row<kType, kDim>(x, offset + row * x.stride_r, dims, factor, keeps_it, sum);
  }
}

// sum += factors x tile. The tile in shared memory comes from `offset` of x. In a full tile, every
// row takes part in every sum.
template <typename Layout, DType kType, int kDim>
FASTATTN_DEVICE void add_product(const View& x, int64_t offset, int64_t dims, const TileMask& mask,
                                 const Pairs<Layout>& factors, uint16_t* tile,
                                 uint32_t (&bad_rows)[kWarps], float (&sum)[kDim / 8][4]) {
  const bool bad = !mask.full && take_out_bad_rows<kType, kDim>(x.dtype, tile, bad_rows);
  with_half<kType>(x.dtype,
                   [&](auto type) { multiply_weights<Layout, type, kDim>(factors, tile, sum); });
  if (bad) add_bad_rows<Layout, kType, kDim>(x, offset, dims, mask.bits, factors, bad_rows, sum);
}

// Whether rows of 16-bit floats from `offset` on can be written 16 bytes at a time.
FASTATTN_DEVICE bool lies_in_chunks(const View& view, int64_t offset, int64_t cols) {
  const int64_t odd = reinterpret_cast<uintptr_t>(view.data) | 2 * (offset | view.stride_r | cols);
  return rows_are_contiguous(view) && odd % 16 == 0;
}

// Eight neighbours of a row of 16-bit floats.
struct alignas(16) Chunk {
  uint16_t bits[kChunk];
};
FASTATTN_DEVICE Chunk chunk_at(const View& view, int64_t offset) {
  return *reinterpret_cast<const Chunk*>(static_cast<const uint16_t*>(view.data) + offset);
}
template <DType kType>
FASTATTN_DEVICE float from_chunk(const View& view, const Chunk& chunk, int n) {
  float x = 0.f;
  with_half<kType>(view.dtype, [&](auto type) { x = load_as<type>(&chunk.bits[n], 0); });
  return x;
}

// The 4 x 4 words of the lanes of a quad, transposed: word n of lane t becomes word t of lane n.
FASTATTN_DEVICE void transpose_quad(uint32_t (&word)[4]) {
#pragma unroll
  for (int step = 1; step < kQuad; step *= 2)
#pragma unroll
    for (int n = 0; n < kQuad; ++n) {
      if (n & step) continue;
      const bool late = lane() & step;
      const uint32_t sent = late ? word[n] : word[n + step];
      const uint32_t got = __shfl_xor_sync(kAllLanes, sent, step);
      (late ? word[n] : word[n + step]) = got;
    }
}

// Writes rows < rows and columns < cols of the sums, times the factors of a lane's two rows, from
// element `offset` on. A lane has two neighbouring columns of each eight. A quad exchanges them, so
// that a store has 16 bytes.
template <DType kType, int kDim>
FASTATTN_DEVICE void store_sums(const View& view, int64_t offset, int rows, int64_t cols,
                                const float (&factors)[2], const float (&sum)[kDim / 8][4]) {
  const bool in_chunks = lies_in_chunks(view, offset, cols);
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    const int row = sum_row(half);
    const float factor = factors[half / 2];
    int64_t where = offset + row * view.stride_r;
    if (in_chunks) {
      const int first = opaque_here(8 * (lane() % kQuad));
#pragma unroll
      for (int n = 0; n < kDim / 8; n += kQuad) {
        uint32_t word[kQuad];
        with_half<kType>(view.dtype, [&](auto type) {
#pragma unroll
          for (int m = 0; m < kQuad; ++m)
            word[m] = pack_pair<type>(sum[n + m][half] * factor, sum[n + m][half + 1] * factor);
        });
        transpose_quad(word);
        if (row < rows && first + 8 * n < cols)
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(view.data) + where + first + 8 * n) =
              make_uint4(word[0], word[1], word[2], word[3]);
      }
      continue;
    }
    if (row >= rows) continue;
    const int col0 = opaque_here(sum_col(0, 0));
    where += col0 * view.stride_c;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n, where += 8 * view.stride_c)
#pragma unroll
      for (int v = 0; v < 2; ++v)
        if (col0 + 8 * n + v < cols)
          store_half<kType>(view, where + v * view.stride_c, sum[n][half + v] * factor);
  }
}

}  // namespace fastattn::cuda
