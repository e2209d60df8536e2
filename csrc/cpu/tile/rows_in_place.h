// Products with at most a handful of rows, as in decoding. Nothing is packed: every key and value
// is read once, in place, and converted on the fly for up to 4 rows at a time. Memory bandwidth is
// the limit, so keys are simply taken one after the other.
#pragma once

#include "cpu/base/pack.h"
#include "cpu/tile/masking.h"

namespace fastattn::FASTATTN_ISA {

// out[r * ld + j] = x_r . keys(j, :) for r < rows and j < keys.rows rounded up to kWidth. Each row
// of x has zeros up to a multiple of kWidth.
FASTATTN_SHARED void dot_rows(const float* x, int64_t ldx, int64_t rows, const Matrix& keys,
                              float* out, int64_t ld);

// o(r, :) = scale[r] o(r, :) + sum_j weights(r, j) values(j, :) for weights [rows, ldw] of a tile
// and o [rows, ldo]. A masked pair skips its value, even NaN. `listed` has room for values.rows.
FASTATTN_SHARED void add_weighted_rows(const MaskTile& mask, const float* weights, int64_t ldw,
                                       int64_t rows, const Matrix& values, const float* scale,
                                       float* o, int64_t ldo, int32_t* listed);

#ifdef FASTATTN_SHARED_CODE
// The same of kRows rows. kWidth products are computed at a time, with a vector of sums for each.
template <DType kType, int kRows>
static void dot_rows_as(const float* x, int64_t ldx, const Matrix& keys, float* out, int64_t ld) {
  constexpr int kKeys = kWidth / kRows;
  const int64_t ahead = prefetch_distance<kType>(keys);
  for (int64_t j = 0; j < round_up(keys.rows, kWidth); j += kKeys) {
    int64_t offset[kKeys];
    for (int64_t n = 0; n < kKeys; ++n) {  // past the last key, repeats it
      const int64_t row = j + n < keys.rows ? j + n : keys.rows - 1;
      offset[n] = keys.offset + row * keys.stride_r;
    }
    prefetch_rows<kType>(keys, j + ahead, j + ahead + kKeys);
    Vec acc[kWidth] = {};
    const auto add = [&](int64_t d, auto load_key) __attribute__((always_inline)) {
      Vec xd[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) xd[r] = load(x + r * ldx + d);
#pragma GCC unroll 16
      for (int n = 0; n < kKeys; ++n) {
        const Vec key = load_key(offset[n] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r * kKeys + n] += xd[r] * key;
      }
    };
    int64_t d = 0;
    for (; d + kWidth <= keys.cols; d += kWidth)
      add(d,
          [&](int64_t at) __attribute__((always_inline)) { return load_as<kType>(keys.data, at); });
    if (d < keys.cols) {
      add(d, [&](int64_t at) __attribute__((always_inline)) {
        return load_first<kType>(keys.data, at, keys.cols - d);
      });
    }
    const Vec sums = sums_of<kWidth>(acc);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      std::memcpy(out + r * ld + j, reinterpret_cast<const float*>(&sums) + r * kKeys,
                  kKeys * sizeof(float));
  }
}

FASTATTN_SHARED void dot_rows(const float* x, int64_t ldx, int64_t rows, const Matrix& keys,
                              float* out, int64_t ld) {
  with_dtype(keys.dtype, [&](auto type) {
    in_row_blocks<4>(rows, [&](int64_t r, auto count) {
      dot_rows_as<type, count>(x + r * ldx, ldx, keys, out + r * ld, ld);
    });
  });
}

// Lists the values that some of the rows [begin, end) of a tile keep.
struct Listed {
  int64_t count;
  bool by_each;  // whether each of the rows keeps all of them
};
FASTATTN_SIMD Listed list_values(const MaskTile& mask, int64_t begin, int64_t end, int64_t cols,
                                 int32_t* listed) {
  int64_t count = 0;
  VecI differ{};
  mask.with_masking([&](auto masking) __attribute__((always_inline)) {
    for (int64_t c = 0; c < cols; c += kWidth) {
      VecI some{}, all = iota() < static_cast<int32_t>(cols - c);
      const VecI exists = all;
      for (int64_t r = begin; r < end; ++r) {
        const VecI kept = mask.row<masking>(r).keeps(c);
        some |= kept;
        all &= kept;
      }
      differ |= (some & exists) ^ all;
      for (int64_t lane = 0; lane < min64(kWidth, cols - c); ++lane) {
        listed[count] = static_cast<int32_t>(c + lane);
        count -= some[lane];  // -1 if one keeps it
      }
    }
  });
  return {count, !any_lane(differ)};
}

template <DType kType>
static bool all_finite(const Matrix& values, const int32_t* listed, int64_t count) {
  VecI probe{};
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = values.offset + listed[n] * values.stride_r;
    for (int64_t e = 0; e < values.cols; e += kWidth)
      probe |= not_finite(load_first<kType>(values.data, row + e, values.cols - e));
  }
  return !any_lane(probe);
}

