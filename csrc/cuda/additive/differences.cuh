// The inner loops of the gaussian score, s = -1/2 sum_d (q_d - k_d)^2 / h_d^2, on raw tiles. The
// kernels around these loops are those of the additive score. problem/bandwidths.h defines r and c,
// with 1 / h^2 = c r^2.
//
//   dq_id = -c r_d sum_j g_ijd    dk_jd = c r_d sum_i g_ijd
//   dh_d = c sum_ij g_ijd x_ijd / h_d
//
// with x = (q - k) r and g = dS x. An element of a score takes a difference, a product and an fma:
// 42 elements per clock and SM.
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

// Adds g to dq of queries [i, i + 4) and to dk of own keys, and g x to `sums`. Where dS is 0, x
// counts as 0, so a masked or infinitely distant key does not affect a gradient.
FASTATTN_DEVICE void add_differences(const OwnTile& own, int key0, const float (&ratios)[kOwnDims],
                                     const Quads& other, const float* ds, int i, OwnTile& of_keys,
                                     Quads& of_queries, float (&sums)[kOwnDims]) {
#pragma unroll
  for (int k = 0; k < kOwnKeys; ++k) {
    float pair[4];
    load_ds(ds, key0, k, i, pair);
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int d = 0; d < kOwnDims; ++d) {
        const float x = pair[s] == 0.f ? 0.f : (other[d][s] - own[d][k]) * ratios[d];
        const float g = pair[s] * x;
        of_queries[d][s] += g;
        of_keys[d][k] += g;
        sums[d] += g * x;
      }
  }
}

}  // namespace fastattn::cuda
