// A tile of kTile queries x kTile keys in a block of kThreads threads. Every thread holds a
// fragment of kRows x kCols in registers. Operands pass through shared memory in stages.
//
//   warp 0   rows  0-15    thread t: rows t / 16 * kRows, columns t % 16 * kCols of every tile
//   warp 3   rows 48-63    16 neighbouring lanes share kRows rows
#pragma once

#include "cuda/base/reduce.cuh"
#include "problem/mask.h"

namespace fastattn::cuda {

constexpr int kTile = 64;
constexpr int kStage = 32;  // rows of a staged operand [kStage][kTile]
constexpr int kRows = 8, kCols = 4;
constexpr int kRowLanes = kTile / kCols;  // lanes that share their rows
constexpr int kStageFloats = kStage * kTile;
static_assert(kRows * kCols * kThreads == kTile * kTile);

// A stage of dims of a tile may also be split by keys and dims: a group of kOwnLanes lanes shares
// kOwnKeys keys, and each lane has kOwnDims dims of them.
constexpr int kOwnDims = 2;
constexpr int kOwnLanes = kStage / kOwnDims, kOwnGroups = kThreads / kOwnLanes;
constexpr int kOwnKeys = kTile / kOwnGroups;
constexpr int kOwnSlots = kOwnDims * kOwnKeys / 4;  // of a thread's sums, four a slot
static_assert(kOwnLanes == 16 && kOwnKeys == 8);

using Fragment = float[kRows][kCols];

FASTATTN_DEVICE int row0() { return thread() / kRowLanes * kRows; }
FASTATTN_DEVICE int col0() { return thread() % kRowLanes * kCols; }

// Takes the last digit of a block's number; a loop of `size` iterations is one digit. 32 bits are
// enough for a grid of fewer than 2^31 blocks, and a 64-bit division is a function call.
FASTATTN_DEVICE int64_t take_digit(uint32_t* number, int64_t size) {
  const uint32_t base = static_cast<uint32_t>(size), digit = *number % base;
  *number /= base;
  return digit;
}

// The position of a tile: queries [i0, i0 + rows) of head h and batch b, keys [j0, j0 + cols) of
// head hkv.
struct Place {
  int b, h, hkv;
  int64_t i0, j0;
  int rows, cols;
};

FASTATTN_DEVICE int extent(int64_t size, int64_t begin) {
  return static_cast<int>(min64(kTile, size - begin));
}

// Query heads that share keys.
FASTATTN_DEVICE int group_size(const AttentionParams& p) {
  return static_cast<int>(p.H) / static_cast<int>(p.Hkv);
}

// Past the last tile, rows and cols are at most 0.
FASTATTN_DEVICE Place place(const AttentionParams& p, int64_t b, int64_t h, int64_t i0,
                            int64_t j0) {
  const int head = static_cast<int>(h), hkv = head / group_size(p);
  return {static_cast<int>(b), head, hkv, i0, j0, extent(p.M, i0), extent(p.N, j0)};
}

// The queries of a block that has one of `tiles` tiles of a head. Where a diagonal bounds the keys,
// later tiles have more of them. These come first if `sorted`.
FASTATTN_DEVICE Place query_place(const AttentionParams& p, int64_t tiles, uint32_t block,
                                  bool sorted = false) {
  const int64_t n = take_digit(&block, tiles), h = take_digit(&block, p.H), b = block;
  const bool later_first = sorted && later_rows_keep_more(p.mask, p.N);
  return place(p, b, h, (later_first ? tiles - 1 - n : n) * kTile, 0);
}

// Keys from j0 on, and the first of the heads that share them. There may be no such head.
FASTATTN_DEVICE Place key_place(const AttentionParams& p, int64_t b, int64_t hkv, int64_t j0) {
  const int head = static_cast<int>(hkv), h = head * group_size(p);
  return {static_cast<int>(b), h, head, 0, j0, extent(p.M, 0), extent(p.N, j0)};
}

// The number of a query of the tile among those of all heads.
FASTATTN_DEVICE int64_t query_number(const AttentionParams& p, const Place& at, int query) {
  return (at.b * p.H + at.h) * p.M + at.i0 + query;
}

// Whether this warp has rows. If M = 1, only a quarter of a tile is computed.
FASTATTN_DEVICE bool warp_has_rows(const Place& at) {
  return thread() / 32 * (kTile / kWarps) < at.rows;
}

// ---- shared memory ----

// The index of element (r, c) of a tile [..][kTile]. Groups of four columns are permuted by r / 4,
// so lanes that read the same columns of rows 4 apart use different banks.
FASTATTN_DEVICE int tile_index(int r, int c) { return r * kTile + (c ^ (r & (kTile - 4))); }

FASTATTN_DEVICE float4 load4(const float* tile, int r, int c) {
  return *reinterpret_cast<const float4*>(tile + tile_index(r, c));
}
FASTATTN_DEVICE void store4(float* tile, int r, int c, const float4& x) {
  *reinterpret_cast<float4*>(tile + tile_index(r, c)) = x;
}

FASTATTN_DEVICE void unpack4(const float4& from, float* to) {
  to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
}
FASTATTN_DEVICE float4 pack4(const float* from) {
  return make_float4(from[0], from[1], from[2], from[3]);
}

// The operands of row r: kRows values at row0() of `a`, kCols at col0() of `b`.
FASTATTN_DEVICE void load_rows(const float* a, int r, float (&x)[kRows]) {
  unpack4(load4(a, r, row0()), x);
  unpack4(load4(a, r, row0() + 4), x + 4);
}
FASTATTN_DEVICE void load_cols(const float* b, int r, float (&x)[kCols]) {
  unpack4(load4(b, r, col0()), x);
}

template <int kRowCount>
FASTATTN_DEVICE void clear(float (&x)[kRowCount][kCols]) {
#pragma unroll
  for (int r = 0; r < kRowCount; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) x[r][c] = 0.f;
}

// to += x.
template <int kRowCount>
FASTATTN_DEVICE void add(const float (&x)[kRowCount][kCols], float (&to)[kRowCount][kCols]) {
#pragma unroll
  for (int r = 0; r < kRowCount; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) to[r][c] += x[r][c];
}

// Stores to[i][j], or to[j][i] if kTransposed.
template <bool kTransposed>
FASTATTN_DEVICE void store_fragment(const Fragment& x, float* to) {
  const int row = opaque_here(row0()), col = opaque_here(col0());
  if constexpr (kTransposed) {
#pragma unroll
    for (int c = 0; c < kCols; ++c)
#pragma unroll
      for (int r = 0; r < kRows; r += 4)
        store4(to, col + c, row + r, make_float4(x[r][c], x[r + 1][c], x[r + 2][c], x[r + 3][c]));
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) store4(to, row + r, col, pack4(x[r]));
  }
}

