// Tiles of 16-bit operands in shared memory and their products on tensor cores (ptx_mma.cuh):
// kTile queries x kTile keys a block, fp32 sums in registers.
//
//   warp w, lane 4 g + t      rows 16 w + g and 16 w + g + 8 of every tile
//   sum [n][v], v < 4         row g + 8 (v / 2), column 8 n + 2 t + v % 2
#pragma once

#include "cuda/base/ptx_mma.cuh"
#include "cuda/tile/masking.cuh"

namespace fastattn::cuda {

constexpr int kWarpRows = 16;
constexpr int kQuad = 4;  // neighbouring lanes that share their rows
static_assert(kWarps * kWarpRows == kTile);

// Four warps have a tile. A block may have several.
FASTATTN_DEVICE int warp_row0() { return warp() % kWarps * kWarpRows; }
// Positions in this warp's sums.
FASTATTN_DEVICE int quad_row(int v) { return thread() % 32 / kQuad + v / 2 * 8; }
FASTATTN_DEVICE int sum_row(int v) { return warp_row0() + quad_row(v); }
FASTATTN_DEVICE int sum_col(int n, int v) { return 8 * n + 2 * (thread() % kQuad) + v % 2; }

// ---- dtypes ----

// In place of a dtype: fp16 or bf16, as the arrays say. Kernels that few calls need have both in
// one, which keeps the library small.
constexpr DType kAnyHalf = DType::kFloat32;

// Calls f with a dtype as a compile-time constant: kType, or `own` of an array.
template <DType kType, typename F>
__device__ __forceinline__ void with_half(DType own, F f) {
  if constexpr (kType != kAnyHalf) {
    f(TypeTag<kType>{});
  } else if (own == DType::kFloat16) {
    f(TypeTag<DType::kFloat16>{});
  } else {
    f(TypeTag<DType::kBFloat16>{});
  }
}

template <DType kType>
FASTATTN_DEVICE float load_half(const View& view, int64_t offset) {
  float x = 0.f;
  with_half<kType>(view.dtype, [&](auto type) { x = load_as<type>(view.data, offset); });
  return x;
}

template <DType kType>
FASTATTN_DEVICE void store_half(const View& view, int64_t offset, float x) {
  with_half<kType>(view.dtype, [&](auto type) { store_as<type>(view.data, offset, x); });
}

// ---- where scores are: layouts for masking.cuh ----
//
// Scores are products of rows from row0() on, kWarpRows a warp, and of kTiles * 8 columns from
// col0() on.

// The two rows of a thread are lines of pairs.
template <bool kRowsAreKeys, int kColumnTiles>
struct SumLines {
  static constexpr int kLines = 2, kLineBits = 2, kTiles = kColumnTiles;
  static constexpr bool kLinesAreKeys = kRowsAreKeys;
  // Of every 8 columns from its first one on, a thread has two.
  FASTATTN_DEVICE KeepBits columns_before(int end, int first) {
    const int n = min(max(end - first, 0), 8 * kTiles);
    return lowest_bits(n / 8 * 4 + min(n % 8, 2)) & 0x33333333;
  }
};

// Rows are queries.
struct QueryRows : SumLines<false, kTile / 8> {
  static constexpr int kQueries = 2, kKeys = 16;
  static constexpr int kKeyRun = 2, kRunStep = 8;
  FASTATTN_DEVICE int row0() { return warp_row0(); }
  FASTATTN_DEVICE int col0() { return 0; }
  FASTATTN_DEVICE int query0() { return sum_row(0); }
  FASTATTN_DEVICE int key0() { return sum_col(0, 0); }
  FASTATTN_DEVICE constexpr int query(int x) { return 8 * x; }
  FASTATTN_DEVICE constexpr int key(int y) { return y / 2 * 8 + y % 2; }
  FASTATTN_DEVICE constexpr int pair(int x, int y) { return y / 2 * 4 + 2 * x + y % 2; }
  FASTATTN_DEVICE KeepBits before(int end) { return columns_before(end, key0()); }
};

// Rows are keys: the transposed tile.
struct KeyRows : SumLines<true, kTile / 8> {
  static constexpr int kQueries = 16, kKeys = 2;
  static constexpr int kKeyRun = 1, kRunStep = 8;
  FASTATTN_DEVICE int row0() { return warp_row0(); }
  FASTATTN_DEVICE int col0() { return 0; }
  FASTATTN_DEVICE int query0() { return sum_col(0, 0); }
  FASTATTN_DEVICE int key0() { return sum_row(0); }
  FASTATTN_DEVICE constexpr int query(int x) { return x / 2 * 8 + x % 2; }
  FASTATTN_DEVICE constexpr int key(int y) { return 8 * y; }
  FASTATTN_DEVICE constexpr int pair(int x, int y) { return x / 2 * 4 + 2 * y + x % 2; }
  FASTATTN_DEVICE KeepBits before(int end) { return columns_before(end, query0()); }
};

// At most kWarpRows queries, the same in all warps. Each warp has a quarter of the keys.
struct FewQueryRows : SumLines<false, kTile / kWarps / 8> {
  static constexpr int kQueries = 2, kKeys = 2 * kTiles;
  static constexpr int kKeyRun = 2, kRunStep = 8;
  FASTATTN_DEVICE int row0() { return 0; }
  FASTATTN_DEVICE int col0() { return warp() * (8 * kTiles); }
  FASTATTN_DEVICE int query0() { return quad_row(0); }
  FASTATTN_DEVICE int key0() { return col0() + sum_col(0, 0); }
  FASTATTN_DEVICE constexpr int query(int x) { return QueryRows::query(x); }
  FASTATTN_DEVICE constexpr int key(int y) { return QueryRows::key(y); }
  FASTATTN_DEVICE constexpr int pair(int x, int y) { return QueryRows::pair(x, y); }
  FASTATTN_DEVICE KeepBits before(int end) { return columns_before(end, key0()); }
};

// ---- operands in shared memory: [kTile][kDim] ----

constexpr int kChunk = 8;  // a chunk is 16 bytes, copied and loaded at once

// Chunks of a row are permuted by the row: eight rows of one column then use all banks.
template <int kDim>
FASTATTN_DEVICE int chunk_index(int row, int chunk) {
  return row * kDim + (chunk ^ (row % 8)) * kChunk;
}

// Starts copying rows [0, rows) and columns [0, cols) of an array from element `offset` on; the
// rest becomes 0. The copy is done after wait_for_copies() and a barrier.
template <int kDim>
FASTATTN_DEVICE void start_tile(const View& view, int64_t offset, int rows, int cols,
                                uint16_t* to) {
  const uint16_t* const from = static_cast<const uint16_t*>(view.data) + offset;
  const bool aligned = view.stride_c == 1 && view.stride_r % kChunk == 0 &&
                       reinterpret_cast<uintptr_t>(from) % 16 == 0;
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 1  // copies are asynchronous; unrolling would only take registers for addresses
  for (int n = opaque_here(thread()); n < kTile * kChunks; n += kThreads) {
    const int r = n / kChunks, c = n % kChunks * kChunk;
    uint16_t* const chunk = to + chunk_index<kDim>(r, n % kChunks);
    const uint16_t* const row = from + r * view.stride_r;
    if (aligned && r < rows && c + kChunk <= cols) {
      copy_async<16>(chunk, row + c);
      continue;
    }
    for (int i = 0; i < kChunk; ++i)
      chunk[i] = r < rows && c + i < cols ? row[(c + i) * view.stride_c] : 0;
  }
}

// ---- products ----

// S += A B^T for A, B [kTile][kDim].
template <typename Layout, DType kType, int kDim>
FASTATTN_DEVICE void multiply_transposed(const uint16_t* a, const uint16_t* b, Pairs<Layout>& s) {
  const int lane = opaque_here(static_cast<int>(threadIdx.x % 32));
#pragma unroll 2  // fully unrolled, the addresses alone spill
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t x[4];
    load_matrices<false>(a + chunk_index<kDim>(Layout::row0() + lane % 16, 2 * k + lane / 16), x);
#pragma unroll
    for (int n = 0; n < Layout::kTiles; n += 2) {
      uint32_t y[4];
      const int row = Layout::col0() + 8 * n + lane % 8 + lane / 16 * 8;
      load_matrices<false>(b + chunk_index<kDim>(row, 2 * k + lane / 8 % 2), y);
      multiply_add<kType>(x, y[0], y[1], s[n]);
      multiply_add<kType>(x, y[2], y[3], s[n + 1]);
    }
  }
}

