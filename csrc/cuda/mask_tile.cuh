// What is not arithmetic in a tile of scores: which pairs are kept, what bias they get, which
// weights dropout keeps. common/mask.h alone knows what a mask means.
//
// A tile is empty (nothing of it is computed or read), full (no mask code runs), or has a bit a
// pair. A mask selects, it is never added: NaN + -inf is NaN.
#pragma once

#include "common/philox.h"
#include "cuda/reduce.cuh"

namespace fastattn::cuda {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;

// Bit r * kCols + c says that this thread's pair (r, c) is kept.
using KeepBits = uint32_t;
constexpr KeepBits kAllKept = ~KeepBits{0};
static_assert(kRows * kCols == 32);

FASTATTN_DEVICE bool kept(KeepBits bits, int r, int c) { return bits >> (r * kCols + c) & 1; }

// Intervals of keys move one way with the row, unless their lengths are ragged: then the first and
// the last row do not speak for all.
FASTATTN_DEVICE bool is_ragged(const MaskParams& mask) {
  return mask.kv_len != nullptr && mask.kv_len_stride_m != 0;
}

FASTATTN_DEVICE bool is_outside(const AttentionParams& p, const Place& at) {
  if (is_ragged(p.mask)) return false;
  const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  return keys.begin >= at.j0 + at.cols || keys.end <= at.j0;
}

FASTATTN_DEVICE bool is_full(const AttentionParams& p, const Place& at) {
  if (is_ragged(p.mask) || p.mask.keep != nullptr || p.bias.data != nullptr) return false;
  if (at.rows < kTile || at.cols < kTile) return false;
  const KeyRange first = row_range(p.mask, p.N, at.b, at.i0);
  const KeyRange last = row_range(p.mask, p.N, at.b, at.i0 + kTile - 1);
  return last.begin <= at.j0 && at.j0 + kTile <= first.end;
}

// Calls f(r, c, offset) for this thread's pairs whose bit is set. kUnrolled is for those who index
// a fragment with r and c; it takes registers for 32 addresses.
template <bool kUnrolled, typename F>
__device__ __forceinline__ void for_kept(KeepBits bits, int64_t offset, int64_t stride_r,
                                         int64_t stride_c, F f) {
  offset = opaque(offset + row0() * stride_r + col0() * stride_c);
#pragma unroll(kUnrolled ? kRows : 1)
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c)
      if (kept(bits, r, c)) f(r, c, offset + c * stride_c);
    offset += stride_r;
  }
}

FASTATTN_DEVICE KeepBits bits_in_ranges(const AttentionParams& p, const Place& at) {
  KeepBits bits = 0;
#pragma unroll 1
  for (int r = 0; r < kRows && row0() + r < at.rows; ++r) {
    const KeyRange row = row_range(p.mask, p.N, at.b, at.i0 + row0() + r);
    const int64_t j = at.j0 + col0();
    for (int c = 0; c < kCols; ++c)
      if (row.begin <= j + c && j + c < row.end) bits |= KeepBits{1} << (r * kCols + c);
  }
  return bits;
}

FASTATTN_DEVICE KeepBits partial_bits(const AttentionParams& p, const Place& at) {
  const KeepBits inside = bits_in_ranges(p, at);
  KeepBits bits = inside;
  const auto drop = [&](int r, int c) { bits &= ~(KeepBits{1} << (r * kCols + c)); };
  if (p.mask.keep != nullptr) {
    const MaskParams& m = p.mask;
    const int64_t offset = at.b * m.keep_stride_b + at.h * m.keep_stride_h +
                           at.i0 * m.keep_stride_m + at.j0 * m.keep_stride_n;
    for_kept<false>(inside, offset, m.keep_stride_m, m.keep_stride_n, [&](int r, int c, int64_t n) {
      if (m.keep[n] == 0) drop(r, c);
    });
  }
  if (p.bias.data != nullptr) {
    const int64_t offset = offset_of(p.bias, at.b, at.h, at.i0, at.j0);
    with_dtype(p.bias.dtype, [&](auto type) {
      for_kept<false>(inside, offset, p.bias.stride_r, p.bias.stride_c,
                      [&](int r, int c, int64_t n) {
                        if (load_as<type>(p.bias.data, n) == -kInfinity) drop(r, c);
                      });
    });
  }
  return bits;
}

struct TileMask {
  KeepBits bits;
  bool empty, full;  // the same for all threads
};

// Every thread of the block must call it: unless the tile is full, it is a barrier.
FASTATTN_DEVICE TileMask mask_tile(const AttentionParams& p, const Place& at) {
  if (is_outside(p, at)) return {0, true, false};
  if (is_full(p, at)) return {kAllKept, false, true};
  const KeepBits bits = partial_bits(p, at);
  return {bits, __syncthreads_or(bits != 0) == 0, false};
}

// ---- bias ----

// bias * log2(e). Only -inf masks: the most negative finite numbers, popular as mask values, must
// not overflow to it, nor the largest to +inf.
FASTATTN_DEVICE float in_log2(float bias) {
  const float scaled = bias * kLog2e;
  return is_finite(bias) ? fmaxf(-3.402823466e38f, fminf(3.402823466e38f, scaled)) : bias;
}

FASTATTN_DEVICE void add_bias(const AttentionParams& p, const Place& at, KeepBits bits,
                              Fragment& s) {
  if (p.bias.data == nullptr) return;
  const int64_t offset = offset_of(p.bias, at.b, at.h, at.i0, at.j0);
  with_dtype(p.bias.dtype, [&](auto type) {
    for_kept<true>(bits, offset, p.bias.stride_r, p.bias.stride_c, [&](int r, int c, int64_t n) {
      s[r][c] += in_log2(load_as<type>(p.bias.data, n));
    });
  });
}

// ---- dropout ----

// Read where bits are drawn: kept over the loops it would take two registers.
FASTATTN_DEVICE uint64_t seed_of(const DropoutParams& dropout) {
  return dropout.seed_ptr == nullptr ? dropout.seed : static_cast<uint64_t>(*dropout.seed_ptr);
}

// Multiplies row r of a fragment by 0 or 1 / (1 - p): one block of bits for its kCols keys.
static_assert(kCols == 4);
FASTATTN_DEVICE void drop_row(const AttentionParams& p, const Place& at, int r, float (&x)[kCols]) {
  if (!p.dropout.enabled) return;
  const PhiloxBlock words =
      philox4x32(seed_of(p.dropout), static_cast<uint32_t>((at.j0 + col0()) / 4),
                 static_cast<uint32_t>(at.i0 + row0() + r), static_cast<uint32_t>(at.h),
                 static_cast<uint32_t>(at.b));
#pragma unroll
  for (int c = 0; c < kCols; ++c)
    x[c] = words.word[c] >= p.dropout.threshold ? x[c] * p.dropout.scale : 0.f;
}

}  // namespace fastattn::cuda