// What a masked pair has in place of a weight. A product leaves it out, whatever the other factor
// is: 0 * NaN must not carry garbage past a mask. A weight that is 0 without a mask does carry NaN.
// Not run on a GPU.
constexpr float kNoWeight = -0.f;
FASTATTN_DEVICE bool is_no_weight(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits == 0x80000000;
}

// acc[i][j] += sum_r a[a_row + r][i] b[r][j], r < depth. kMasked: factors in `a` are weights, and
// some of them may be kNoWeight.
template <bool kMasked>
FASTATTN_DEVICE void outer_add(const float* a, int a_row, const float* b, int depth,
                               Fragment& acc) {
#pragma unroll 4
  for (int n = 0; n < depth; ++n) {
    float x[kRows], y[kCols];
    load_rows(a, a_row + n, x);
    load_cols(b, n, y);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const float sum = acc[r][c] + x[r] * y[c];
        acc[r][c] = kMasked && is_no_weight(x[r]) ? acc[r][c] : sum;
      }
  }
}

// ---- elements of strided arrays ----

template <DType kType>
FASTATTN_DEVICE float load_as(const void* data, int64_t offset) {
  if constexpr (kType == DType::kFloat32) {
    return static_cast<const float*>(data)[offset];
  } else {
    const uint16_t bits = static_cast<const uint16_t*>(data)[offset];
    return kType == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
  }
}

