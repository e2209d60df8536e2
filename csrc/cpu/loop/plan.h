// What the workspace holds. It depends on the shape and on how keys are split, never on the number
// of threads or the instruction set.
#pragma once

#include "cpu/base/path.h"
#include "problem/host_device.h"
#include "problem/params.h"

namespace fastattn {

// ---- forward ----

// Floats of a row of a chunk: E accumulated values, maximum, sum.
FASTATTN_FN int64_t partial_floats(const ForwardParams& p) { return p.E + 2; }

FASTATTN_FN int64_t forward_bytes(const ForwardParams& p, const Path& path) {
  return path.chunks == 1 ? 0 : 4 * partial_floats(p) * path.chunks * p.B * p.H * p.M;
}

// ---- backward ----

// A task owns a chunk of keys of one key head, and loops over all queries that meet it. Each chunk
// has its own gradient of q (and of w), summed in order at the end.
//
// Where tasks meet in a bias gradient of few numbers, each has sums of its own: a row, a column or
// a line. A bias of pairs (i, j) that is broadcast over heads has a task for all of them. One that
// is broadcast over batches has groups of batches.
struct BackwardGroups {
  int64_t b, h;  // number of groups of batches and of key heads
};

// Whether the bias of a head is one row, one column or a line: an element is added to many pairs.
FASTATTN_FN bool has_long_sums(const BackwardParams& p) { return p.bias_M == 1 || p.bias_N == 1; }

// Sums of sqrt(B) batches and then of groups are more accurate than one of all batches. The sums of
// the groups take at most half the memory of q.
FASTATTN_FN int64_t batch_groups(const BackwardParams& p) {
  const int64_t room = p.B * p.H * p.D / max64(1, 2 * p.bias_H * p.bias_N);
  int64_t groups = 1;
  while (4 * groups * groups <= p.B && 2 * groups <= room) groups *= 2;
  return groups;
}
FASTATTN_FN BackwardGroups backward_groups(const BackwardParams& p) {
  const bool pairs = p.grad_bias.data != nullptr && !has_long_sums(p);
  return {pairs && p.bias_B == 1 ? batch_groups(p) : p.B, pairs && p.bias_H == 1 ? 1 : p.Hkv};
}

// Batches and query heads of a task: b0 <= b < b1, h0 <= h < h1.
struct TaskHeads {
  int64_t b0, b1, h0, h1;
};

// The copies of a bias gradient: one for each chunk and group that meet in its elements.
struct BiasCopies {
  int64_t chunks, b, h;

  int64_t count() const { return chunks * b * h; }
  int64_t of(int64_t chunk, int64_t group_b, int64_t group_h) const {
    return (chunk % chunks * b + group_b % b) * h + group_h % h;
  }
};
FASTATTN_FN BiasCopies bias_copies(const BackwardParams& p, const Path& path,
                                   const BackwardGroups& groups) {
  return {p.bias_N == 1 || p.bias_is_line ? path.chunks : 1, p.bias_B == 1 ? groups.b : 1,
          p.bias_H == 1 ? groups.h : 1};
}

struct BackwardPlan {
  BackwardGroups groups;
  BiasCopies copies;
  bool q_direct, bias_direct;  // gradients are summed in place, not in the workspace
  // Offsets into the workspace, in floats. Sums of w, and of a bias that has_long_sums(), are
  // double.
  int64_t delta, grad_q, grad_w, grad_bias;
  int64_t workspace_bytes;
};

FASTATTN_FN BackwardPlan plan_backward(const BackwardParams& p, const Path& path) {
  BackwardPlan plan;
  plan.groups = backward_groups(p);
  plan.copies = bias_copies(p, path, plan.groups);
  const bool bias = p.grad_bias.data != nullptr;
  const int64_t rows = p.B * p.H * p.M, copies = plan.copies.count();
  plan.q_direct = path.chunks == 1 && p.grad_q.dtype == DType::kFloat32 && p.grad_q.stride_c == 1;
  // Without heads, no task has a tile that sets the bias's sums.
  plan.bias_direct =
      !has_long_sums(p) && copies == 1 && p.grad_bias.dtype == DType::kFloat32 && p.B * p.H > 0;
  int64_t used = 0;
  plan.delta = take(&used, rows);
  plan.grad_q = take(&used, plan.q_direct ? 0 : path.chunks * rows * p.D);
  plan.grad_w = take(&used, p.w.data == nullptr ? 0 : 2 * path.chunks * p.B * p.H * p.D);
  const int64_t sums = copies * p.bias_B * p.bias_H * p.bias_M * p.bias_N;
  plan.grad_bias = take(&used, !bias || plan.bias_direct ? 0 : has_long_sums(p) ? 2 * sums : sums);
  plan.workspace_bytes = 4 * used;
  return plan;
}

}  // namespace fastattn
