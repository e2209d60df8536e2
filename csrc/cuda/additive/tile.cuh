// A tile of additive or gaussian scores, and the loops of their gradients. The kernels of forward,
// weights and backward share this file. Operands are the prologue's panels, or raw q and k.
#pragma once

#include "cuda/additive/differences.cuh"
#include "cuda/additive/plan.h"
#include "cuda/additive/terms.cuh"
#include "cuda/tile/curve.cuh"
#include "cuda/tile/softmax.cuh"

namespace fastattn::cuda {

// Operands of a stage. In the forward pass, P overwrites them: a tile [kTile][kTile].
struct __align__(16) StageMemory {
  float queries[kStageFloats];
  float keys[kStageFloats];
  float units[kStage];
};

// The panels of a problem.
struct AdditiveTiles {
  const AttentionParams& p;
  const Panels& panels;
  const float* workspace;
  float unit;  // of logits: an argument of the kernel, which takes no register
};

FASTATTN_DEVICE int64_t query_tile(const AdditiveTiles& t, const Place& at) {
  return (at.b * t.p.H + at.h) * t.panels.tiles_m + at.i0 / kTile;
}
FASTATTN_DEVICE int64_t key_tile(const AdditiveTiles& t, const Place& at) {
  return (at.b * t.p.Hkv + at.hkv) * t.panels.tiles_n + at.j0 / kTile;
}
FASTATTN_DEVICE bool is_direct(const AdditiveTiles& t, const Place& at) {
  const int32_t* const direct = reinterpret_cast<const int32_t*>(t.workspace + t.panels.direct);
  return t.panels.raw || direct[key_tile(t, at)] != 0;
}

// The index of a tile's units, weights and scale: the head, and for the gaussian score the head of
// the batch.
FASTATTN_DEVICE int64_t weights_head(const AdditiveTiles& t, const Place& at) {
  return is_gaussian(t.p) ? at.b * t.p.H + at.h : at.h;
}

// Stages dims [d0, d0 + count) of the tile's queries as [dims][kTile]. A direct tile takes
// raw queries. Other tiles take `panels`: t.panels.queries or t.panels.gradient_queries.
FASTATTN_DEVICE void stage_queries(const AdditiveTiles& t, const Place& at, int64_t panels,
                                   bool direct, int64_t d0, int count, float* to) {
  if (direct) {
    const int dims = static_cast<int>(min64(kStage, t.p.D - d0));
    stage_transposed(t.p.q, offset_of(t.p.q, at.b, at.h, at.i0, d0), at.rows, dims, to);
  } else {
    const float* const panel = t.workspace + panels + query_tile(t, at) * t.panels.panel;
    stage_panel(panel + d0 * kTile, count, to);
  }
}

FASTATTN_DEVICE void stage_keys(const AdditiveTiles& t, const Place& at, bool direct, int64_t d0,
                                int count, float* to) {
  if (direct) {
    const int dims = static_cast<int>(min64(kStage, t.p.D - d0));
    stage_transposed(t.p.k, offset_of(t.p.k, at.b, at.hkv, at.j0, d0), at.cols, dims, to);
  } else {
    const float* const panel = t.workspace + t.panels.keys + key_tile(t, at) * t.panels.panel;
    stage_panel(panel + d0 * kTile, count, to);
  }
}

FASTATTN_DEVICE int staged_dims(const AdditiveTiles& t, int64_t d0) {
  return static_cast<int>(min64(kStage, t.panels.dims - d0));
}

// curve_scores() of a tile. Writes the slopes to a tile unless `slopes` is nullptr.
FASTATTN_DEVICE void curve_tile(const AttentionParams& p, Fragment& s, float* slopes) {
  const int first = opaque_here(row0()), col = opaque_here(col0());
  float row[kCols];
  curve_scores(p, s, [&](int n, float slope) {
    row[n % kCols] = slope;
    if (slopes != nullptr && n % kCols == kCols - 1)
      store4(slopes, first + n / kCols, col, pack4(row));
  });
}

// Tests on a CPU count the tiles that take an exponential for each pair and dim.
FASTATTN_DEVICE void count_score([[maybe_unused]] bool direct) {
#if defined(FASTATTN_CUDA_ON_CPU)
  if (threadIdx.x == 0) ++cuda_on_cpu::score_tiles[direct];
#endif
}

// The logits of a tile. Sums have two levels, because one sum over all dims loses digits.
// Begins with a barrier, so other threads may still read the stage before the call. Ends without a
// barrier. `slopes`: see curve_tile().
FASTATTN_DEVICE void score_tile(const AdditiveTiles& t, const Place& at, KeepBits bits,
                                StageMemory& memory, Fragment& s, float* slopes = nullptr) {
  const bool gaussian = is_gaussian(t.p), direct = is_direct(t, at);
  count_score(direct);
  const int64_t head = weights_head(t, at);
  const int64_t units = t.panels.units + head * t.panels.dims;
  const float* const halves = t.workspace + t.panels.halves + at.h * t.panels.stages;
  clear(s);
  for (int64_t d0 = 0; d0 < t.panels.dims; d0 += kStage) {
    const int count = staged_dims(t, d0);
    __syncthreads();
    stage_queries(t, at, t.panels.queries, direct, d0, count, memory.queries);
    stage_keys(t, at, direct, d0, count, memory.keys);
    if (thread() < count) memory.units[thread()] = t.workspace[units + d0 + thread()];
    __syncthreads();
    if (!warp_has_rows(at)) continue;
    const float half = gaussian ? 0.f : halves[d0 / kStage];
    Fragment sum;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) sum[r][c] = half;
    if (gaussian) {
      add_squares(memory.queries, memory.keys, memory.units, count, sum);
    } else if (direct) {
      subtract_terms<true>(memory.queries, memory.keys, memory.units, count, sum);
    } else {
      subtract_terms<false>(memory.queries, memory.keys, memory.units, count, sum);
    }
    add(sum, s);
  }
  const float scale = t.workspace[t.panels.scales + head], unit = gaussian ? 1.f : kUnit;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) s[r][c] = scaled_score(s[r][c], unit, scale);
  if (is_curved(t.p)) curve_tile(t.p, s, slopes);
  make_logits<FragmentLayout>(t.p, at, bits, s);
}

