// Products with at most a handful of rows, as in decoding: nothing is packed, every key and value
// is read once, where it lies, converted on the fly. Memory bandwidth is the limit, so rows are
// simply taken one after the other.
#pragma once

#include "cpu/pack.h"

namespace fastattn::FASTATTN_ISA {

constexpr int64_t kDirectRows = 4;  // with more, packing a tile costs less than reading it per row
// How far ahead rows are asked for: 8 KiB of 64 floats cover the latency of memory at a core's
// share of its bandwidth, and the first rows of the next tile are there when it begins.
constexpr int64_t kPrefetchRows = 32;

// Asks for row r, which need not exist.
template <DType kType>
FASTATTN_SIMD void prefetch_row(const Matrix& from, int64_t r) {
  constexpr int64_t kSize = kType == DType::kFloat32 ? 4 : 2;
  const auto base = reinterpret_cast<uintptr_t>(from.data);
  const auto row = static_cast<uintptr_t>((from.offset + r * from.stride_r) * kSize);
  for (int64_t n = 0; n < from.cols * kSize; n += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(base + row + static_cast<uintptr_t>(n)));
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
    for (int64_t lane = 0; lane < kWidth; ++lane)
      prefetch_row<kType>(keys, j + lane + kPrefetchRows);
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
    store(out + j, sums_of<kWidth>(acc));
  }
}
[[maybe_unused]] static void dot_rows(const float* x, const Matrix& keys, float* out) {
  with_dtype(keys.dtype, [&](auto type) { dot_rows_as<type>(x, keys, out); });
}

// The rows to read: all, or (skip_zeros) those with a weight. Returns how many.
FASTATTN_SIMD int64_t list_rows(const float* weights, int64_t rows, bool skip_zeros,
                                int32_t* listed) {
  int64_t count = 0;
  for (int64_t j = 0; j < rows; ++j) {
    listed[count] = static_cast<int32_t>(j);
    count += !skip_zeros || weights[j] != 0.f;
  }
  return count;
}

// o[e] = scale * o[e] + sum over the listed rows j of weights[j] * values(j, e), for kVecs vectors
// of columns from e on, the last of which may be partial; o has room for whole vectors. Even and
// odd rows have sums of their own, since one chain of additions is slower than memory.
template <DType kType, int kVecs>
FASTATTN_SIMD void add_columns(const float* weights, const int32_t* rows, int64_t count,
                               const Matrix& values, int64_t e, float scale, float* o) {
  Vec acc[2][kVecs] = {};
  const auto add = [&](int64_t n, Vec(&sum)[kVecs]) __attribute__((always_inline)) {
    const int64_t row = values.offset + rows[n] * values.stride_r + e;
    const Vec weight = splat(weights[rows[n]]);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v)
      sum[v] += weight * load_columns<kType>(values.data, row + v * kWidth,
                                             kVecs > 1 ? kWidth : values.cols - e);
    const int64_t ahead = n + kPrefetchRows;
    if (e == 0) prefetch_row<kType>(values, ahead < count ? rows[ahead] : rows[n] + kPrefetchRows);
  };
  int64_t n = 0;
  for (; n + 2 <= count; n += 2) add(n, acc[0]), add(n + 1, acc[1]);
  if (n < count) add(n, acc[0]);
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) {
    float* const to = o + e + v * kWidth;
    store(to, load(to) * scale + (acc[0][v] + acc[1][v]));
  }
}
[[maybe_unused]] static void add_weighted_rows(const float* weights, const int32_t* rows,
                                               int64_t count, const Matrix& values, float scale,
                                               float* o) {
  with_dtype(values.dtype, [&](auto type) {
    int64_t e = 0;
    const auto take = [&](auto vecs) __attribute__((always_inline)) {
      for (; e + vecs * kWidth <= values.cols; e += vecs * kWidth)
        add_columns<type, vecs>(weights, rows, count, values, e, scale, o);
    };
    take(std::integral_constant<int, 4>{});
    take(std::integral_constant<int, 2>{});
    for (; e < values.cols; e += kWidth)
      add_columns<type, 1>(weights, rows, count, values, e, scale, o);
  });
}

}  // namespace fastattn::FASTATTN_ISA
