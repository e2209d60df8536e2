// What the workers of a pass share: the problem, its plan, and the positions of rows.
#pragma once

#include "cpu/base/half.h"
#include "cpu/base/path.h"
#include "cpu/loop/plan.h"
#include "cpu/tile/softmax.h"

namespace fastattn::FASTATTN_ISA {

// The sink of a row. NaN becomes one that rounding to 16 bits keeps: see words_of().
FASTATTN_SIMD double load_sink(const View& from, int64_t b, int64_t h, int64_t i) {
  const int64_t offset = b * from.stride_b + h * from.stride_h + i * from.stride_r;
  double sink = 0.;
  with_dtype(from.dtype, [&](auto type) { sink = load_one<type>(from.data, offset); });
  return sink == sink ? sink : __builtin_nan("");
}

// What both passes have.
template <typename Params>
struct PassArgs {
  const Params& p;
  const Path& path;
  LogitUnits units;
  int64_t group;   // query heads per key head
  int64_t blocks;  // row blocks of a head

  int64_t row(int64_t b, int64_t h, int64_t i) const { return (b * p.H + h) * p.M + i; }
  RowStats stats(int64_t b, int64_t h, int64_t i) const {
    return load_stats(units, p.stats, row(b, h, i));
  }
};

// Visiting a row of keys or queries takes as long as its products with about so many others.
// Measured on Zen 3 alone; results do not depend on it (0003, 0006).
constexpr int64_t kVisit = 8;

// What a pass does, in multiply-adds: `a_pair` for each pair (i, j), and a visit of each row.
FASTATTN_SIMD double pass_work(const AttentionParams& p, int64_t a_pair) {
  const double queries = static_cast<double>(p.B * p.H) * static_cast<double>(p.M);
  const double keys = static_cast<double>(p.B * p.Hkv) * static_cast<double>(p.N);
  return queries * static_cast<double>(p.N) * static_cast<double>(a_pair) +
         (queries + keys) * static_cast<double>(kVisit * (p.D + p.E));
}

// A task takes several row blocks through each key tile together, so that the tile is packed once
// for all. These are row blocks of one head or, where M is small, heads that share a key head.
// No row's result changes, so this may depend on the number of threads.
struct ForwardArgs : PassArgs<ForwardParams> {
  int64_t heads, stack;  // row blocks of a task: heads x stack
  int64_t stacks;        // row ranges of tasks, per head
  int64_t turns;         // heads that a task takes one after another, with their logits kept; or 0
  bool reverse;          // takes later row blocks, which have more keys, first
  int64_t chunk0, chunks;  // chunks of keys that some row keeps: others have no task

  int64_t heads_of_task() const { return heads * max64(1, turns); }
  int64_t tasks() const { return heads == 0 ? 0 : p.B * (p.H / heads_of_task()) * chunks * stacks; }
  float* partial(int64_t b, int64_t h, int64_t chunk, int64_t i) const {
    const int64_t row = ((b * p.H + h) * chunks + chunk - chunk0) * p.M + i;
    return static_cast<float*>(p.workspace) + row * partial_floats(p);
  }
  // Writes lse, if anybody wants it, and stats of a finished row; returns the factor of its output.
  float write_row(int64_t b, int64_t h, int64_t i, float m, float l) const {
    RowStats stats = row_stats(m, l);
    float lse = p.lse == nullptr ? 0.f : natural_lse(units, m, l);
    if (p.sink.data != nullptr) take_sink(b, h, i, l, &stats, &lse);
    if (p.lse != nullptr) p.lse[row(b, h, i)] = lse;
    store_stats(stats, units, row(b, h, i), p.stats);
    return stats.factor;
  }
  // Adds a sink to the sum of a row, l beside its maximum. A row without keys keeps a factor of 0.
  void take_sink(int64_t b, int64_t h, int64_t i, float l, RowStats* stats, float* lse) const {
    const double sink = load_sink(p.sink, b, h, i);
    const double top = stats->shift * units.natural, sum = l + __builtin_exp(sink - top);
    const bool has_all = l == 0.f || sum == __builtin_inf();
    if (l != 0.f) stats->factor = static_cast<float>(1. / sum);
    *lse = static_cast<float>(has_all ? sink : top + __builtin_log(sum));
  }
};

struct BackwardArgs : PassArgs<BackwardParams> {
  BackwardPlan plan;
  int64_t block_m;  // rows of a block

  float* workspace(int64_t offset) const { return static_cast<float*>(p.workspace) + offset; }
  double* sums(int64_t offset) const { return reinterpret_cast<double*>(workspace(offset)); }
  // Whether a chunk's gradient of q has sums of a row block, which keeps these keys.
  bool meets(KeyRange kept, int64_t chunk) const {
    const int64_t begin = chunk * path.chunk_keys;
    return kept.begin < begin + path.chunk_keys && kept.end > begin;
  }
  float* delta(int64_t b, int64_t h, int64_t i) const {
    return workspace(plan.delta) + row(b, h, i);
  }
};

}  // namespace fastattn::FASTATTN_ISA
