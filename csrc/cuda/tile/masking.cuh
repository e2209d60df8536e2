// The mask, the bias and the dropout of a tile of scores. problem/mask.h alone defines masks.
//
// A tile is empty (nothing is computed or read), full (no mask code runs), or has one bit a pair. A
// mask selects and is never added: NaN + -inf is NaN.
//
// All code is written once for any Layout. The Layout says which pairs of the tile a thread holds:
// its x-th query is query0() + query(x), its y-th key is key0() + key(y). pair(x, y) is the number
// of a pair: its bit, and its place [pair / 4][pair % 4] in the thread's values. Keys come in runs
// of kKeyRun neighbours, which share a block of dropout's bits. Runs are kRunStep apart.
//
// Pairs lie in kLines lines, each of one query, or of one key if kLinesAreKeys. before(end) are the
// bits of line 0 up to column `end` of the tile. Line n has the same bits, n * kLineBits higher.
#pragma once

#include "cuda/tile/spans.cuh"
#include "problem/philox.h"

namespace fastattn::cuda {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2e = 1.44269504088896341f;

using KeepBits = uint32_t;  // bit n says that this thread's pair n is kept
constexpr KeepBits kAllKept = ~KeepBits{0};

FASTATTN_DEVICE bool kept(KeepBits bits, int pair) { return bits >> pair & 1; }
// For the value [r][c].
FASTATTN_DEVICE bool kept(KeepBits bits, int r, int c) { return kept(bits, 4 * r + c); }
// The lowest n <= 32 bits.
FASTATTN_DEVICE KeepBits lowest_bits(int n) {
  return static_cast<KeepBits>((uint64_t{1} << n) - 1);
}

// The layout of a Fragment (tile.cuh).
struct FragmentLayout {
  static constexpr int kQueries = kRows, kKeys = kCols, kKeyRun = kCols, kRunStep = 0;
  static constexpr int kLines = kRows, kLineBits = kCols;
  static constexpr bool kLinesAreKeys = false;
  FASTATTN_DEVICE int query0() { return row0(); }
  FASTATTN_DEVICE int key0() { return col0(); }
  FASTATTN_DEVICE constexpr int query(int x) { return x; }
  FASTATTN_DEVICE constexpr int key(int y) { return y; }
  FASTATTN_DEVICE constexpr int pair(int x, int y) { return x * kKeys + y; }
  FASTATTN_DEVICE KeepBits before(int end) { return lowest_bits(min(max(end - col0(), 0), kCols)); }
};

// A thread's values, one a pair.
template <typename Layout>
using Pairs = float[Layout::kQueries * Layout::kKeys / 4][4];

// Replaces the weights of masked pairs.
FASTATTN_DEVICE void take_out_masked(KeepBits bits, Fragment& weights) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) weights[r][c] = kept(bits, r, c) ? weights[r][c] : kNoWeight;
}

// ---- logits ----
//
// Without a bias, the logit of a score is the score itself, or what a curve puts in its place. With
// a bias it is natural: rounded once, as a sum. A weight is 2^(unit (logit - maximum)): the
// difference is exact where a weight counts, and no compiler contracts it. The CPU and Triton have
// the same rule (docs/decisions/0009-one-rounding-of-a-logit.md).

// A scale of 0 or less turns the order of scores: those logits are natural too.
FASTATTN_FN bool logits_are_scores(const AttentionParams& p) {
  return p.bias.data == nullptr && natural_of_score(p) > 0.f;
}
// The natural logit of a logit of 1: shift_unit in fastattn/backends/_gpu.py.
FASTATTN_FN float natural_of_logit(const AttentionParams& p) {
  return logits_are_scores(p) ? natural_of_score(p) : 1.f;
}
// A unit of 0 would make NaN of -inf, and so would an infinite one of 0.
FASTATTN_FN float unit_of(const AttentionParams& p) {
  return fmaxf(0x1p-126f, fminf(0x1p126f, natural_of_logit(p) * kLog2e));
}

// ---- masks ----

// Where limits vary by row, only the table of each query tile's keys can tell what is outside, or
// full. A line of it that stayed in registers over a loop would spill.
FASTATTN_DEVICE const TileSpan& keys_of_tile(const AttentionParams& p, const Place& at,
                                             const TileSpan* table) {
  return table[opaque_here(at.b) * ceil_div(p.M, kTile) + at.i0 / kTile];
}

// From the first to the last key that some of the queries keep.
FASTATTN_DEVICE KeyRange visited_keys(const AttentionParams& p, const Place& at,
                                      const TileSpan* table) {
  if (table == nullptr) return tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  const Span some = keys_of_tile(p, at, table).some;
  return {some.begin, some.end};
}

