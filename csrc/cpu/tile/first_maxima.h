// What the maximum of a row is at first, beside a bias of head and distance:
//
//   m_i = scale q_i . k_j + bias_ij    j: where row i has its largest bias, or a key near it
//
// Logits with ALiBi rise from tile to tile, up to the diagonal. A row that begins without a maximum
// then searches for one in every tile, and rescales its sums: docs/decisions/0019.
#pragma once

#include "cpu/base/pack.h"
#include "cpu/base/shared.h"
#include "problem/mask.h"

namespace fastattn::FASTATTN_ISA {

// Sets m of the rows [i0, i0 + rows) to logits of `keys` that they keep. A row whose m stays as it
// is finds its maximum as always.
FASTATTN_SHARED void first_maxima(const ForwardParams& p, int64_t b, int64_t h, int64_t i0,
                                  int64_t rows, KeyRange keys, float* m);

#ifdef FASTATTN_SHARED_CODE
// Where the largest of n >= kWidth numbers is, or one of them; -1 if there is none, beside NaN.
FASTATTN_SIMD int64_t place_of_largest(const float* x, int64_t n) {
  Vec top = splat(-kInf);
  for (int64_t c = 0; c < n; c += kWidth) top = max(load(x + min64(c, n - kWidth)), top);
  const float most = max_lanes(top);
  for (int64_t c = 0; c < n; c += kWidth) {
    const int64_t at = min64(c, n - kWidth);
    if (!any_lane(load(x + at) == splat(most))) continue;
    for (int64_t lane = 0; lane < kWidth; ++lane)
      if (x[at + lane] == most) return at + lane;
  }
  return -1;
}

FASTATTN_SHARED void first_maxima(const ForwardParams& p, int64_t b, int64_t h, int64_t i0,
                                  int64_t rows, KeyRange keys, float* m) {
  // In any order of its sum, such a logit is the same but for 2^-8: m is not above the maximum.
  constexpr float kMost = 1024.f;
  const bool product = p.w.data == nullptr && !is_curved(p);
  if (!p.bias_is_line || !product || p.bias.dtype != DType::kFloat32 || p.bias.stride_c != 1)
    return;
  const float* const line = static_cast<const float*>(p.bias.data) + b * p.bias.stride_b +
                            h * p.bias.stride_h;  // j - i = 0
  const int64_t first = keys.begin - (i0 + rows - 1);
  const int64_t found = place_of_largest(line + first, keys.end - i0 - first);
  if (found < 0) return;
  const int64_t hkv = h / (p.H / p.Hkv);
  with_dtype(p.q.dtype, [&](auto type) {
    for (int64_t i = i0; i < i0 + rows; ++i) {
      const KeyRange own = row_range(p.mask, p.N, b, i);
      const int64_t begin = max64(own.begin, keys.begin), end = min64(own.end, keys.end);
      if (begin >= end) continue;
      const int64_t j = max64(begin, min64(end - 1, i + first + found));
      if (!dense_keeps(p.mask, b, h, i, j)) continue;
      const int64_t q = b * p.q.stride_b + h * p.q.stride_h + i * p.q.stride_r,
                    k = b * p.k.stride_b + hkv * p.k.stride_h + j * p.k.stride_r;
      Vec sum{}, size{};
      for (int64_t d = 0; d < p.D; d += kWidth) {
        const Vec term = load_strided<type>(p.q.data, q + d * p.q.stride_c, p.q.stride_c, p.D - d) *
                         load_strided<type>(p.k.data, k + d * p.k.stride_c, p.k.stride_c, p.D - d);
        sum += term, size += abs(term);
      }
      const float logit = sum_lanes(sum) * p.scale + line[j - i];
      const bool small = !any_above(size * __builtin_fabsf(p.scale), kMost);
      if (small && logit < kMost && logit > -kMost) m[i - i0] = logit;
    }
  });
}
#endif  // FASTATTN_SHARED_CODE

}  // namespace fastattn::FASTATTN_ISA