// O += A B for 16 columns A, and as many rows of B from `row` on.
template <DType kType, int kDim>
FASTATTN_DEVICE void add_rows(int lane, const uint32_t (&a)[4], const uint16_t* b, int row,
                              float (&o)[kDim / 8][4]) {
#pragma unroll
  for (int n = 0; n < kDim / 8; n += 2) {
    uint32_t y[4];
    load_matrices<true>(b + chunk_index<kDim>(row + lane % 16, n + lane / 16), y);
    multiply_add<kType>(a, y[0], y[1], o[n]);
    multiply_add<kType>(a, y[2], y[3], o[n + 1]);
  }
}

// O += P B for B [kTile][kDim], whose rows are the columns of P. P is rounded to 16 bits.
template <typename Layout, DType kType, int kDim>
FASTATTN_DEVICE void multiply_weights(const Pairs<Layout>& p, const uint16_t* b,
                                      float (&o)[kDim / 8][4]) {
  const int lane = opaque_here(static_cast<int>(threadIdx.x % 32));
#pragma unroll
  for (int k = 0; k < Layout::kTiles / 2; ++k) {
    uint32_t x[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* const pair = &p[2 * k + r / 2][r % 2 * 2];
      x[r] = pack_pair<kType>(pair[0], pair[1]);
    }
    add_rows<kType, kDim>(lane, x, b, Layout::col0() + 16 * k, o);
  }
}

