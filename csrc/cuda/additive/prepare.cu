// The prologue of additive attention. terms.cuh explains the ranges and units.
//
//   per head        the power of two that scales the weights; units kUnit / w
//   per key head    a centre per dim, 0 unless keys are far from 0
//   per key tile    F = e^(2 (k - c)) transposed to [dims][kTile]; whether the tile is direct
//   per query tile  E = e^(2 (q + c)) transposed: kUnit E / w and, for backward, kGradUnit E
#include "cuda/additive/prepare.cuh"
#include "cuda/additive/terms.cuh"
#include "problem/bandwidths.h"

namespace fastattn::cuda {
namespace {

struct PrepareArgs {
  AttentionParams p;
  Panels at;
  float* workspace;
};

// ---- weights ----

// A weight scaled by 2^-exponent, which puts the heaviest in [1/2, 1). Sizes below kLightest count
// as kLightest. If some weight is not finite, all count as 1, and the scale is NaN.
FASTATTN_DEVICE float term_weight(float weight, int exponent, bool finite) {
  const float scaled = finite ? ldexpf(weight, -exponent) : 1.f;
  return fabsf(scaled) < kLightest ? copysignf(kLightest, scaled) : scaled;
}

__global__ void __launch_bounds__(kThreads) prepare_terms_kernel(const PrepareArgs a) {
  __shared__ float scratch[kWarps];
  const AttentionParams& p = a.p;
  const int64_t h = blockIdx.x;
  const auto weight = [&](int64_t d) { return load_element(p.w, offset_of(p.w, 0, h, 0, d)); };

  float heaviest = 0.f;
  bool finite = true;
  for (int64_t d = thread(); d < p.D; d += kThreads) {
    finite &= is_finite(weight(d));
    heaviest = max_of(heaviest, fabsf(weight(d)));
  }
  finite = __syncthreads_and(finite);
  heaviest = block_max(heaviest, scratch);
  int exponent = 0;
  if (finite) frexpf(heaviest, &exponent);
  if (exponent > 126) exponent = 126;  // 2^128 is not a float; x has room for weights up to 4

  float* const units = a.workspace + a.at.units + h * a.at.dims;
  const auto scaled = [&](int64_t d) { return term_weight(weight(d), exponent, finite); };
  for (int64_t d = thread(); d < a.at.dims; d += kThreads) {
    const bool inside = d < p.D;
    a.workspace[a.at.weights + h * a.at.dims + d] = inside ? weight(d) : 0.f;
    units[d] = inside ? kUnit / scaled(d) : kPadUnit;
  }
  __syncthreads();
  // Where weights are alike, roundings are alike too, and add up. So the sums are double, and a
  // term has the weight kUnit / unit of its rounded unit, to first order of that rounding. The
  // first half also has what rounding took from all halves.
  float* const halves = a.workspace + a.at.halves + h * a.at.stages;
  float rest = 0.f;
  for (int64_t stage = thread(); stage < a.at.stages; stage += kThreads) {
    double sum = 0.;
#pragma unroll 1  // else registers spill
    for (int64_t d = stage * kStage; d < min64(p.D, (stage + 1) * kStage); ++d) {
      const float w = scaled(d), lost = fmaf(-units[d], w, kUnit) * (1.f / kUnit);
      sum += static_cast<double>(w) + static_cast<double>(w * lost);
    }
    sum *= 0.5 / kUnit;
    halves[stage] = static_cast<float>(sum);
    rest += static_cast<float>(sum - static_cast<double>(halves[stage]));
  }
  rest = block_sum(rest, scratch);
  if (thread() == 0) {
    const float power = heaviest == 0.f ? 0.f : ldexpf(1.f, exponent);
    a.workspace[a.at.scales + h] = 2.f * (finite ? power : kInfinity - kInfinity);
    if (a.at.stages > 0) halves[0] += rest;
  }
}

// Writes r, c r and -c / 2 of a gaussian score, one block per head of a batch.
__global__ void __launch_bounds__(kThreads) prepare_bandwidths_kernel(const PrepareArgs a) {
  __shared__ float scratch[kWarps];
  const int64_t b = blockIdx.x / a.p.H, h = blockIdx.x % a.p.H, start = blockIdx.x * a.at.dims;
  const auto bandwidth = [&](int64_t d) {
    return load_element(a.p.w, offset_of(a.p.w, b, h, 0, d));
  };
  float least = kInfinity;
  for (int64_t d = thread(); d < a.p.D; d += kThreads) least = fminf(least, fabsf(bandwidth(d)));
  least = -block_max(-least, scratch);
  const Bandwidths all = bandwidths_of(static_cast<double>(least));
  for (int64_t d = thread(); d < a.at.dims; d += kThreads) {
    const float ratio = d < a.p.D ? ratio_of(all, bandwidth(d)) : 0.f;
    a.workspace[a.at.units + start + d] = ratio;
    a.workspace[a.at.weights + start + d] = ratio * static_cast<float>(all.factor);
  }
  if (thread() == 0) a.workspace[a.at.scales + blockIdx.x] = static_cast<float>(-0.5 * all.factor);
}

// ---- keys ----

constexpr int64_t kSamples = 256;

// The centre of a dim: the middle of the keys, or 0 if no sampled key is far from 0. The centre is
// a whole number, so that subtracting the centre is mostly exact. Only a sample of the keys is
// read. Tiles check every key, so a bad centre costs time only.
FASTATTN_DEVICE float find_centre(const AttentionParams& p, int64_t b, int64_t hkv, int64_t d,
                                  const KeyRange& keys) {
  const int64_t size = keys.end - keys.begin, samples = min64(kSamples, size);
  float low = kInfinity, high = -kInfinity;
  for (int64_t n = 0; n < samples; ++n) {
    const int64_t j = keys.begin + n * size / samples;
    const float k = load_element(p.k, offset_of(p.k, b, hkv, j, d));
    if (!is_finite(k)) continue;
    low = fminf(low, k);
    high = fmaxf(high, k);
  }
  if (!(low < -kKeyLimit || high > kKeyLimit) || low > high) return 0.f;
  return rintf(0.5f * low + 0.5f * high);
}

// The keys that determine the centre. Keys that no row can keep, such as padding, are left out. If
// the limits vary by row, all keys stay.
FASTATTN_DEVICE KeyRange keys_in_use(const AttentionParams& p, int64_t b) {
  if (limits_vary_by_row(p.mask) || p.M == 0) return {0, p.N};
  const KeyRange keys = tile_range(p.mask, p.N, b, 0, p.M);
  return {min64(keys.begin, p.N), keys.end};
}

__global__ void __launch_bounds__(kThreads) prepare_centres_kernel(const PrepareArgs a) {
  uint32_t block = blockIdx.x;
  const int64_t hkv = take_digit(&block, a.p.Hkv), b = block;
  const KeyRange keys = keys_in_use(a.p, b);
  for (int64_t d = thread(); d < a.at.dims; d += kThreads)
    a.workspace[a.at.centres + blockIdx.x * a.at.dims + d] =
        d < a.p.D ? find_centre(a.p, b, hkv, d, keys) : 0.f;
}

// Writes to[d][i] = f(staged[d][i], d) for the dims of a stage.
template <typename F>
__device__ __forceinline__ void write_stage(const float* staged, int64_t d0, int64_t dims,
                                            float* to, F f) {
  for (int n = thread(); n < kStageFloats; n += kThreads) {
    const int d = n / kTile, i = n % kTile;
    if (d0 + d < dims) to[d0 * kTile + n] = f(staged[tile_index(d, i)], d0 + d);
  }
}

__global__ void __launch_bounds__(kThreads) prepare_keys_kernel(const PrepareArgs a) {
  __shared__ __align__(16) float staged[kStageFloats];
  const AttentionParams& p = a.p;
  uint32_t block = blockIdx.x;
  const int64_t j0 = take_digit(&block, a.at.tiles_n) * kTile;
  const float* const centres = a.workspace + a.at.centres + block * a.at.dims;
  const int64_t hkv = take_digit(&block, p.Hkv), b = block;
  float* const panel = a.workspace + a.at.keys + blockIdx.x * a.at.panel;
  const int cols = extent(p.N, j0);

  bool near = true;
  for (int64_t d0 = 0; d0 < a.at.dims; d0 += kStage) {
    __syncthreads();
    stage_transposed(p.k, offset_of(p.k, b, hkv, j0, d0), cols,
                     static_cast<int>(min64(kStage, p.D - d0)), staged);
    __syncthreads();
    // The clamp changes only unused values: keys of a direct tile, and zeros past the last key.
    write_stage(staged, d0, a.at.dims, panel, [&](float k, int64_t d) {
      return expf(2.f * fmaxf(-kKeyLimit, fminf(kKeyLimit, k - centres[d])));
    });
    for (int n = thread(); n < kStageFloats; n += kThreads) {
      const int d = n / kTile, j = n % kTile;
      if (j < cols && d0 + d < p.D)
        near &= fabsf(staged[tile_index(d, j)] - centres[d0 + d]) <= kKeyLimit;
    }
  }
  near = __syncthreads_and(near);
  if (thread() == 0)
    reinterpret_cast<int32_t*>(a.workspace + a.at.direct)[blockIdx.x] = near ? 0 : 1;
}

// ---- queries ----

FASTATTN_DEVICE float query_factor(float q, float centre) {
  const float x = q + centre, limit = kSaturation + kKeyLimit;
  return expf(2.f * (x > limit ? limit : x));  // NaN passes
}

__global__ void __launch_bounds__(kThreads)
    prepare_queries_kernel(const PrepareArgs a, bool backward) {
  __shared__ __align__(16) float staged[kStageFloats];
  const AttentionParams& p = a.p;
  uint32_t block = blockIdx.x;
  const int64_t i0 = take_digit(&block, a.at.tiles_m) * kTile;
  const int64_t h = take_digit(&block, p.H), b = block;
  const Place at = place(p, b, h, i0, 0);
  const float* const centres = a.workspace + a.at.centres + (b * p.Hkv + at.hkv) * a.at.dims;
  const float* const units = a.workspace + a.at.units + h * a.at.dims;
  float* const panel = a.workspace + a.at.queries + blockIdx.x * a.at.panel;
  float* const gradient = a.workspace + a.at.gradient_queries + blockIdx.x * a.at.panel;

  for (int64_t d0 = 0; d0 < a.at.dims; d0 += kStage) {
    __syncthreads();
    stage_transposed(p.q, offset_of(p.q, b, h, i0, d0), at.rows,
                     static_cast<int>(min64(kStage, p.D - d0)), staged);
    __syncthreads();
    write_stage(staged, d0, a.at.dims, panel, [&](float q, int64_t d) {
      return d < p.D ? query_factor(q, centres[d]) * units[d] : 0.f;
    });
    if (!backward) continue;
    write_stage(staged, d0, a.at.dims, gradient, [&](float q, int64_t d) {
      const float factor = d < p.D ? query_factor(q, centres[d]) : 0.f;
      return factor == factor ? factor * kGradUnit : 0.f;
    });
  }
}

}  // namespace

void prepare_terms(const AttentionParams& p, const Panels& panels, float* workspace,
                   Launcher& launcher) {
  const PrepareArgs args = {p, panels, workspace};
  if (is_gaussian(p)) return launcher.run(prepare_bandwidths_kernel, p.B * p.H, kThreads, 0, args);
  launcher.run(prepare_terms_kernel, p.H, kThreads, 0, args);
}

void prepare_panels(const AttentionParams& p, const Panels& panels, float* workspace, bool backward,
                    Launcher& launcher) {
  const PrepareArgs args = {p, panels, workspace};
  prepare_terms(p, panels, workspace, launcher);
  if (panels.raw) return;
  launcher.run(prepare_centres_kernel, p.B * p.Hkv, kThreads, 0, args);
  launcher.run(prepare_keys_kernel, p.B * p.Hkv * panels.tiles_n, kThreads, 0, args);
  launcher.run(prepare_queries_kernel, p.B * p.H * panels.tiles_m, kThreads, 0, args, backward);
}

}  // namespace fastattn::cuda
