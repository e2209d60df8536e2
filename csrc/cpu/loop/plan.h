// How a problem is cut into tasks, where that decides the workspace: a function of the shape alone,
// never of the number of threads or of the instruction set.
#pragma once

#include "problem/mask.h"

namespace fastattn {

FASTATTN_FN int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// ---- heads as rows ----

// Whether the heads that share keys can be taken for the rows of one head, so that these are read
// once for all. That is, where nothing tells rows from heads but strides: one query, no dropout.
// Both passes must do so, as scores are to be summed in the same order in both.
FASTATTN_FN bool heads_are_rows(const AttentionParams& p) {
  return p.M == 1 && p.H > p.Hkv && p.w.data == nullptr && band_keeps_all(p.mask, p.M, p.N) &&
         !p.dropout.enabled && p.weights_mode == WeightsMode::kNone;
}

FASTATTN_FN void take_heads_as_rows(int64_t group, View* view) {
  view->stride_r = view->stride_h;
  view->stride_h *= group;
}
FASTATTN_FN void take_heads_as_rows(AttentionParams* p) {
  const int64_t group = p->H / p->Hkv;
  p->M = group, p->H = p->Hkv;
  p->mask = heads_as_rows(p->mask, group);
  take_heads_as_rows(group, &p->q);
  take_heads_as_rows(group, &p->bias);
}

// The same problem with the heads of a group as rows, if that can be. What has no strides, being
// contiguous over heads and queries, has its places unchanged.
FASTATTN_FN ForwardParams with_heads_as_rows(ForwardParams p) {
  if (!heads_are_rows(p)) return p;
  take_heads_as_rows(&p);
  take_heads_as_rows(p.M, &p.out);
  return p;
}
FASTATTN_FN BackwardParams with_heads_as_rows(BackwardParams p) {
  if (!heads_are_rows(p)) return p;
  take_heads_as_rows(&p);
  View* const views[] = {&p.out, &p.grad_out, &p.grad_q, &p.grad_bias};
  for (View* view : views) take_heads_as_rows(p.M, view);
  if (p.bias_H > 1) p.bias_H = p.H, p.bias_M = p.M;
  return p;
}

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

FASTATTN_FN ForwardPlan plan_forward(const ForwardParams& p) {
  ForwardPlan plan;
  plan.chunk_keys = max64(1, kKeysPerQuery * p.M / kChunkKeys) * kChunkKeys;
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
