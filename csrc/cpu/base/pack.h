// Copies strided arrays of any dtype into dense fp32 tiles of scratch memory, and back. All
// handling of dtypes and strides in the kernels is here.
#pragma once

#include "cpu/base/half.h"
#include "cpu/base/scratch.h"
#include "cpu/base/shared.h"

namespace fastattn::FASTATTN_ISA {

// rows x cols elements of a View, one (b, h) of it.
struct Matrix {
  void* data;
  DType dtype;
  int64_t offset, stride_r, stride_c, rows, cols;

  FASTATTN_MEMBER Matrix transposed() const {
    return {data, dtype, offset, stride_c, stride_r, cols, rows};
  }
};

FASTATTN_SIMD Matrix matrix_at(const View& view, int64_t b, int64_t h, int64_t r0, int64_t rows,
                               int64_t cols) {
  const int64_t offset = b * view.stride_b + h * view.stride_h + r0 * view.stride_r;
  return {view.data, view.dtype, offset, view.stride_r, view.stride_c, rows, cols};
}

// How far ahead of its reads a loop prefetches rows. So many cache lines cover the latency of
// memory at one core's share of its bandwidth; the first rows of the next tile arrive before that
// tile begins. Measured (0031) on Sapphire Rapids, which has a matrix unit, and on Zen 5.
#ifdef __AMX_BF16__
constexpr int64_t kPrefetchBytes = 2 << 10;
#else
constexpr int64_t kPrefetchBytes = 4 << 10;
#endif

// The same distance in rows.
template <DType kType>
FASTATTN_SIMD int64_t prefetch_distance(const Matrix& from) {
  constexpr int64_t kSize = kType == DType::kFloat32 ? 4 : 2;
  const int64_t rows = kPrefetchBytes / (kSize * (from.cols < 8 ? 8 : from.cols));
  return rows < 1 ? 1 : rows;
}

// Prefetches rows [r0, r1) of contiguous columns, which need not exist, into the L1 cache, or
// (kLocality 2) into the L2 cache.
template <DType kType, int kLocality = 3>
FASTATTN_SIMD void prefetch_rows(const Matrix& from, int64_t r0, int64_t r1) {
  constexpr int64_t kSize = kType == DType::kFloat32 ? 4 : 2, kLine = 64;
  const auto first = reinterpret_cast<uintptr_t>(from.data) + kSize * uintptr_t(from.offset);
  for (int64_t r = r0; r < r1; ++r)
    for (int64_t n = 0; n < from.cols * kSize; n += kLine)
      __builtin_prefetch(
          reinterpret_cast<const char*>(first + kSize * uintptr_t(r) * uintptr_t(from.stride_r) +
                                        uintptr_t(n)),
          0, kLocality);
}

// The distance between rows of a dense tile. A large power of two would map a column to few sets of
// the L1 cache.
FASTATTN_SIMD int64_t tile_stride(int64_t cols) {
  const int64_t padded = round_up(cols, kWidth);
  return padded % 128 == 0 ? padded + 16 : padded;
}

// kWidth elements, `stride` apart. The first `count` exist; the others are 0.
template <DType kType>
static Vec gather(const void* base, int64_t offset, int64_t stride, int64_t count) {
  if constexpr (kType == DType::kFloat32) {
    Vec out{};
    for (int64_t lane = 0; lane < count && lane < kWidth; ++lane)
      out[lane] = static_cast<const float*>(base)[offset + lane * stride];
    return out;
  } else {
    VecHalf out{};
    for (int64_t lane = 0; lane < count && lane < kWidth; ++lane)
      out[lane] = static_cast<const uint16_t*>(base)[offset + lane * stride];
    return kType == DType::kBFloat16 ? bf16_to_float(out) : fp16_to_float(out);
  }
}
// kWidth neighbours. The first `count` exist; the others are 0.
template <DType kType>
FASTATTN_SIMD Vec load_first(const void* base, int64_t offset, int64_t count) {
  if (__builtin_expect(count >= kWidth, 1)) return load_as<kType>(base, offset);
  if (count <= 0) return Vec{};
#if defined(__AVX512BW__) && FASTATTN_VECTOR_WIDTH == 16
  const auto exists = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (kType == DType::kFloat32) {
    return (Vec)_mm512_maskz_loadu_ps(exists, static_cast<const float*>(base) + offset);
  } else {
    const auto out =
        (VecHalf)_mm256_maskz_loadu_epi16(exists, static_cast<const uint16_t*>(base) + offset);
    return kType == DType::kBFloat16 ? bf16_to_float(out) : fp16_to_float(out);
  }
#elif defined(__AVX2__) && FASTATTN_VECTOR_WIDTH == 8
  const auto n = static_cast<int32_t>(count);
  if constexpr (kType == DType::kFloat32) {
    const VecI exists = iota() < n;
    return (Vec)_mm256_maskload_ps(static_cast<const float*>(base) + offset, (__m256i)exists);
  } else {  // whole pairs, then the last of an odd number
    const uint16_t* const from = static_cast<const uint16_t*>(base) + offset;
    const __m128i exists = _mm_cmpgt_epi32(_mm_set1_epi32(n / 2), _mm_setr_epi32(0, 1, 2, 3));
    __m128i out = _mm_maskload_epi32(reinterpret_cast<const int*>(from), exists);
    if (n % 2 == 1) {
      const __m128i lanes = _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7);
      const __m128i last = _mm_cmpeq_epi16(lanes, _mm_set1_epi16(static_cast<int16_t>(n - 1)));
      out = _mm_blendv_epi8(out, _mm_set1_epi16(static_cast<int16_t>(from[n - 1])), last);
    }
    return kType == DType::kBFloat16 ? bf16_to_float((VecHalf)out) : fp16_to_float((VecHalf)out);
  }
#else
  return gather<kType>(base, offset, 1, count);
#endif
}
template <DType kType>
FASTATTN_SIMD Vec load_strided(const void* base, int64_t offset, int64_t stride, int64_t count) {
  if (__builtin_expect(stride == 1, 1)) return load_first<kType>(base, offset, count);
  if (stride == 0 && count >= kWidth) return splat(load_one<kType>(base, offset));
  return gather<kType>(base, offset, stride, count);
}
template <DType kType>
FASTATTN_SIMD void store_strided(void* base, int64_t offset, int64_t stride, int64_t count, Vec x) {
  if (__builtin_expect(stride == 1 && count >= kWidth, 1)) return store_as<kType>(base, offset, x);
  const auto store_lanes = [&](auto* to, auto lanes) __attribute__((always_inline)) {
    for (int64_t lane = 0; lane < count && lane < kWidth; ++lane)
      to[offset + lane * stride] = lanes[lane];
  };
  if constexpr (kType == DType::kFloat32)
    store_lanes(static_cast<float*>(base), x);
  else
    store_lanes(static_cast<uint16_t*>(base),
                kType == DType::kBFloat16 ? float_to_bf16(x) : float_to_fp16(x));
}

