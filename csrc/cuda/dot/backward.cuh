// What the kernels of the backward pass of scaled dot-product attention share: the shared memory of
// a block, the stats of its rows, W and dS of a tile. backward.cu has the formulas.
#pragma once

#include "cuda/dot/step.cuh"

namespace fastattn::cuda {

// Stats of the queries of a tile; factor is 0 past the last one.
struct RowMemory {
  float shift[kTile], factor[kTile], delta[kTile];
};

template <int kDim>
struct __align__(16) GradMemory {
  uint16_t q[kTile * kDim], grad_out[kTile * kDim];
  uint16_t k[kTile * kDim], v[kTile * kDim];
  uint32_t bad_rows[kWarps];
  RowMemory rows;
  Span visited;  // the rows that keys visit
};

// Starts copying row `row` of a query tile, whose first row has this number.
template <bool kDelta, typename Number>
FASTATTN_DEVICE void start_row(const BackwardParams& p, const Place& at, Number first, int row,
                               RowMemory& rows) {
  if (row >= at.rows) {
    rows.shift[row] = rows.factor[row] = rows.delta[row] = 0.f;
    return;
  }
  const Number number = first + static_cast<Number>(row);
  const float* const stats = p.stats + int64_t{2} * number;
  copy_async<4>(&rows.shift[row], stats);
  copy_async<4>(&rows.factor[row], stats + 1);
  if (kDelta) copy_async<4>(&rows.delta[row], static_cast<const float*>(p.workspace) + number);
}
// All of them. The copies are done after wait_for_copies() and a barrier.
template <bool kDelta>
FASTATTN_DEVICE void start_rows(const BackwardParams& p, const Place& at, RowMemory& rows) {
  if (thread() < kTile) start_row<kDelta>(p, at, query_number(p, at, 0), thread(), rows);
}

// Turns scores into P, before dropout: exactly 0 where masked, even if the row is NaN.
template <typename Layout>
FASTATTN_DEVICE void known_pairs(const RowMemory& rows, float unit, KeepBits bits,
                                 Pairs<Layout>& s) {
#pragma unroll
  for (int x = 0; x < Layout::kQueries; ++x) {
    const int query = Layout::query0() + Layout::query(x);
    const float shift = rows.shift[query], factor = rows.factor[query];
#pragma unroll
    for (int y = 0; y < Layout::kKeys; ++y) {
      const int n = Layout::pair(x, y);
      const float weight = known_weight(s[n / 4][n % 4], shift, factor, unit);
      s[n / 4][n % 4] = kept(bits, n) ? weight : 0.f;
    }
  }
}

// dW of the kept pairs; 0 elsewhere, or if dW is not given.
template <typename Layout, DType kType>
FASTATTN_DEVICE void load_grad_weights(const BackwardParams& p, const Place& at, KeepBits bits,
                                       Pairs<Layout>& to) {
  clear(to);
  with_half<kType>(p.grad_weights.dtype, [&](auto type) {
    for_grad_weights<Layout, type>(p, at, bits,
                                   [&](int pair, float grad) { to[pair / 4][pair % 4] = grad; });
  });
}

// Turns dp = dO V^T + dW into dP - delta.
template <typename Layout>
FASTATTN_DEVICE void subtract_delta(const BackwardParams& p, KeepBits survivors,
                                    const RowMemory& rows, Pairs<Layout>& dp) {
  drop(p, survivors, dp);
#pragma unroll
  for (int x = 0; x < Layout::kQueries; ++x) {
    const float delta = rows.delta[Layout::query0() + Layout::query(x)];
#pragma unroll
    for (int y = 0; y < Layout::kKeys; ++y) {
      const int n = Layout::pair(x, y);
      dp[n / 4][n % 4] -= delta;
    }
  }
}

// Turns P and dp, which is dP after dropout, into dS: exactly 0 where masked. If kSubtracted, dp
// has been through subtract_delta().
template <typename Layout, bool kSubtracted>
FASTATTN_DEVICE void grad_scores(const RowMemory& rows, KeepBits bits, const Pairs<Layout>& weights,
                                 Pairs<Layout>& dp) {
#pragma unroll
  for (int x = 0; x < Layout::kQueries; ++x) {
    const float delta = kSubtracted ? 0.f : rows.delta[Layout::query0() + Layout::query(x)];
#pragma unroll
    for (int y = 0; y < Layout::kKeys; ++y) {
      const int n = Layout::pair(x, y);
      const float ds = weights[n / 4][n % 4] * (dp[n / 4][n % 4] - delta);
      dp[n / 4][n % 4] = kept(bits, n) ? ds : 0.f;
    }
  }
}

// Turns s into W, and dp = dO V^T + dW into dS, both exactly 0 where masked.
template <typename Layout, bool kSubtracted>
FASTATTN_DEVICE void grad_pairs(const BackwardParams& p, const TileMask& mask, KeepBits survivors,
                                float unit, const RowMemory& rows, Pairs<Layout>& s,
                                Pairs<Layout>& dp) {
  known_pairs<Layout>(rows, unit, mask.bits, s);
  if constexpr (!kSubtracted) drop(p, survivors, dp);
  grad_scores<Layout, kSubtracted>(rows, mask.bits, s, dp);
  drop(p, survivors, s);
}

// W and dS of a tile whose operands are in shared memory, Q and K at `q` and `k`. Unless kSloped,
// dS is the gradient of the logits.
template <typename Layout, DType kType, int kDim, bool kCurved, bool kSloped = kCurved>
FASTATTN_DEVICE void gradient_tile(const BackwardParams& p, const Place& at, const TileMask& mask,
                                   float unit, const GradMemory<kDim>& memory, const uint16_t* q,
                                   const uint16_t* k, Pairs<Layout>& s, Pairs<Layout>& ds) {
  constexpr bool kQueriesByRows = std::is_same_v<Layout, QueryRows>;
  const uint16_t* const grad = memory.grad_out;
  // Both are loaded before S takes registers.
  const KeepBits survivors = surviving_bits<Layout>(p, at);
  load_grad_weights<Layout, kType>(p, at, mask.bits, ds);
  with_half<kType>(p.v.dtype, [&](auto type) {
    multiply_transposed<Layout, type, kDim>(kQueriesByRows ? grad : memory.v,
                                            kQueriesByRows ? memory.v : grad, ds);
  });
  if constexpr (kSloped) subtract_delta<Layout>(p, survivors, memory.rows, ds);
  sdpa_logits<Layout, kType, kDim, kCurved>(p, at, mask, kQueriesByRows ? q : k,
                                            kQueriesByRows ? k : q, s, [&](int n, float slope) {
                                              if constexpr (kSloped) ds[n / 4][n % 4] *= slope;
                                            });
  grad_pairs<Layout, kSloped>(p, mask, survivors, unit, memory.rows, s, ds);
}

}  // namespace fastattn::cuda
