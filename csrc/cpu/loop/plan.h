// How a problem is cut into tasks, where that decides the workspace: a function of the shape alone,
// never of the number of threads or of the instruction set.
#pragma once

#include "problem/mask.h"

namespace fastattn {

FASTATTN_FN int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// ---- forward ----

// Few queries over many keys (decoding) leave nothing to parallelise over but the keys: they are
// cut into chunks, whose partial results are merged in order. Chunks depend on M and N only, so
// that a row's result does not depend on its batch. At 32 keys a query, partial results take at
// most 1/32 of the memory that V does.
constexpr int64_t kChunkKeys = 1152;  // whole tiles of 64, 96 or 128 keys
constexpr int64_t kKeysPerQuery = 32;

struct ForwardPlan {
  int64_t chunk_keys, chunks;
  int64_t partial_stride;  // floats a row: E accumulated values, maximum, sum
  int64_t workspace_bytes;
};

// Whether the heads that share keys can be taken for the rows of one head, so that these are read
// once for all. That is, where nothing tells rows from heads but strides: one query, no dropout.
FASTATTN_FN bool heads_are_rows(const ForwardParams& p) {
  const bool keeps_all = p.mask.band_lo <= 0 && p.mask.band_hi >= p.N - 1;
  return p.M == 1 && p.H > p.Hkv && p.w.data == nullptr && keeps_all && !p.dropout.enabled &&
         p.weights_mode == WeightsMode::kNone;
}

// The same problem with the heads of a group as rows.
FASTATTN_FN ForwardParams heads_as_rows(ForwardParams p) {
  const int64_t group = p.H / p.Hkv;
  p.M = group, p.H = p.Hkv;
  View* const views[] = {&p.q, &p.out, &p.bias};
  for (View* view : views) {
    view->stride_r = view->stride_h;
    view->stride_h *= group;
  }
  p.mask.keep_stride_m = p.mask.keep_stride_h;
  p.mask.keep_stride_h *= group;
  p.mask.kv_len_stride_m = 0;
  p.mask.band_lo = -group, p.mask.band_hi = p.N;
  return p;
}

FASTATTN_FN ForwardPlan plan_forward(const ForwardParams& p) {
  ForwardPlan plan;
  const int64_t queries = heads_are_rows(p) ? p.H / p.Hkv : p.M;
  plan.chunk_keys = max64(1, kKeysPerQuery * queries / kChunkKeys) * kChunkKeys;
  plan.chunks = max64(1, ceil_div(p.N, plan.chunk_keys));
  plan.partial_stride = p.E + 2;
  plan.workspace_bytes =
      plan.chunks == 1 ? 0 : 4 * plan.partial_stride * plan.chunks * p.B * p.H * p.M;
  return plan;
}

// ---- backward ----

// A task owns a chunk of keys of one key head, and loops over all queries that meet it; where the
// gradient of a bias is broadcast over batch or heads, it owns that chunk for all of them, so that
// one task alone adds to each element. Chunks each have their own fp32 gradient of q (and of w, and
// of a bias that is broadcast over keys), summed in order at the end.
struct BackwardPlan {
  int64_t groups_b, groups_h;  // into how many groups batch and key heads are split: all, or 1
  int64_t chunk_keys, chunks;
  bool q_direct, bias_direct;  // gradients are accumulated where they belong, not in the workspace
  int64_t delta, grad_q, grad_w, grad_bias;  // offsets into the workspace, in floats
  int64_t workspace_bytes;
};

constexpr int64_t kBackwardTasks = 16;  // enough tasks to keep a few cores busy and even out
constexpr int64_t kBackwardKeys = 192;  // chunks are multiples of this
constexpr int64_t kBackwardBytes =
    32ll << 20;  // more than 4 chunks only where their grad_q fits into this

FASTATTN_FN int64_t backward_chunk_keys(const BackwardParams& p, int64_t groups) {
  const int64_t grad_q_bytes = max64(1, 4 * p.B * p.H * p.M * p.D);
  const int64_t most = max64(4, kBackwardBytes / grad_q_bytes);
  const int64_t chunks = max64(1, min64(most, ceil_div(kBackwardTasks, max64(1, groups))));
  return max64(1, ceil_div(p.N, chunks * kBackwardKeys)) * kBackwardKeys;
}

// Takes `floats` from the workspace, in whole cache lines.
FASTATTN_FN int64_t take(int64_t* used, int64_t floats) {
  const int64_t offset = *used;
  *used += ceil_div(floats, 16) * 16;
  return offset;
}

FASTATTN_FN BackwardPlan plan_backward(const BackwardParams& p) {
  BackwardPlan plan;
  const bool bias = p.grad_bias.data != nullptr;
  plan.groups_b = bias && p.bias_B == 1 ? 1 : p.B;
  plan.groups_h = bias && p.bias_H == 1 ? 1 : p.Hkv;
  plan.chunk_keys = backward_chunk_keys(p, plan.groups_b * plan.groups_h);
  plan.chunks = max64(1, ceil_div(p.N, plan.chunk_keys));

  const int64_t rows = p.B * p.H * p.M, bias_chunks = p.bias_N == 1 ? plan.chunks : 1;
  plan.q_direct = plan.chunks == 1 && p.grad_q.dtype == DType::kFloat32 && p.grad_q.stride_c == 1;
  plan.bias_direct = bias_chunks == 1 && p.grad_bias.dtype == DType::kFloat32;
  int64_t used = 0;
  plan.delta = take(&used, rows);
  plan.grad_q = take(&used, plan.q_direct ? 0 : plan.chunks * rows * p.D);
  plan.grad_w = take(&used, p.w.data == nullptr ? 0 : plan.chunks * p.B * p.H * p.D);
  plan.grad_bias =
      take(&used,
           !bias || plan.bias_direct ? 0 : bias_chunks * p.bias_B * p.bias_H * p.bias_M * p.bias_N);
  plan.workspace_bytes = 4 * used;
  return plan;
}

}  // namespace fastattn
