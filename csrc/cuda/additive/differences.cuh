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

// Adds g to dq of queries [i, i + 4) and to dk of own keys, and g x to `sum`. Where dS is 0, x
// counts as 0, so a masked or infinitely distant key does not affect a gradient.
FASTATTN_DEVICE void add_differences(const OwnKeys& own, int key0, float ratio,
                                     const float (&other)[4], const float* ds, int i,
                                     OwnKeys& of_keys, float (&of_queries)[4], float& sum) {
#pragma unroll
  for (int k = 0; k < kWarpKeys; ++k) {
    float pair[4];
    load_ds(ds, key0, k, i, pair);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const float x = pair[s] == 0.f ? 0.f : other[s] - own[k];
      const float g = pair[s] * (x * ratio);
      of_queries[s] += g;
      of_keys[k] += g;
      sum += g * x;
    }
  }
}

}  // namespace fastattn::cuda