// O += A B, or A^T B if kTransposed, for A [kTile][kTile] and B [kTile][kDim].
template <bool kTransposed, DType kType, int kDim>
FASTATTN_DEVICE void multiply(const uint16_t* a, const uint16_t* b, float (&o)[kDim / 8][4]) {
  const int lane = opaque_here(static_cast<int>(threadIdx.x % 32));
  const int row0 = opaque_here(warp_row0());
#pragma unroll 1
  for (int k = 0; k < kTile / 16; ++k) {
    uint32_t x[4];
    const int row = kTransposed ? 16 * k + lane % 8 + lane / 16 * 8 : row0 + lane % 16;
    const int chunk = kTransposed ? row0 / kChunk + lane / 8 % 2 : 2 * k + lane / 16;
    load_matrices<kTransposed>(a + chunk_index<kTile>(row, chunk), x);
    add_rows<kType, kDim>(lane, x, b, 16 * k, o);
  }
}

// ---- rows of values, queries or gradients that are not finite ----

// Finds the rows of a tile that hold NaN or infinity, sets them to 0 in shared memory, and sets bit
// r of bad_rows[w] for row 16 w + r. A product would carry them past the mask, as 0 * NaN. Ends
// with a barrier.
template <DType kType, int kDim>
FASTATTN_DEVICE bool take_out_bad_rows(DType own, uint16_t* tile, uint32_t (&bad_rows)[kWarps]) {
  // Two lanes a row. NaN and infinity have an exponent of all ones.
  const uint32_t special = (kType == kAnyHalf ? own : kType) == DType::kFloat16 ? 0x7c00 : 0x7f80;
  constexpr int kChunks = kDim / kChunk / 2, kWords = kChunk / 2;
  const int self = opaque_here(thread()), row = self / 2, chunk0 = self % 2 * kChunks;
  const auto words = [&](int n) {
    return reinterpret_cast<uint32_t*>(tile + chunk_index<kDim>(row, chunk0 + n));
  };
  bool bad = false;
#pragma unroll 1
  for (int n = 0; n < kChunks * kWords; ++n) {
    const uint32_t pair = words(n / kWords)[n % kWords];
    bad |= (pair & special) == special || (pair >> 16 & special) == special;
  }
  const uint32_t lanes = __ballot_sync(kAllLanes, bad);
  uint32_t rows = 0;
#pragma unroll 1
  for (int r = 0; r < kWarpRows; ++r) rows |= (lanes >> (2 * r) & 3u) != 0 ? 1u << r : 0u;
  if (lane() == 0) bad_rows[warp()] = rows;
  if (rows >> (row % kWarpRows) & 1)
    for (int n = 0; n < kChunks * kWords; ++n) words(n / kWords)[n % kWords] = 0;
  return __syncthreads_or(rows != 0) != 0;
}

FASTATTN_DEVICE bool is_bad_row(const uint32_t (&bad_rows)[kWarps], int row) {
  return bad_rows[row / kWarpRows] >> (row % kWarpRows) & 1;
}

// Adds factor times the row that begins at element `where`, to the rows of `sum` that keep it.
template <DType kType, int kDim>
FASTATTN_DEVICE void add_bad_row(const View& x, int64_t where, int64_t dims,
                                 const float (&factor)[2], const int (&keeps_it)[2],
                                 float (&sum)[kDim / 8][4]) {
  const int col0 = opaque_here(sum_col(0, 0));  // otherwise all columns stay in registers
  where += col0 * x.stride_c;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n, where += 8 * x.stride_c)
#pragma unroll
    for (int v = 0; v < 4; ++v)
      if (col0 + 8 * n + v % 2 < dims && keeps_it[v / 2])
        sum[n][v] += factor[v / 2] * load_half<kType>(x, where + v % 2 * x.stride_c);
}

}  // namespace fastattn::cuda