// ---- into tiles ----
// Both return whether every element was finite: x - x is 0 (no bit set) if x is finite, else NaN.

FASTATTN_SIMD VecI not_finite(Vec x) { return bits_of(x - x); }

// to[r * ld + c] = factor * from(r, c); columns up to the next multiple of kWidth become 0.
FASTATTN_SHARED bool pack_rows(const Matrix& from, float factor, float* to, int64_t ld);

// to[c * ld + r] = factor * from(r, c); rows up to the next multiple of kWidth become 0.
FASTATTN_SIMD bool pack_transposed(const Matrix& from, float factor, float* to, int64_t ld) {
  return pack_rows(from.transposed(), factor, to, ld);
}

// ---- out of tiles ----

// to(r, c) = factor * row_factor[r] * from[r * ld + c]; row_factor may be nullptr.
FASTATTN_SHARED void unpack_rows(const float* from, int64_t ld, float factor,
                                 const float* row_factor, const Matrix& to);

// Likewise from a contiguous array, without reading past its last element.
FASTATTN_SHARED void unpack_dense(const float* from, const Matrix& to);
FASTATTN_SHARED void unpack_zeros(const Matrix& to);

FASTATTN_SHARED void fill(float* to, int64_t count, float value);

// Sums of many tiles are in double: a float would round after each tile.
FASTATTN_SIMD void zero_sums(double* to, int64_t count) {
  for (int64_t n = 0; n < count; ++n) to[n] = 0.;
}
// to += factor from. The factor may be beyond floats.
FASTATTN_SIMD void add_to_sums(const float* from, int64_t count, double factor, double* to) {
  for (int64_t n = 0; n < count; ++n) to[n] += static_cast<double>(from[n]) * factor;
}
// The same of rows of fp32.
FASTATTN_SIMD void add_rows(const float* from, int64_t ld, int64_t rows, int64_t cols, float factor,
                            float* to, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) to[r * stride + c] += factor * from[r * ld + c];
}
FASTATTN_SIMD void round_sums(const double* from, int64_t count, float* to) {
  for (int64_t n = 0; n < count; ++n) to[n] = static_cast<float>(from[n]);
}

