// Tiles of 16-bit operands in shared memory and their products on tensor cores (ptx_mma.cuh):
// kTile queries x kTile keys a block, 16 queries a warp, fp32 sums in registers.
//
//   warp w, lane 4 g + t      rows 16 w + g and 16 w + g + 8 of every tile
//   sum [n][v], v < 4         row g + 8 (v / 2), column 8 n + 2 t + v % 2
#pragma once

#include "cuda/ptx_mma.cuh"
#include "cuda/tile.cuh"

namespace fastattn::cuda {

constexpr int kWarpRows = 16;
constexpr int kScoreTiles = kTile / 8;
static_assert(kWarps * kWarpRows == kTile);

using Scores = float[kScoreTiles][4];  // a Fragment, laid out otherwise
static_assert(sizeof(Scores) == sizeof(Fragment));

FASTATTN_DEVICE int warp_row0() { return thread() / 32 * kWarpRows; }
FASTATTN_DEVICE int sum_row(int v) { return warp_row0() + thread() % 32 / 4 + v / 2 * 8; }
FASTATTN_DEVICE int sum_col(int n, int v) { return 8 * n + 2 * (thread() % 4) + v % 2; }

// ---- operands in shared memory: [kTile][kDim] ----

constexpr int kChunk = 8;  // elements of 16 bytes, what is copied and loaded at once

// Chunks of a row change places with the row: eight rows of one column then lie in all banks.
template <int kDim>
FASTATTN_DEVICE int chunk_index(int row, int chunk) {
  return row * kDim + (chunk ^ (row % 8)) * kChunk;
}

// Starts copying rows [0, rows) and columns [0, cols) of an array from element `offset` on; what
// lies outside becomes 0. Done after wait_for_copies() and a barrier.
template <int kDim>
FASTATTN_DEVICE void start_tile(const View& view, int64_t offset, int rows, int cols,
                                uint16_t* to) {
  const uint16_t* const from = static_cast<const uint16_t*>(view.data) + offset;
  const bool aligned = view.stride_c == 1 && view.stride_r % kChunk == 0 &&
                       reinterpret_cast<uintptr_t>(from) % 16 == 0;
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 1  // copies are asynchronous: addresses of several would only take registers
  for (int n = thread(); n < kTile * kChunks; n += kThreads) {
    const int r = n / kChunks, c = n % kChunks * kChunk;
    uint16_t* const chunk = to + chunk_index<kDim>(r, n % kChunks);
    const uint16_t* const row = from + r * view.stride_r;
    if (aligned && r < rows && c + kChunk <= cols) {
      copy_async(chunk, row + c);
      continue;
    }
    for (int i = 0; i < kChunk; ++i)
      chunk[i] = r < rows && c + i < cols ? row[(c + i) * view.stride_c] : 0;
  }
}

// ---- products ----

// S += A B^T for A, B [kTile][kDim]: rows of this warp.
template <DType kType, int kDim>
FASTATTN_DEVICE void multiply_transposed(const uint16_t* a, const uint16_t* b, Scores& s) {
  const int lane = thread() % 32;
#pragma unroll 2  // all at once, the addresses alone spill
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t x[4];
    load_matrices<false>(a + chunk_index<kDim>(warp_row0() + lane % 16, 2 * k + lane / 16), x);
#pragma unroll
    for (int n = 0; n < kScoreTiles; n += 2) {
      uint32_t y[4];
      const int row = 8 * n + lane % 8 + lane / 16 * 8;
      load_matrices<false>(b + chunk_index<kDim>(row, 2 * k + lane / 8 % 2), y);
      multiply_add<kType>(x, y[0], y[1], s[n]);
      multiply_add<kType>(x, y[2], y[3], s[n + 1]);
    }
  }
}

// O += P B for B [kTile][kDim]; P is rounded to 16 bits.
template <DType kType, int kDim>
FASTATTN_DEVICE void multiply_weights(const Scores& p, const uint16_t* b, float (&o)[kDim / 8][4]) {
  const int lane = thread() % 32;
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    uint32_t x[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* const pair = &p[2 * k + r / 2][r % 2 * 2];
      x[r] = pack_pair<kType>(pair[0], pair[1]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      uint32_t y[4];
      const int row = 16 * k + lane % 16;
      load_matrices<true>(b + chunk_index<kDim>(row, n + lane / 16), y);
      multiply_add<kType>(x, y[0], y[1], o[n]);
      multiply_add<kType>(x, y[2], y[3], o[n + 1]);
    }
  }
}

}  // namespace fastattn::cuda