template <DType kType>
FASTATTN_DEVICE void store_as(void* data, int64_t offset, float x) {
  if constexpr (kType == DType::kFloat32) {
    static_cast<float*>(data)[offset] = x;
  } else {
    static_cast<uint16_t*>(data)[offset] =
        kType == DType::kFloat16 ? float_to_fp16(x) : float_to_bf16(x);
  }
}

template <DType kType>
struct TypeTag {
  constexpr operator DType() const { return kType; }
};

// Calls f with a dtype as a compile-time constant.
template <typename F>
__device__ __forceinline__ void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(TypeTag<DType::kFloat32>{});
    case DType::kBFloat16:
      return f(TypeTag<DType::kBFloat16>{});
    case DType::kFloat16:
      return f(TypeTag<DType::kFloat16>{});
  }
}

FASTATTN_DEVICE int64_t offset_of(const View& view, int64_t b, int64_t h, int64_t r, int64_t c) {
  return b * view.stride_b + h * view.stride_h + r * view.stride_r + c * view.stride_c;
}

FASTATTN_DEVICE float load_element(const View& view, int64_t offset) {
  float x = 0.f;
  with_dtype(view.dtype, [&](auto type) { x = load_as<type>(view.data, offset); });
  return x;
}

FASTATTN_DEVICE void store_element(const View& view, int64_t offset, float x) {
  with_dtype(view.dtype, [&](auto type) { store_as<type>(view.data, offset, x); });
}

// ---- staging; barriers are the caller's ----

FASTATTN_DEVICE bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// to[c][r] = element (r, c) from `offset` on, for rows <= kTile and cols <= kStage; 0 elsewhere.
FASTATTN_DEVICE void stage_transposed(const View& view, int64_t offset, int rows, int cols,
                                      float* to) {
  constexpr int kStep = kThreads / kStage;
  const int self = opaque_here(thread()), c = self % kStage;
  with_dtype(view.dtype, [&](auto type) {
    int64_t n = opaque(offset + self / kStage * view.stride_r + c * view.stride_c);
#pragma unroll 4
    for (int r = self / kStage; r < kTile; r += kStep, n += kStep * view.stride_r)
      to[tile_index(c, r)] = r < rows && c < cols ? load_as<type>(view.data, n) : 0.f;
  });
}

// to[r][c] = element (r, c) from `offset` on, for rows <= kStage and cols <= kTile; 0 elsewhere.
// Returns whether all that this thread loaded is finite.
FASTATTN_DEVICE bool stage_rows(const View& view, int64_t offset, int rows, int cols, float* to) {
  constexpr int kStep = kThreads / kTile;
  const int self = opaque_here(thread()), c = self % kTile;
  bool finite = true;
  with_dtype(view.dtype, [&](auto type) {
    int64_t n = opaque(offset + self / kTile * view.stride_r + c * view.stride_c);
#pragma unroll 4
    for (int r = self / kTile; r < kStage; r += kStep, n += kStep * view.stride_r) {
      const float x = r < rows && c < cols ? load_as<type>(view.data, n) : 0.f;
      finite &= is_finite(x);
      to[tile_index(r, c)] = x;
    }
  });
  return finite;
}

// Copies `count` rows of an array [..][kTile].
FASTATTN_DEVICE void stage_panel(const float* panel, int count, float* to) {
  for (int n = opaque_here(thread()); n < count * (kTile / 4); n += kThreads) {
    const int r = n / (kTile / 4), c = n % (kTile / 4) * 4;
    store4(to, r, c, reinterpret_cast<const float4*>(panel)[n]);
  }
}

}  // namespace fastattn::cuda