// Gradients of a block of keys or values, summed over tiles of queries in fp32. Longer sums go on
// in double: every kTiles tiles, those in fp32 are added to them and begin anew (0033).
class LongSums {
 public:
  LongSums() = default;
  LongSums(Scratch& scratch, int64_t count, const AttentionParams& p, int64_t tile_rows)
      : data_(scratch.floats(count)) {
    const int64_t tiles = p.Hkv > 0 ? p.H / p.Hkv * ceil_div(p.M, tile_rows) : 0;
    if (tiles > kTiles) totals_ = scratch.of<double>(count);
  }

  float* data() const { return data_; }
  void clear(int64_t count) {
    count_ = count, tiles_ = 0;
    fill(data_, count, 0.f);
  }
  // Before a tile is added. `unit` is the factor of the sums.
  void begin_tile(float unit = 1.f) {
    if (++tiles_ <= kTiles || tiles_ % kTiles != 1) return;
    if (tiles_ == kTiles + 1) zero_sums(totals_, count_);
    add_to_sums(data_, count_, 1. / static_cast<double>(unit), totals_);
    fill(data_, count_, 0.f);
  }
  // After the last tile. Returns the factor of the sums from now on: `last` of long ones.
  float end(float unit = 1.f, float last = 1.f) {
    if (tiles_ <= kTiles) return unit;
    add_to_sums(data_, count_, 1. / static_cast<double>(unit), totals_);
    for (int64_t n = 0; n < count_; ++n)
      data_[n] = static_cast<float>(totals_[n] * static_cast<double>(last));
    return last;
  }

 private:
  static constexpr int64_t kTiles = 64;
  int64_t count_ = 0, tiles_ = 0;
  float* data_ = nullptr;
  double* totals_ = nullptr;
};

#ifdef FASTATTN_SHARED_CODE
template <DType kType>
static bool copy_rows(const Matrix& from, float factor, float* to, int64_t ld) {
  VecI probe{};
  const int64_t whole =
      from.stride_c == 1 ? from.cols / kWidth * kWidth : 0;  // columns that plain loads can read
  const int64_t ahead = prefetch_distance<kType>(from);
  for (int64_t r = 0; r < from.rows; ++r) {
    if (whole > 0) prefetch_rows<kType>(from, r + ahead, r + ahead + 1);
    const int64_t row = from.offset + r * from.stride_r;
    float* const to_row = to + r * ld;
    for (int64_t c = 0; c < whole; c += kWidth) {
      const Vec x = load_as<kType>(from.data, row + c);
      probe |= not_finite(x);
      store(to_row + c, x * factor);
    }
    for (int64_t c = whole; c < from.cols; c += kWidth) {
      const Vec x =
          load_strided<kType>(from.data, row + c * from.stride_c, from.stride_c, from.cols - c);
      probe |= not_finite(x);
      store(to_row + c, x * factor);
    }
  }
  return !any_lane(probe);
}