FASTATTN_DEVICE bool is_outside(const AttentionParams& p, const Place& at, const TileSpan* table) {
  if (limits_vary_by_row(p.mask))
    return table != nullptr && !meets(keys_of_tile(p, at, table).some, at.j0);
  const KeyRange keys = tile_range(p.mask, p.N, at.b, at.i0, at.i0 + at.rows);
  return keys.begin >= at.j0 + at.cols || keys.end <= at.j0;
}

FASTATTN_DEVICE bool is_full(const AttentionParams& p, const Place& at, const TileSpan* table) {
  if (has_dense(p.mask) || !logits_are_scores(p)) return false;
  if (at.rows < kTile || at.cols < kTile) return false;
  if (limits_vary_by_row(p.mask))
    return table != nullptr && holds(keys_of_tile(p, at, table).all, at.j0);
  return intervals_hold(p.mask, p.N, at.b, at.i0, at.i0 + kTile, at.j0, at.j0 + kTile);
}

// Calls f(pair, offset) for those pairs of this thread whose bit is set, in an array [queries,
// keys]. kUnrolled is for callers that index registers with the pair. One offset moves along; an
// offset for each pair would take 64 registers.
template <typename Layout, bool kUnrolled, typename F>
__device__ __forceinline__ void for_kept(KeepBits bits, int64_t offset, int64_t stride_m,
                                         int64_t stride_n, F f) {
  offset = opaque(offset + Layout::query0() * stride_m + Layout::key0() * stride_n);
#pragma unroll(kUnrolled ? Layout::kQueries : 1)
  for (int x = 0; x < Layout::kQueries; ++x) {
    int64_t where = opaque(offset + Layout::query(x) * stride_m);
#pragma unroll(kUnrolled ? Layout::kKeys : 1)
    for (int y = 0; y < Layout::kKeys; y += Layout::kKeyRun) {
#pragma unroll
      for (int n = 0; n < Layout::kKeyRun; ++n)
        if (const int pair = Layout::pair(x, y + n); kept(bits, pair))
          f(pair, where + n * stride_n);
      where += Layout::kRunStep * stride_n;
    }
  }
}

// The pairs of this thread within rows x cols.
template <typename Layout>
FASTATTN_DEVICE KeepBits bits_within(int rows, int cols) {
  KeepBits bits = 0;
#pragma unroll
  for (int x = 0; x < Layout::kQueries; ++x)
#pragma unroll
    for (int y = 0; y < Layout::kKeys; ++y)
      if (Layout::query0() + Layout::query(x) < rows && Layout::key0() + Layout::key(y) < cols)
        bits |= KeepBits{1} << Layout::pair(x, y);
  return bits;
}

// Writes the values within rows x cols to an array, whose tile begins at element `offset`.
template <typename Layout>
FASTATTN_DEVICE void store_tile(const View& view, int64_t offset, int rows, int cols,
                                const Pairs<Layout>& s) {
  const KeepBits inside = bits_within<Layout>(rows, cols);
  with_dtype(view.dtype, [&](auto type) {
    for_kept<Layout, true>(
        inside, offset, view.stride_r, view.stride_c,
        [&](int pair, int64_t where) { store_as<type>(view.data, where, s[pair / 4][pair % 4]); });
  });
}

// A part of a tile's rows, or of its columns.
struct TilePart {
  int begin, end;
};
FASTATTN_DEVICE TilePart part_of_tile(int64_t begin, int64_t end, int64_t first, int size) {
  return {static_cast<int>(min64(kTile, max64(0, begin - first))),
          static_cast<int>(max64(0, min64(size, end - first)))};
}
// The keys of the tile that the intervals leave to a query.
FASTATTN_DEVICE TilePart keys_of_query(const AttentionParams& p, const Place& at, int query) {
  if (query >= at.rows) return {0, 0};
  const KeyRange row = row_range(p.mask, p.N, at.b, at.i0 + query);
  return part_of_tile(row.begin, row.end, at.j0, at.cols);
}
// The queries of the tile whose intervals hold a key. Limits that vary by row have no such part.
FASTATTN_DEVICE TilePart queries_of_key(const AttentionParams& p, const Place& at, int key) {
  if (key >= at.cols) return {0, 0};
  const int64_t j = at.j0 + key;
  const RowRange rows = rows_of_keys(p.mask, p.M, p.N, at.b, j, j + 1);
  return part_of_tile(rows.begin, rows.end, at.i0, at.rows);
}