// Sums over listed values, or over all of them: weights [kRows, ldw], o [kRows, ldo].
struct WeightedSum {
  const float* weights;
  int64_t ldw;
  const int32_t* listed;
  int64_t count;
  const Matrix& values;
  const float* scale;  // one factor for each row of o
  float* o;
  int64_t ldo;
};

// o(r, e) = scale[r] o(r, e) + sum_n weights(r, j_n) values(j_n, e), for kVecs vectors of columns
// from e on. The last vector may be partial; o has room for whole vectors. Chains of additions end
// at multiples of kChainKeys. A row thus depends neither on how many rows there are, nor on whether
// masked keys are listed. 4 chains at a time are faster than memory.
constexpr int64_t kChainKeys = 16;  // a sum of 64 in one chain loses twice the digits
template <DType kType, int kRows, int kVecs, bool kAll>
FASTATTN_SIMD void add_columns(const WeightedSum& of, int64_t e) {
  const Matrix& values = of.values;
  const int64_t distance = prefetch_distance<kType>(values);
  const auto key = [&](int64_t n) -> int64_t { return kAll ? n : of.listed[n]; };
  for (int64_t n = 0, chain = 0; chain == 0 || n < of.count; ++chain) {
    int64_t end = min64(of.count, n + kChainKeys);
    while (!kAll && end > n && key(end - 1) / kChainKeys > key(n) / kChainKeys) --end;
    Vec sum[kRows][kVecs] = {};
    for (; n < end; ++n) {
      const int64_t j = key(n), row = values.offset + j * values.stride_r + e;
      Vec value[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v)
        value[v] =
            load_first<kType>(values.data, row + v * kWidth, kVecs > 1 ? kWidth : values.cols - e);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = splat(of.weights[r * of.ldw + j]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[r][v] += weight * value[v];
      }
      const int64_t next = n + distance < of.count ? key(n + distance) : j + distance;
      if (e == 0) prefetch_rows<kType>(values, next, next + 1);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        float* const to = of.o + r * of.ldo + e + v * kWidth;
        store(to, load(to) * (chain == 0 ? of.scale[r] : 1.f) + sum[r][v]);
      }
  }
}

// A row has 64 columns of sums in registers, more rows as many as fit. With 8 vectors of 8 and no
// list, a row takes 1.20 cycles a vector of float32, and 1.32 of bf16. With 4 vectors it takes 2.40
// and 2.06 (Zen 3, values in the cache).
template <DType kType, int kRows, bool kAll>
static void add_listed(const WeightedSum& of) {
  constexpr bool kWide = kRows < 4 || kVectorRegisters == 32;  // whether 4 vectors of sums fit
  int64_t e = 0;
  const auto take = [&](auto vecs) __attribute__((always_inline)) {
    for (; e + vecs * kWidth <= of.values.cols; e += vecs * kWidth)
      add_columns<kType, kRows, vecs, kAll>(of, e);
  };
  if constexpr (kRows == 1 && kWidth == 8) take(std::integral_constant<int, 8>{});
  if constexpr (kWide) take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 2>{});
  for (; e < of.values.cols; e += kWidth) add_columns<kType, kRows, 1, kAll>(of, e);
}

FASTATTN_SHARED void add_weighted_rows(const MaskTile& mask, const float* weights, int64_t ldw,
                                       int64_t rows, const Matrix& values, const float* scale,
                                       float* o, int64_t ldo, int32_t* listed) {
  with_dtype(values.dtype, [&](auto type) {
    // Whether rows take their values together: each keeps all of these, or 0 times a value is 0.
    const auto add_rows = [&](int64_t begin, int64_t end) {
      const Listed kept = list_values(mask, begin, end, values.rows, listed);
      if (!kept.by_each && !all_finite<type>(values, listed, kept.count)) return false;
      in_row_blocks<4>(end - begin, [&](int64_t n, auto block) {
        const int64_t r = begin + n;
        const auto add = kept.count == values.rows ? add_listed<type, block, true>
                                                   : add_listed<type, block, false>;
        add({weights + r * ldw, ldw, listed, kept.count, values, scale + r, o + r * ldo, ldo});
      });
      return true;
    };
    if (add_rows(0, rows)) return;
    for (int64_t r = 0; r < rows; ++r) add_rows(r, r + 1);
  });
}
#endif  // FASTATTN_SHARED_CODE

}  // namespace fastattn::FASTATTN_ISA
