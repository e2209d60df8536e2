// Softmax: the online form of the forward pass, and weights recomputed from its saved (shift,
// factor) of a row: P = 2^(c (s - shift)) * factor, for logits s and their unit c (masking.cuh).
//
//   m' = late_max(m, max_j s_j)     alpha = 2^(c (m - m'))
//   w_j = 2^(c (s_j - m'))          l' = alpha l + sum_j w_j
//
// m stays where it is while weights are at most 2: most tiles then leave the sums as they are, and
// few alphas are rounded.
//
// A row that has met no key has m = -inf and l = 0. It subtracts 0 instead of m, because -inf minus
// -inf is NaN.
#pragma once

#include "cuda/tile/masking.cuh"

namespace fastattn::cuda {

FASTATTN_DEVICE float finite_max(float m) { return m == -kInfinity ? 0.f : m; }

// The largest power of two that does not exceed a normal number x >= 0; 0 for smaller x.
FASTATTN_DEVICE float power_below(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits &= 0x7f800000;
  memcpy(&x, &bits, 4);
  return x;
}

// The weight of a logit `from` beside one of `to`; 0 of -inf. NaN stays NaN.
FASTATTN_DEVICE float rescaling(float from, float to, float unit) {
  return ex2_approx((from - to) * unit);
}

// A row's maximum m stays while logits exceed it by less than the slack, 1 / unit.
FASTATTN_DEVICE float late_max(float m, float top, float unit) {
  return top > m + rcp_approx(unit) ? top : m;
}

// The state of the rows of a query tile while key tiles stream by. It lies in shared memory,
// because registers are full of scores.
struct RowStates {
  float m[kTile];
  float l[kTile];
  float factor[kTile];  // of the sums: alpha of the last tile, or 1 / l at the end
};

template <typename Layout>
FASTATTN_DEVICE void multiply_rows(const float* factors, Pairs<Layout>& s) {
#pragma unroll
  for (int x = 0; x < Layout::kQueries; ++x) {
    const float factor = factors[Layout::query0() + Layout::query(x)];
#pragma unroll
    for (int y = 0; y < Layout::kKeys; ++y) {
      const int n = Layout::pair(x, y);
      s[n / 4][n % 4] *= factor;
    }
  }
}

// One of the lanes that share a row writes its state.
FASTATTN_DEVICE bool is_row_writer() { return thread() % kRowLanes == 0; }

FASTATTN_DEVICE void clear(RowStates& states) {
  if (thread() < kTile) states.m[thread()] = -kInfinity, states.l[thread()] = 0.f;
}

// Turns scores into weights, after dropout. Other lanes may read the states after a barrier.
FASTATTN_DEVICE void softmax_step(const AttentionParams& p, float unit, const Place& at,
                                  KeepBits bits, RowStates& states, Fragment& s) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float top = -kInfinity;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      s[r][c] = kept(bits, r, c) ? s[r][c] : -kInfinity;
      top = max_of(top, s[r][c]);
    }
    const float m_old = states.m[row0() + r];
    const float m = late_max(m_old, lanes_max(top, kRowLanes), unit), shift = finite_max(m);
    const float alpha = rescaling(m_old, shift, unit);
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      s[r][c] = rescaling(s[r][c], shift, unit);
      sum += s[r][c];
    }
    sum = lanes_sum(sum, kRowLanes);
    __syncwarp();  // each lane has read m; a shuffle alone does not order memory
    if (is_row_writer()) {
      states.m[row0() + r] = m;
      states.l[row0() + r] = states.l[row0() + r] * alpha + sum;
      states.factor[row0() + r] = alpha;
    }
  }
  drop(p, surviving_bits<FragmentLayout>(p, at), s);
}

// What is known of a row at its end: 1 / l, and the log-sum-exp.
struct RowEnd {
  float factor, lse;
};

// e^x of x < 88.
FASTATTN_DEVICE float exp_of_double(double x) {
  constexpr double kLeast = -200., kLn2 = 0.6931471805599453;  // e^-200 is 0
  x = x < kLeast ? kLeast : x;                                 // NaN stays NaN
  const double whole = floor(x * kLog2e);
  return exp2f(static_cast<float>(whole)) * expf(static_cast<float>(x - whole * kLn2));
}

// Beside a sink, l' = l + e^(sink - shift). The larger of both powers stays 1, so neither one
// overflows. Their difference is a double: its rounding would be that of every number of the row.
// A row without keys keeps a factor of 0. Not run on a GPU.
FASTATTN_DEVICE RowEnd end_beside(float sink, float shift, float natural, float l) {
  const double above = sink - static_cast<double>(shift) * natural;
  const float less = exp_of_double(-fabs(above));
  const float of_keys = above > 0. ? less : 1.f, of_sink = above > 0. ? 1.f : less;
  const float sum = fmaf(of_keys, l, of_sink), log = logf(sum);
  if (l == 0.f) return {0.f, sink};
  return {of_keys / sum, above > 0. ? sink + log : fmaf(shift, natural, log)};
}

// Writes lse (for users) and stats (for backward) of row n, one of head h of sample b. Returns the
// factor of the row's sums.
FASTATTN_DEVICE float write_row(const ForwardParams& p, int64_t b, int64_t h, int64_t n, float m,
                                float l, bool writer) {
  const float shift = finite_max(m), natural = natural_of_logit(p);
  RowEnd end = {1.f / l, fmaf(shift, natural, logf(l))};
  if (l == 0.f) end = {0.f, -kInfinity};
  if (p.sink.data != nullptr)
    end = end_beside(load_element(p.sink, offset_of(p.sink, b, h, 0, 0)), shift, natural, l);
  const float factor = end.factor;
  if (writer) {
    p.lse[n] = end.lse;
    p.stats[2 * n] = shift;
    p.stats[2 * n + 1] = factor;
  }
  return factor;
}

FASTATTN_DEVICE int64_t row_number(const AttentionParams& p, const Place& at, int r) {
  return query_number(p, at, row0()) + r;
}

// A weight from the saved stats of its row. The exponent is bounded: huge scores, recomputed with
// other rounding, must not overflow. The bound is that of late_max(), whose sum may round up.
FASTATTN_DEVICE float known_weight(float s, float shift, float factor, float unit) {
  return ex2_approx(min_nan((s - shift) * unit, 2.f)) * factor;
}

// Turns scores into P, before dropout: exactly 0 where masked, even if the row is NaN.
FASTATTN_DEVICE void known_weights(const AttentionParams& p, float unit, const Place& at,
                                   KeepBits bits, const float* stats, Fragment& s) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (row0() + r >= at.rows) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) s[r][c] = 0.f;
      continue;
    }
    const float2 row = reinterpret_cast<const float2*>(stats)[row_number(p, at, r)];
#pragma unroll
    for (int c = 0; c < kCols; ++c)
      s[r][c] = kept(bits, r, c) ? known_weight(s[r][c], row.x, row.y, unit) : 0.f;
  }
}

}  // namespace fastattn::cuda