template <typename Layout>
FASTATTN_DEVICE KeepBits bits_in_ranges(const AttentionParams& p, const Place& at) {
  KeepBits bits = 0;
  if (Layout::kLinesAreKeys && limits_vary_by_row(p.mask)) {
#pragma unroll 1
    for (int x = 0; x < Layout::kQueries; ++x) {
      const TilePart keys = keys_of_query(p, at, Layout::query0() + Layout::query(x));
      for (int y = 0; y < Layout::kKeys; ++y) {
        const int key = Layout::key0() + Layout::key(y);
        if (keys.begin <= key && key < keys.end) bits |= KeepBits{1} << Layout::pair(x, y);
      }
    }
    return bits;
  }
#pragma unroll 1
  for (int n = 0; n < Layout::kLines; ++n) {
    const TilePart part = Layout::kLinesAreKeys
                              ? queries_of_key(p, at, Layout::key0() + Layout::key(n))
                              : keys_of_query(p, at, Layout::query0() + Layout::query(n));
    bits |= (Layout::before(part.end) & ~Layout::before(part.begin)) << n * Layout::kLineBits;
  }
  return bits;
}

// Of these pairs, those that the dense mask keeps.
template <typename Layout>
FASTATTN_DEVICE KeepBits read_dense(const AttentionParams& p, const Place& at, KeepBits bits) {
  const DenseMask dense = dense_from(p.mask, at.b, at.h, at.i0, at.j0);
  const KeepBits inside = bits;
  for_kept<Layout, false>(inside, dense.offset, dense.stride_m, dense.stride_n,
                          [&](int pair, int64_t where) {
                            if (dense.data[where] == 0) bits &= ~(KeepBits{1} << pair);
                          });
  return bits;
}

// Tests on a CPU count the tiles that blocks visit, those that lie outside the mask, and those that
// a group of threads masks.
FASTATTN_DEVICE void count_tile([[maybe_unused]] bool outside) {
#if defined(FASTATTN_CUDA_ON_CPU)
  if (threadIdx.x == 0) ++cuda_on_cpu::visited_tiles[outside];
#endif
}
FASTATTN_DEVICE void count_masked_tile() {
#if defined(FASTATTN_CUDA_ON_CPU)
  if (threadIdx.x % kThreads == 0) ++cuda_on_cpu::masked_tiles;
#endif
}

// The pairs that are kept of those in the intervals. dense_of(pairs) is like read_dense(), for who
// knows the dense mask otherwise.
template <typename Layout, typename DenseOf>
FASTATTN_DEVICE KeepBits partial_bits(const AttentionParams& p, const Place& at, KeepBits bits,
                                      DenseOf dense_of) {
  count_masked_tile();
  if (has_dense(p.mask)) bits &= dense_of(bits);
  const KeepBits inside = bits;
  const auto drop = [&](int pair) { bits &= ~(KeepBits{1} << pair); };
  if (p.bias.data != nullptr) {
    const int64_t offset = offset_of(p.bias, at.b, at.h, at.i0, at.j0);
    with_dtype(p.bias.dtype, [&](auto type) {
      for_kept<Layout, false>(inside, offset, p.bias.stride_r, p.bias.stride_c,
                              [&](int pair, int64_t where) {
                                if (load_as<type>(p.bias.data, where) == -kInfinity) drop(pair);
                              });
    });
  }
  return bits;
}
template <typename Layout>
FASTATTN_DEVICE KeepBits partial_bits(const AttentionParams& p, const Place& at) {
  return partial_bits<Layout>(p, at, bits_in_ranges<Layout>(p, at),
                              [&](KeepBits pairs) { return read_dense<Layout>(p, at, pairs); });
}

struct TileMask {
  KeepBits bits;
  bool empty, full;  // the same for all threads
};

// Every thread of the block must call this: unless the tile is full, it contains a barrier.
// `table`: Spans::keys, if there is one.
template <typename Layout>
FASTATTN_DEVICE TileMask mask_tile(const AttentionParams& p, const Place& at,
                                   const TileSpan* table = nullptr) {
  const bool outside = is_outside(p, at, table);
  count_tile(outside);
  if (outside) return {0, true, false};
  if (is_full(p, at, table)) return {kAllKept, false, true};
  const KeepBits bits = partial_bits<Layout>(p, at);
  return {bits, __syncthreads_or(bits != 0) == 0, false};
}

// ---- bias ----