// kWidth x kWidth elements from (r, c), scaled. All exist, and rows are contiguous.
template <DType kType>
FASTATTN_SIMD VecI load_block(const Matrix& from, int64_t r, int64_t c, float factor,
                              Vec (&block)[kWidth]) {
  VecI probe{};
  const int64_t offset = from.offset + r * from.stride_r + c;
#pragma GCC unroll 16
  for (int lane = 0; lane < kWidth; ++lane) {
    block[lane] = load_as<kType>(from.data, offset + lane * from.stride_r);
    probe |= not_finite(block[lane]);
    block[lane] *= factor;
  }
  return probe;
}
// Likewise with any strides. Those that do not exist are 0.
template <DType kType>
static VecI load_edge(const Matrix& from, int64_t r, int64_t c, float factor,
                      Vec (&block)[kWidth]) {
  VecI probe{};
  const int64_t offset = from.offset + r * from.stride_r + c * from.stride_c;
#pragma GCC unroll 1
  for (int64_t lane = 0; lane < kWidth; ++lane) {
    Vec x{};
    if (r + lane < from.rows)
      x = load_strided<kType>(from.data, offset + lane * from.stride_r, from.stride_c,
                              from.cols - c);
    probe |= not_finite(x);
    block[lane] = x * factor;
  }
  return probe;
}

template <DType kType>
static bool transpose_rows(const Matrix& from, float factor, float* to, int64_t ld) {
  VecI probe{};
  const int64_t ahead = prefetch_distance<kType>(from);
  for (int64_t r = 0; r < from.rows; r += kWidth) {
    prefetch_rows<kType>(from, r + ahead, r + ahead + kWidth);
    for (int64_t c = 0; c < from.cols; c += kWidth) {
      Vec block[kWidth];
      const bool whole = from.stride_c == 1 && r + kWidth <= from.rows && c + kWidth <= from.cols;
      if (__builtin_expect(whole, 1)) {
        probe |= load_block<kType>(from, r, c, factor, block);
        transpose(block);
#pragma GCC unroll 16
        for (int lane = 0; lane < kWidth; ++lane) store(to + (c + lane) * ld + r, block[lane]);
      } else {
        probe |= load_edge<kType>(from, r, c, factor, block);
        transpose(block);
        const int64_t cols = min64(kWidth, from.cols - c);
#pragma GCC unroll 1
        for (int64_t lane = 0; lane < cols; ++lane) store(to + (c + lane) * ld + r, block[lane]);
      }
    }
  }
  return !any_lane(probe);
}

FASTATTN_SHARED bool pack_rows(const Matrix& from, float factor, float* to, int64_t ld) {
  bool finite = true;
  with_dtype(from.dtype, [&](auto type) {
    const bool columns_contiguous = from.stride_c != 1 && from.stride_r == 1;
    finite = columns_contiguous ? transpose_rows<type>(from.transposed(), factor, to, ld)
                                : copy_rows<type>(from, factor, to, ld);
  });
  return finite;
}

// row(r)(c) are the elements from (r, c) on.
template <typename Row>
FASTATTN_SIMD void unpack(const Matrix& to, Row row) {
  with_dtype(to.dtype, [&](auto type) {
    const int64_t whole = to.stride_c == 1 ? to.cols / kWidth * kWidth : 0;
    for (int64_t r = 0; r < to.rows; ++r) {
      const int64_t offset = to.offset + r * to.stride_r;
      const auto from = row(r);
      for (int64_t c = 0; c < whole; c += kWidth) store_as<type>(to.data, offset + c, from(c));
      for (int64_t c = whole; c < to.cols; c += kWidth)
        store_strided<type>(to.data, offset + c * to.stride_c, to.stride_c, to.cols - c, from(c));
    }
  });
}

FASTATTN_SHARED void unpack_rows(const float* from, int64_t ld, float factor,
                                 const float* row_factor, const Matrix& to) {
  unpack(to, [=](int64_t r) {
    const Vec scale = splat(row_factor == nullptr ? factor : factor * row_factor[r]);
    return [=, from = from + r * ld](int64_t c) { return load(from + c) * scale; };
  });
}

FASTATTN_SHARED void unpack_dense(const float* from, const Matrix& to) {
  const int64_t cols = to.cols;
  unpack(to, [=](int64_t r) {
    return [=](int64_t c) { return load_first<DType::kFloat32>(from, r * cols + c, cols - c); };
  });
}

FASTATTN_SHARED void unpack_zeros(const Matrix& to) {
  unpack(to, [](int64_t) { return [](int64_t) { return Vec{}; }; });
}

FASTATTN_SHARED void fill(float* to, int64_t count, float value) {
  for (int64_t n = 0; n < count; ++n) to[n] = value;
}
#endif  // FASTATTN_SHARED_CODE

}  // namespace fastattn::FASTATTN_ISA
