// The inner loops of the gaussian score, s = -1/2 sum_d (q_d - k_d)^2 / h_d^2, on raw tiles. The
// kernels around these loops are those of the additive score. problem/bandwidths.h defines r and c,
// with 1 / h^2 = c r^2.
//
//   dq_id = -c r_d sum_j g_ijd    dk_jd = c r_d sum_i g_ijd
//   dh_d = c r_d sum_ij g_ijd x_ijd / h_d
//
// with x = q - k and g = dS x r. An element of a score takes a difference, a product and an fma: 42
// elements per clock and SM.
#pragma once

#include "cuda/additive/terms.cuh"

namespace fastattn::cuda {

// acc[i][j] += sum_d ((q_id - k_jd) r_d)^2 over staged dims.
FASTATTN_DEVICE void add_squares(const float* queries, const float* keys, const float* ratios,
                                 int dims, Fragment& acc) {
#pragma unroll 1
  for (int d = 0; d < dims; ++d) {
    float q[kRows], k[kCols];
    load_rows(queries, d, q);
    load_cols(keys, d, k);
    const float ratio = ratios[d];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const float x = __fmul_rn(q[r] - k[c], ratio);
        acc[r][c] = fmaf(x, x, acc[r][c]);
      }
  }
}

// Adds g to acc[r][d]. The queries' gradient also adds g x to `sums`. Where dS is 0, x counts as 0,
// so a masked or infinitely distant key does not affect a gradient.
template <bool kOwnKeys>
FASTATTN_DEVICE void add_differences(const OwnTile& own, const float (&ratios)[kOwn],
                                     const float* others, const float* ds, int count, OwnTile& acc,
                                     float (&sums)[kOwn]) {
#pragma unroll 1
  for (int n = 0; n < count; n += 4) {
    float other[kOwn][4], pair[kOwn][4];  // [dim][s], dS[row][s]
#pragma unroll
    for (int d = 0; d < kOwn; ++d) unpack4(load4(others, own_dim0() + d, n), other[d]);
    load_ds<kOwnKeys>(ds, n, pair);
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int r = 0; r < kOwn; ++r)
#pragma unroll
        for (int d = 0; d < kOwn; ++d) {
          const float between = kOwnKeys ? other[d][s] - own[r][d] : own[r][d] - other[d][s];
          const float x = pair[r][s] == 0.f ? 0.f : between;
          const float g = pair[r][s] * (x * ratios[d]);
          acc[r][d] += g;
          if constexpr (!kOwnKeys) sums[d] += g * x;
        }
  }
}

}  // namespace fastattn::cuda