// P of a tile, before dropout. `slopes`: see curve_tile().
FASTATTN_DEVICE void weights_tile(const AdditiveTiles& t, const Place& at, KeepBits bits,
                                  const float* stats, StageMemory& memory, Fragment& s,
                                  float* slopes = nullptr) {
  score_tile(t, at, bits, memory, s, slopes);
  known_weights(t.p, t.unit, at, bits, stats, s);
}

// ---- gradients ----

// Loads the dims from d on of a group's keys: F, or raw k if `direct`.
FASTATTN_DEVICE void load_own(const AdditiveTiles& t, const Place& at, bool direct, int64_t d,
                              int key0, OwnTile& own) {
  if (direct) {
    const int64_t first = opaque(offset_of(t.p.k, at.b, at.hkv, at.j0 + key0, d));
    with_dtype(t.p.k.dtype, [&](auto type) {
#pragma unroll
      for (int x = 0; x < kOwnDims; ++x) {
        int64_t where = first + x * t.p.k.stride_c;
#pragma unroll
        for (int n = 0; n < kOwnKeys; ++n, where += t.p.k.stride_r)
          own[x][n] = key0 + n < at.cols && d + x < t.p.D ? load_as<type>(t.p.k.data, where) : 0.f;
      }
    });
    return;
  }
  const float* const panel = t.workspace + t.panels.keys + key_tile(t, at) * t.panels.panel;
#pragma unroll
  for (int x = 0; x < kOwnDims; ++x)
#pragma unroll
    for (int n = 0; n < kOwnKeys; n += 4)
      unpack4(*reinterpret_cast<const float4*>(panel + (d + x) * kTile + key0 + n), own[x] + n);
}

// The loop of the gradients: over the factors E and F, over raw q and k with an exponential per
// pair and dim, or over differences.
enum class Loop { kFactors, kDirect, kDifferences };

FASTATTN_DEVICE void load_ratios(const AdditiveTiles& t, const Place& at, int64_t d,
                                 float (&ratios)[kOwnDims]) {
  const int64_t first = t.panels.units + weights_head(t, at) * t.panels.dims + d;
#pragma unroll
  for (int n = 0; n < kOwnDims; ++n) ratios[n] = t.workspace[first + n];
}

// One of the sums that a thread adds to, tile after tile. The sums are too many for registers, so
// they lie in the workspace or in shared memory. Neighbouring threads have neighbouring places.
// Only one thread uses a sum, so sums need no barrier.
FASTATTN_DEVICE float4& own_sum(float* sums, int64_t n) {
  return reinterpret_cast<float4*>(sums)[n * kThreads + thread()];
}
FASTATTN_DEVICE void clear_sums(float* sums, int64_t count) {
  for (int64_t n = 0; n < count; ++n) own_sum(sums, n) = make_float4(0.f, 0.f, 0.f, 0.f);
}
FASTATTN_DEVICE void add_to_sum(float* sums, int64_t n, const float (&x)[4]) {
  float4& sum = own_sum(sums, n);
  sum = make_float4(sum.x + x[0], sum.y + x[1], sum.z + x[2], sum.w + x[3]);
}

}  // namespace fastattn::cuda