// Scores become logits, where they are not yet. Masked pairs are the caller's.
template <typename Layout>
FASTATTN_DEVICE void make_logits(const AttentionParams& p, const Place& at, KeepBits bits,
                                 Pairs<Layout>& s) {
  if (logits_are_scores(p)) return;
  const float scale = natural_of_score(p);
  if (p.bias.data == nullptr) {
#pragma unroll
    for (int n = 0; n < Layout::kQueries * Layout::kKeys; ++n)
      s[n / 4][n % 4] = __fmul_rn(s[n / 4][n % 4], scale);
    return;
  }
  const int64_t offset = offset_of(p.bias, at.b, at.h, at.i0, at.j0);
  with_dtype(p.bias.dtype, [&](auto type) {
    for_kept<Layout, true>(bits, offset, p.bias.stride_r, p.bias.stride_c,
                           [&](int pair, int64_t where) {
                             float& x = s[pair / 4][pair % 4];
                             x = fmaf(x, scale, load_as<type>(p.bias.data, where));
                           });
  });
}

// Calls f(pair, dW_ij) for the kept pairs of the gradient of the returned weights, if given.
template <typename Layout, DType kType, typename F>
__device__ __forceinline__ void for_grad_weights(const BackwardParams& p, const Place& at,
                                                 KeepBits bits, F f) {
  const View& view = p.grad_weights;
  if (view.data == nullptr) return;
  const bool mean = p.weights_mode == WeightsMode::kMean;
  const float share = mean ? 1.f / static_cast<float>(p.H) : 1.f;
  const int64_t offset = offset_of(view, at.b, mean ? 0 : at.h, at.i0, at.j0);
  for_kept<Layout, true>(bits, offset, view.stride_r, view.stride_c, [&](int pair, int64_t where) {
    f(pair, load_as<kType>(view.data, where) * share);
  });
}

// ---- dropout ----

// Read where bits are drawn: kept across the loops, the seed would take two registers.
FASTATTN_DEVICE uint64_t seed_of(const DropoutParams& dropout) {
  return dropout.seed_ptr == nullptr ? dropout.seed : static_cast<uint64_t>(*dropout.seed_ptr);
}

// Four keys from j / 4 * 4 on share a block of bits.
FASTATTN_DEVICE PhiloxBlock random_block(const DropoutParams& dropout, uint64_t seed, int64_t b,
                                         int64_t h, int64_t i, int64_t j) {
  const Counters at = counters_of(dropout, b, h, i, j);
  return philox4x32(seed, at.j4, at.i, at.h, at.b);
}

// Selects instead of indexing, which would put the words into memory.
FASTATTN_DEVICE uint32_t random_word(const PhiloxBlock& block, int n) {
  const uint32_t low = n % 2 == 0 ? block.word[0] : block.word[1];
  const uint32_t high = n % 2 == 0 ? block.word[2] : block.word[3];
  return n < 2 ? low : high;
}

// at.b. On sm_80 a loop that kept its sum with the origin would spill that register.
FASTATTN_DEVICE int64_t own_sample(const Place& at) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return opaque_here(static_cast<int>(at.b));
#else
  return at.b;
#endif
}

// The pairs that dropout keeps: all, if there is none.
template <typename Layout>
FASTATTN_DEVICE KeepBits surviving_bits(const AttentionParams& p, const Place& at) {
  if (!p.dropout.enabled) return kAllKept;
  const uint64_t seed = seed_of(p.dropout);
  KeepBits bits = 0;
  constexpr int kRuns = Layout::kKeys / Layout::kKeyRun;
#pragma unroll 1  // one block of bits at a time: many of them would take all registers
  for (int run = 0; run < Layout::kQueries * kRuns; ++run) {
    const int x = run / kRuns, y = run % kRuns * Layout::kKeyRun;
    const int key = Layout::key0() + Layout::key(y);
    const PhiloxBlock block =
        random_block(p.dropout, seed, own_sample(at), at.h,
                     at.i0 + Layout::query0() + Layout::query(x), at.j0 + key);
#pragma unroll
    for (int n = 0; n < Layout::kKeyRun; ++n)
      if (random_word(block, key % 4 + n) >= p.dropout.threshold)
        bits |= KeepBits{1} << Layout::pair(x, y + n);
  }
  return bits;
}

// x times 0 or 1 / (1 - p).
FASTATTN_DEVICE float dropped(const AttentionParams& p, bool survives, float x) {
  return survives ? x * p.dropout.scale : 0.f;
}

template <int kQuads>
FASTATTN_DEVICE void drop(const AttentionParams& p, KeepBits survivors, float (&x)[kQuads][4]) {
  if (!p.dropout.enabled) return;
#pragma unroll
  for (int n = 0; n < 4 * kQuads; ++n)
    x[n / 4][n % 4] = dropped(p, kept(survivors, n), x[n / 4][n % 4]);
}

}  // namespace fastattn::cuda
