// What is not arithmetic in a tile of tensor-core scores: kept pairs, bias, dropout, for the sums
// of sdpa_tile.cuh as mask_tile.cuh has it for the fragments of tile.cuh. What is empty or full is
// decided there, what a mask means in common/mask.h.
#pragma once

#include "cuda/mask_tile.cuh"
#include "cuda/sdpa_tile.cuh"

namespace fastattn::cuda {

// Tiles come with queries by rows, or transposed, with keys by rows.
template <bool kTransposed>
FASTATTN_DEVICE int pair_query(int n, int v) {
  return kTransposed ? sum_col(n, v) : sum_row(v);
}
template <bool kTransposed>
FASTATTN_DEVICE int pair_key(int n, int v) {
  return kTransposed ? sum_row(v) : sum_col(n, v);
}

// Bit 4 n + v says that this thread's pair (n, v) is kept.
static_assert(kScoreTiles * 4 == 32);
FASTATTN_DEVICE bool kept_pair(KeepBits bits, int n, int v) { return bits >> (4 * n + v) & 1; }

// Calls f(n, v, offset) for this thread's pairs whose bit is set, in an array [queries, keys].
// kUnrolled: n and v are constants.
template <bool kTransposed, bool kUnrolled, typename F>
__device__ __forceinline__ void for_kept_pairs(KeepBits bits, int64_t offset, int64_t stride_m,
                                               int64_t stride_n, F f) {
  const int64_t stride_r = kTransposed ? stride_n : stride_m;
  const int64_t stride_c = kTransposed ? stride_m : stride_n;
#pragma unroll(kUnrolled ? 2 : 1)
  for (int half = 0; half < 4; half += 2) {
    // One offset that moves along: 32 of them would be kept in registers.
    int64_t where = offset + sum_row(half) * stride_r + sum_col(0, 0) * stride_c;
#pragma unroll(kUnrolled ? kScoreTiles : 1)
    for (int n = 0; n < kScoreTiles; ++n) {
      if (kept_pair(bits, n, half)) f(n, half, where);
      if (kept_pair(bits, n, half + 1)) f(n, half + 1, where + stride_c);
      where += 8 * stride_c;
    }
  }
}

template <bool kTransposed>
FASTATTN_DEVICE KeepBits pairs_in_ranges(const AttentionParams& p, const Place& at) {
  KeepBits bits = 0;
  // Pairs (n, v) with the same query are neighbours in n, or, transposed, v and v + 2.
  constexpr int kQueries = kTransposed ? 2 * kScoreTiles : 2;
#pragma unroll 1
  for (int q = 0; q < kQueries; ++q) {
    const int n0 = kTransposed ? q / 2 : 0, v0 = kTransposed ? q % 2 : 2 * q;
    const int query = pair_query<kTransposed>(n0, v0);
    if (query >= at.rows) continue;
    const KeyRange row = row_range(p.mask, p.N, at.b, at.i0 + query);
    const int begin = static_cast<int>(min64(kTile, max64(0, row.begin - at.j0)));
    const int end = static_cast<int>(max64(0, min64(at.cols, row.end - at.j0)));
    for (int k = 0; k < 32 / kQueries; ++k) {
      const int n = kTransposed ? n0 : k / 2, v = kTransposed ? v0 + 2 * k : v0 + k % 2;
      const int key = pair_key<kTransposed>(n, v);
      if (begin <= key && key < end) bits |= KeepBits{1} << (4 * n + v);
    }
  }
  return bits;
}

template <bool kTransposed>
FASTATTN_DEVICE KeepBits partial_pairs(const AttentionParams& p, const Place& at) {
  const KeepBits inside = pairs_in_ranges<kTransposed>(p, at);
  KeepBits bits = inside;
  const auto drop = [&](int n, int v) { bits &= ~(KeepBits{1} << (4 * n + v)); };
  if (p.mask.keep != nullptr) {
    const MaskParams& m = p.mask;
    const int64_t offset = at.b * m.keep_stride_b + at.h * m.keep_stride_h +
                           at.i0 * m.keep_stride_m + at.j0 * m.keep_stride_n;
    for_kept_pairs<kTransposed, false>(inside, offset, m.keep_stride_m, m.keep_stride_n,
                                       [&](int n, int v, int64_t where) {
                                         if (m.keep[where] == 0) drop(n, v);
                                       });
  }
  if (p.bias.data != nullptr) {
    const int64_t offset = offset_of(p.bias, at.b, at.h, at.i0, at.j0);
    with_dtype(p.bias.dtype, [&](auto type) {
      for_kept_pairs<kTransposed, false>(inside, offset, p.bias.stride_r, p.bias.stride_c,
                                         [&](int n, int v, int64_t where) {
                                           if (load_as<type>(p.bias.data, where) == -kInfinity)
                                             drop(n, v);
                                         });
    });
  }
  return bits;
}

// Every thread of the block must call it: unless the tile is full, it is a barrier.
template <bool kTransposed>
FASTATTN_DEVICE TileMask mask_pairs(const AttentionParams& p, const Place& at) {
  if (is_outside(p, at)) return {0, true, false};
  if (is_full(p, at)) return {kAllKept, false, true};
  const KeepBits bits = partial_pairs<kTransposed>(p, at);
  return {bits, __syncthreads_or(bits != 0) == 0, false};
}

template <bool kTransposed>
FASTATTN_DEVICE void add_bias_pairs(const AttentionParams& p, const Place& at, KeepBits bits,
                                    Scores& s) {
  if (p.bias.data == nullptr) return;
  const int64_t offset = offset_of(p.bias, at.b, at.h, at.i0, at.j0);
  with_dtype(p.bias.dtype, [&](auto type) {
    for_kept_pairs<kTransposed, true>(bits, offset, p.bias.stride_r, p.bias.stride_c,
                                      [&](int n, int v, int64_t where) {
                                        s[n][v] += in_log2(load_as<type>(p.bias.data, where));
                                      });
  });
}

// The pairs that dropout keeps.
template <bool kTransposed>
FASTATTN_DEVICE KeepBits surviving_pairs(const AttentionParams& p, const Place& at) {
  KeepBits bits = 0;
  const uint64_t seed = seed_of(p.dropout);
  // By rows, two pairs share a counter, with two of the neighbour lane; transposed, none do.
  constexpr int kShared = kTransposed ? 1 : 2;
#pragma unroll 1  // one block of bits at a time: 16 of them would take all registers
  for (int k = 0; k < 32 / kShared; ++k) {
    const int n = k * kShared / 4, v = k * kShared % 4;
    const int64_t key = at.j0 + pair_key<kTransposed>(n, v);
    const PhiloxBlock words =
        philox4x32(seed, static_cast<uint32_t>(key / 4),
                   static_cast<uint32_t>(at.i0 + pair_query<kTransposed>(n, v)),
                   static_cast<uint32_t>(at.h), static_cast<uint32_t>(at.b));
#pragma unroll
    for (int i = 0; i < kShared; ++i) {
      const uint32_t low = key % 2 + i == 0 ? words.word[0] : words.word[1];
      const uint32_t high = key % 2 + i == 0 ? words.word[2] : words.word[3];
      const uint32_t word = key % 4 >= 2 ? high : low;
      if (word >= p.dropout.threshold) bits |= KeepBits{1} << (4 * n + v + i);
    }
  }
  return bits;
}

// Multiplies by 0 or 1 / (1 - p).
FASTATTN_DEVICE void drop_pairs(const AttentionParams& p, KeepBits survivors, Scores& s) {
  if (!p.dropout.enabled) return;
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
    for (int v = 0; v < 4; ++v)
      s[n][v] = kept_pair(survivors, n, v) ? s[n][v] * p.dropout.scale : 0.f;
}

}  // namespace fastattn::cuda
