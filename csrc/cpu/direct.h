// Products with at most a handful of rows, as in decoding: nothing is packed, every key and value
// is read once, where it lies, converted on the fly. Memory bandwidth is the limit, so rows are
// simply taken one after the other.
#pragma once

#include "cpu/pack.h"

namespace fastattn::FASTATTN_ISA {

constexpr int64_t kDirectRows =
    4;  // with more, packing a tile costs less than reading it once a row
constexpr int64_t kPrefetchKeys =
    16;  // how far ahead rows are asked for: hardware does not foresee strided ones

// Asks for `bytes` from `from` on.
FASTATTN_SIMD void prefetch(const char* from, int64_t bytes) {
  for (int64_t n = 0; n < bytes; n += 64) __builtin_prefetch(from + n);
}
template <DType kType>
FASTATTN_SIMD const char* address(const void* base, int64_t offset) {
  return static_cast<const char*>(base) + offset * (kType == DType::kFloat32 ? 4 : 2);
}

// Whether rows of a View can be read as vectors.
FASTATTN_SIMD bool rows_contiguous(const View& view) { return view.stride_c == 1; }

// kWidth columns of one row starting at `offset`, of which `count` exist.
template <DType kType>
FASTATTN_SIMD Vec load_columns(const void* base, int64_t offset, int64_t count) {
  return __builtin_expect(count >= kWidth, 1) ? load_as<kType>(base, offset)
                                              : gather<kType>(base, offset, 1, count);
}

// out[j] = x . keys(j, :) for j < keys.rows rounded up to kWidth; x has zeros up to a multiple of
// kWidth.
template <DType kType>
static void dot_rows_as(const float* x, const Matrix& keys, float* out) {
  for (int64_t j = 0; j < keys.rows; j += kWidth) {
    int64_t offset[kWidth];
    for (int64_t lane = 0; lane < kWidth; ++lane) {  // past the last key: the last key again
      const int64_t row = j + lane < keys.rows ? j + lane : keys.rows - 1;
      offset[lane] = keys.offset + row * keys.stride_r;
    }
    for (int64_t lane = 0; lane < kWidth && j + kPrefetchKeys + lane < keys.rows; ++lane)
      prefetch(address<kType>(keys.data, offset[lane] + kPrefetchKeys * keys.stride_r),
               keys.cols * (kType == DType::kFloat32 ? 4 : 2));
    Vec acc[kWidth] = {};
    int64_t d = 0;
    for (; d + kWidth <= keys.cols; d += kWidth) {
      const Vec xd = load(x + d);
#pragma GCC unroll 16
      for (int lane = 0; lane < kWidth; ++lane)
        acc[lane] += xd * load_as<kType>(keys.data, offset[lane] + d);
    }
    if (d < keys.cols) {
      for (int lane = 0; lane < kWidth; ++lane)
        acc[lane] += load(x + d) * gather<kType>(keys.data, offset[lane] + d, 1, keys.cols - d);
    }
    transpose(acc);
    Vec sum = acc[0];
    for (int lane = 1; lane < kWidth; ++lane) sum += acc[lane];
    store(out + j, sum);
  }
}
[[maybe_unused]] static void dot_rows(const float* x, const Matrix& keys, float* out) {
  with_dtype(keys.dtype, [&](auto type) { dot_rows_as<type>(x, keys, out); });
}

// o[e] = scale * o[e] + sum over the listed rows j of weights[j] * values(j, e); o has room for
// whole vectors.
template <DType kType, int kVecs>
FASTATTN_SIMD void add_columns(const float* weights, const int32_t* rows, int64_t count,
                               const Matrix& values, int64_t e, float scale, float* o) {
  Vec acc[kVecs];
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) acc[v] = load(o + e + v * kWidth) * scale;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = values.offset + rows[n] * values.stride_r + e;
    const Vec weight = splat(weights[rows[n]]);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v)
      acc[v] += weight * load_columns<kType>(values.data, row + v * kWidth,
                                             kVecs > 1 ? kWidth : values.cols - e - v * kWidth);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) store(o + e + v * kWidth, acc[v]);
}
[[maybe_unused]] static void add_weighted_rows(const float* weights, const int32_t* rows,
                                               int64_t count, const Matrix& values, float scale,
                                               float* o) {
  with_dtype(values.dtype, [&](auto type) {
    constexpr int kVecs = 8;
    int64_t e = 0;
    for (; e + kVecs * kWidth <= values.cols; e += kVecs * kWidth)
      add_columns<type, kVecs>(weights, rows, count, values, e, scale, o);
    for (; e < values.cols; e += kWidth)
      add_columns<type, 1>(weights, rows, count, values, e, scale, o);
  });
}

}  // namespace fastattn::FASTATTN_ISA
