// What the workspace holds. It depends on the shape and on how keys are split, never on the number
// of threads or the instruction set.
#pragma once

#include "cpu/base/path.h"
#include "problem/host_device.h"
#include "problem/params.h"

namespace fastattn {

// ---- forward ----

struct ForwardPlan {
  int64_t partial_stride;  // floats a row: E accumulated values, maximum, sum
  int64_t workspace_bytes;
};

FASTATTN_FN ForwardPlan plan_forward(const ForwardParams& p, const Path& path) {
  ForwardPlan plan;
  plan.partial_stride = p.E + 2;
  plan.workspace_bytes =
      path.chunks == 1 ? 0 : 4 * plan.partial_stride * path.chunks * p.B * p.H * p.M;
  return plan;
}

// ---- backward ----

// A task owns a chunk of keys of one key head, and loops over all queries that meet it. If a bias
// is broadcast over batch or heads, the task owns that chunk for all of them. One task alone thus
// adds to each element. Each chunk has its own fp32 gradient of q (and of w, and of a bias that is
// broadcast over keys or a line), summed in order at the end.
struct BackwardGroups {
  int64_t b, h;  // number of groups of batches and of key heads: all, or 1
};

FASTATTN_FN BackwardGroups backward_groups(const BackwardParams& p) {
  const bool bias = p.grad_bias.data != nullptr;
  return {bias && p.bias_B == 1 ? 1 : p.B, bias && p.bias_H == 1 ? 1 : p.Hkv};
}

// Chunks of keys that have sums of the bias of their own, as they would meet in its elements.
FASTATTN_FN int64_t bias_chunks(const BackwardParams& p, const Path& path) {
  return p.bias_N == 1 || p.bias_is_line ? path.chunks : 1;
}

struct BackwardPlan {
  BackwardGroups groups;
  bool q_direct, bias_direct;                // gradients are summed in place, not in the workspace
  int64_t delta, grad_q, grad_w, grad_bias;  // offsets into the workspace, in floats
  int64_t workspace_bytes;
};

// Takes `floats` from the workspace, rounded up to whole cache lines.
FASTATTN_FN int64_t take(int64_t* used, int64_t floats) {
  const int64_t offset = *used;
  *used += ceil_div(floats, 16) * 16;
  return offset;
}

FASTATTN_FN BackwardPlan plan_backward(const BackwardParams& p, const Path& path) {
  BackwardPlan plan;
  plan.groups = backward_groups(p);
  const bool bias = p.grad_bias.data != nullptr;
  const int64_t rows = p.B * p.H * p.M, chunks = bias_chunks(p, path);
  plan.q_direct = path.chunks == 1 && p.grad_q.dtype == DType::kFloat32 && p.grad_q.stride_c == 1;
  plan.bias_direct = chunks == 1 && p.grad_bias.dtype == DType::kFloat32;
  int64_t used = 0;
  plan.delta = take(&used, rows);
  plan.grad_q = take(&used, plan.q_direct ? 0 : path.chunks * rows * p.D);
  plan.grad_w = take(&used, p.w.data == nullptr ? 0 : path.chunks * p.B * p.H * p.D);
  plan.grad_bias = take(
      &used, !bias || plan.bias_direct ? 0 : chunks * p.bias_B * p.bias_H * p.bias_M * p.bias_N);
  plan.workspace_bytes = 4 * used;
  return plan;
}

}  // namespace fastattn
