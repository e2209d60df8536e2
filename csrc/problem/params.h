// The attention problem as plain structs, which are all that a kernel file gets.
//
// Torch-free, host and device. csrc/binding/problem.h fills these in from tensors, after which
// no kernel sees a tensor. Dims: B batch, H query heads, Hkv key heads, M queries, N keys, D head
// dim, E value dim.
#pragma once

#include "problem/host_device.h"

namespace fastattn {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// A borrowed strided array over [B, H, rows, cols]. Strides count elements, are 64-bit, and are 0
// on broadcast dims.
struct View {
  void* data;  // nullptr: absent
  DType dtype;
  int64_t stride_b, stride_h, stride_r, stride_c;
};

FASTATTN_FN bool rows_are_contiguous(const View& view) { return view.stride_c == 1; }

// A number of keys for each (b, i), from user memory.
struct KeyLimit {
  const int32_t* data;  // nullptr: no constraint
  int64_t stride_b, stride_m;
};

// The constraints of fastattn.Mask, ANDed. mask.h holds their meaning.
struct MaskParams {
  int64_t band_lo, band_hi;   // keeps j when i + band_lo <= j <= i + band_hi (causal and window,
                              // either alignment)
  KeyLimit kv_len, kv_begin;  // keeps j when kv_begin <= j < kv_len
  const uint8_t* keep;        // nullptr: no constraint; nonzero keeps
  int64_t keep_stride_b, keep_stride_h, keep_stride_m, keep_stride_n;
};

// philox.h turns (seed, b, h, i, j) into 32 bits; a weight survives when its bits >= threshold,
// times scale. A seed that the device reads can change between replays of a CUDA graph, and nobody
// waits for it to come to the host.
struct Counters {
  uint32_t j4, i, h, b;  // j4: of 4 keys
};
struct DropoutParams {
  bool enabled;
  uint32_t threshold;  // p * 2^32
  float scale;         // 1 / (1 - p); 0 when p = 1
  uint64_t seed;
  const int64_t* seed_ptr;  // CUDA: the seed in the device's memory, instead of `seed`; or nullptr
  Counters first;           // of a block of a larger problem: where its indices begin in that
};

// By number, as operators take them: WEIGHTS in fastattn/problem/record.py.
enum class WeightsMode : int32_t { kNone = 0, kFull = 1, kMean = 2 };
// Likewise: SCORES there.
enum class ScoreKind : int32_t { kDot = 0, kAdditive = 1, kGaussian = 2 };

struct AttentionParams {
  int64_t B, H, Hkv, M, N, D, E;
  ScoreKind score;
  float scale;    // of the dot product; 1 for other scores
  float softcap;  // makes softcap * tanh(score / softcap) of a score, before bias and mask; or 0
  float cap;      // CUDA: what a softcap multiplies a score by, scale / softcap, finite; or 0
  View q, k, v;
  View w;     // additive: [1, H, 1, D]; gaussian: bandwidths, [1|B, H, 1, D]; absent for dot
  View bias;  // [B, H, M, N], broadcast dims have stride 0
  bool bias_is_line;  // a function of (b, h, j - i) in memory: bias.stride_r is -bias.stride_c
  View sink;          // [B, H, M, 1], one more logit of every row, without a value; or absent
  MaskParams mask;
  DropoutParams dropout;
  WeightsMode weights_mode;
};

// Whether a curve, a function of the score alone, takes a score's place before bias and mask. A
// softcap is one: the ratio tanh(score / softcap) stands there.
FASTATTN_FN bool is_curved(const AttentionParams& p) { return p.softcap != 0.f; }
// The natural logit of 1 in a score's place.
FASTATTN_FN float natural_of_score(const AttentionParams& p) {
  return p.softcap != 0.f ? p.softcap : p.scale;
}

// Heads of the returned weights.
FASTATTN_FN int64_t heads_out(const AttentionParams& p) {
  return p.weights_mode == WeightsMode::kMean ? 1 : p.H;
}

// What a caller's memory holds, as the members that point to it: f(pointer), in this order.
// Queries, keys and values come first.
template <typename F>
void each_input(AttentionParams* p, F f) {
  f(&p->q.data), f(&p->k.data), f(&p->v.data);
  f(&p->w.data), f(&p->bias.data), f(&p->mask.keep);
}
// Those of each_input() after the first kBeforePairs are arrays over [B, H, M, N], in this order:
// f(stride of b, of h, of m, of n).
constexpr int kBeforePairs = 4;
template <typename F>
void each_pair_strides(AttentionParams* p, F f) {
  View& bias = p->bias;
  MaskParams& mask = p->mask;
  f(&bias.stride_b, &bias.stride_h, &bias.stride_r, &bias.stride_c);
  f(&mask.keep_stride_b, &mask.keep_stride_h, &mask.keep_stride_m, &mask.keep_stride_n);
}
// Memory of positions of keys, which are checked: f(name of the operand, limit).
template <typename F>
void each_limit(MaskParams* mask, F f) {
  f("kv_len", &mask->kv_len), f("kv_begin", &mask->kv_begin);
}

struct ForwardParams : AttentionParams {
  View out;      // [B, H, M, E]
  float* lse;    // [B, H, M], natural log, -inf where a row keeps no key; may be nullptr on a CPU
  float* stats;  // [B, H, M, 2], (shift, factor): weights are e^(score - unit * shift) * factor
  View weights;  // full: [B, H, M, N]; mean: [B, 1, M, N]
  void* workspace;  // forward_workspace_bytes(), 64-byte aligned
};

struct BackwardParams : AttentionParams {
  View out;
  const float* stats;
  View grad_out;          // [B, H, M, E]
  const float* grad_lse;  // [B, H, M] contiguous, or nullptr
  View grad_weights;      // shaped like weights, or absent
  View grad_q, grad_k, grad_v;
  float* grad_w;  // of w: [B, H, D], summed over the batch by the caller where w has none
  // The bias's own shape, contiguous, with stride 0 where it broadcasts; absent when not wanted.
  View grad_bias;
  // The extent of the bias gradient in each dim: its full size or 1. A line has one row, in which
  // the sum over a diagonal is at j - i + M - 1, of M + N - 1.
  int64_t bias_B, bias_H, bias_M, bias_N;
  // Shaped like sink, a sum over rows if stride_r is 0. Where it is not wanted both are absent: out
  // and stats have the sink in them.
  View grad_sink;
  void* workspace;  // backward_workspace_bytes(), 64-byte aligned
};

// Gradients, in the order of each_input(), which has more: f(pointer).
template <typename F>
void each_gradient(BackwardParams* p, F f) {
  f(&p->grad_q.data), f(&p->grad_k.data), f(&p->grad_v.data);
  f(&p->grad_w), f(&p->grad_bias.data);
}

// How a kernel uses threads without knowing who owns them. run() calls body(ctx, begin, end) over
// disjoint pieces of [0, n), and returns when all are done.
struct Parallel {
  int64_t num_threads;
  void (*run)(int64_t n, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx);
};

}  // namespace fastattn
