// The operator that names the path of a problem through the CPU kernels, from the sizes and flags
// that decide it.
#pragma once

#include <string>

#include "binding/problem.h"
#include "cpu/kernels.h"

namespace fastattn::binding {

// `contiguous_keys`: rows of k are. `keep_by_row`: there is a dense mask, and it has rows.
inline std::string cpu_path(int64_t B, int64_t H, int64_t Hkv, int64_t M, int64_t N, int64_t D,
                            ScalarType dtype, bool contiguous_keys, int64_t score, bool bias,
                            bool keep_by_row, bool dropout, bool weights, int64_t band_lo,
                            int64_t band_hi) {
  STD_TORCH_CHECK(Hkv == H || (Hkv > 0 && H % Hkv == 0), "fastattn: Hkv: expected a divisor of H, ",
                  H, ", got ", Hkv);
  static uint8_t something;  // its address is used, its value is not
  ForwardParams p{};
  p.B = B, p.H = H, p.Hkv = Hkv, p.M = M, p.N = N, p.D = D;
  p.k.stride_c = contiguous_keys ? 1 : 0, p.v.stride_c = 1;
  p.q.dtype = dtype_of(dtype, "dtype");
  p.score = score_kind(score);
  if (p.score != ScoreKind::kDot) p.w.data = &something;
  if (bias) p.bias.data = &something;
  p.mask.band_lo = band_lo, p.mask.band_hi = band_hi;
  if (keep_by_row) p.mask.keep = &something, p.mask.keep_stride_m = 1;
  p.dropout.enabled = dropout;
  p.weights_mode = weights ? WeightsMode::kFull : WeightsMode::kNone;
  return cpu::path_of(p);
}

}  // namespace fastattn::binding
