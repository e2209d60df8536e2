// Fused attention, forward, for any score (cpu/score/score.h):
//
//   out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = e^(s_ij - m_i)      lse_i = ln sum_j e^(s_ij)
//
//   for (b, head or heads, row blocks, chunk of keys)   a task; its Q and O stay in the L2 cache
//     for key tiles that some row keeps                 K, V packed once a tile
//       for heads and row blocks of the task that keep some of these keys
//         S = scores                                    [m, n] of a tile
//         S -> masked, biased -> weights, m, l          online softmax (softmax.h)
//         O = alpha O + W V
//     out = O / l, lse, stats; with several chunks (O, m, l) to the workspace, merged in a 2nd pass
//
// Saved for backward: stats (m, 1 / l). Returned weights: weights.h. Dao et al., "FlashAttention:
// fast and memory-efficient exact attention with IO-awareness", 2022; split keys: Dao et al.,
// "Flash-Decoding", 2023; online softmax: Milakov and Gimelshein, 2018.
#pragma once

#include "cpu/base/tasks.h"
#include "cpu/loop/weights.h"
#include "cpu/score/score.h"
#include "cpu/score/values.h"
#include "cpu/tile/first_maxima.h"
#include "cpu/tile/softmax.h"

namespace fastattn::FASTATTN_ISA {
// Bytes of queries and outputs of a task, for an L2 cache of 512 KiB, of 1 MiB with AVX-512, and of
// 2 MiB with a matrix unit. Measured: half of this or 4/3 of it is 1 to 3% slower. In fp32 512 KiB
// take up to 5% off additive calls of 256 dims, where 300 were before, and 1 to 3% off 4096 tokens
// at D 128. That is Zen 4; other CPUs with AVX-512 were not measured.
#ifdef __AMX_BF16__
constexpr int64_t kStackedBytes = 900 * 1024;
#elif defined(__AVX512F__)
constexpr int64_t kStackedBytes = 512 * 1024;
#else
constexpr int64_t kStackedBytes = 300 * 1024;
#endif
// Bytes of the logits that a task keeps, and of its sums of weights. Measured: 600 KiB is 5 to 13%
// slower in bf16 (Zen 5). One row block may take more, up to kMostKept.
constexpr int64_t kKeptBytes = 2600 * 1024;
constexpr int64_t kMostKept = 32 << 20;
constexpr int64_t kTasksPerThread = 4;  // enough for the threads to finish together

// Of one row block: 4 for each logit, and 4 for each sum.
template <typename Score>
FASTATTN_SIMD int64_t kept_bytes(const ForwardParams& p, const Path& path) {
  return 8 * Score::tile(path).m * p.N;
}

// How many row blocks a task stacks. Those of packed documents have few keys in common: each has
// tiles that begin with its own first key.
template <typename Score>
FASTATTN_SIMD int64_t choose_stack(const ForwardParams& p, const Path& path, int64_t blocks,
                                   int64_t turns, int64_t threads) {
  if (begins_vary_by_row(p.mask)) return 1;
  const int64_t row_bytes = max64(1, Score::query_bytes(p) + 4 * p.E);
  int64_t fitting = kStackedBytes / (Score::tile(path).m * row_bytes);
  if (turns > 0) fitting = min64(fitting, kKeptBytes / max64(1, kept_bytes<Score>(p, path)));
  const int64_t heads = p.H / max64(1, turns);
  const int64_t tasks = threads > 1 ? kTasksPerThread * threads : 1;
  const int64_t balanced = p.B * heads * blocks / tasks;
  return max64(1, min64(blocks, min64(fitting, balanced)));
}

// How many heads that share keys a task takes, each of which has one row block: a key tile is
// packed once for them. All threads are to finish soon, so few tasks of many heads may be worse
// than many tasks of few. For one thread they are not.
template <typename Score>
FASTATTN_SIMD int64_t choose_heads(const ForwardParams& p, const Path& path, int64_t group,
                                   int64_t chunks, int64_t threads) {
  if (path.heads_together == Together::kAlways) threads = 1;
  const int64_t row_bytes = max64(1, Score::query_bytes(p) + 4 * p.E);
  int64_t best = 1, least = INT64_MAX;
  for (int64_t heads = 1; heads <= group; ++heads) {
    if (group % heads != 0 || (heads > 1 && heads * p.M * row_bytes > kStackedBytes)) continue;
    const int64_t tasks = p.B * (p.H / heads) * chunks;
    const int64_t time = ceil_div(tasks, threads) * (heads * p.M + kVisit);
    if (time <= least) best = heads, least = time;
  }
  return best;
}

// Heads that a task takes one by one, if all their weights are added up and such tasks are enough.
// Where the form of a tile may vary, another sweep could round its scores differently. The number
// of threads must not decide then.
template <typename Score>
FASTATTN_SIMD int64_t choose_turns(const ForwardParams& p, const Path& path, int64_t blocks,
                                   int64_t threads) {
  const bool has = p.weights_mode != WeightsMode::kNone && p.H > 0;
  if (!has || path.chunks > 1 || kept_bytes<Score>(p, path) > kMostKept) return 0;
  const bool enough = Score::has_forms(p) || p.B * heads_out(p) * blocks >= threads;
  return enough ? p.H / heads_out(p) : 0;
}

// The chunks of keys that some row keeps: few of those of a cache that has few keys. One at least,
// because its tasks write the rows.
FASTATTN_SIMD KeyRange chunks_of_rows(const ForwardParams& p, const Path& path) {
  if (path.chunks == 1) return {0, 1};
  KeyRange keys = {p.N, 0};
  for (int64_t b = 0; b < p.B; ++b) {
    const KeyRange own = tile_range(p.mask, p.N, b, 0, p.M);
    if (own.begin >= own.end) continue;
    keys = {min64(keys.begin, own.begin), max64(keys.end, own.end)};
  }
  const int64_t first = min64(max64(0, keys.begin) / path.chunk_keys, path.chunks - 1);
  return {first, max64(first + 1, min64(path.chunks, ceil_div(keys.end, path.chunk_keys)))};
}

template <typename Score>
FASTATTN_SIMD ForwardArgs forward_args(const ForwardParams& p, const Path& path, int64_t threads) {
  const int64_t group = p.Hkv > 0 ? p.H / p.Hkv : 0, blocks = ceil_div(p.M, Score::tile(path).m);
  const int64_t turns = choose_turns<Score>(p, path, blocks, threads);
  const int64_t stack = choose_stack<Score>(p, path, blocks, turns, threads);
  const KeyRange chunks = chunks_of_rows(p, path);
  const bool together = path.heads_together != Together::kNever && turns == 0 && blocks == 1;
  const int64_t heads =
      together ? choose_heads<Score>(p, path, group, chunks.end - chunks.begin, threads) : 1;
  return {{p, path, logit_units(p, Score::scale(p), Score::own_factor(p)), group, blocks},
          min64(group, heads),
          stack,
          ceil_div(blocks, stack),
          turns,
          later_rows_keep_more(p.mask, p.N),
          chunks.begin,
          chunks.end - chunks.begin};
}

// Of a row in a chunk, given its maximum and sum: its output is neither written nor read then.
FASTATTN_SIMD bool met_no_key(const float* m_and_l) {
  return m_and_l[0] == -kInf && m_and_l[1] == 0.f;
}

template <typename Score, typename Values>
class ForwardWorker {
 public:
  explicit ForwardWorker(const ForwardArgs& args)
      : args_(args),
        p_(args.p),
        members_(args.heads * args.stack),
        tile_(Score::tile(args.path)),
        score_(p_, args.path, scratch_, false, members_),
        values_(p_, args.path, scratch_, tile_.m, tile_.n),
        mask_(p_, scratch_, tile_.m, tile_.n),
        s_(scores_memory(scratch_, p_.M, tile_)),
        drop_(p_.dropout.enabled ? scratch_.floats(kWidth * round_up(tile_.n, 4 * kWidth))
                                 : nullptr),
        states_(scratch_, members_, min64(p_.M, tile_.m), values_.stride()),
        ld_kept_(round_up(p_.N, kWidth)),
        kept_(args.turns > 0 ? scratch_.floats(most_rows() * ld_kept_) : nullptr),
        sums_(args, scratch_, most_rows(), args.turns > 0 ? p_.N : 0) {}

  void run(int64_t task) {
    const int64_t stack = task % args_.stacks, outer = task / args_.stacks;
    const int64_t chunk = args_.chunk0 + outer % args_.chunks, bh = outer / args_.chunks;
    const int64_t groups = p_.H / args_.heads_of_task();
    b_ = bh / groups;
    h0_ = bh % groups * args_.heads_of_task();
    block0_ = (args_.reverse ? args_.stacks - 1 - stack : stack) * args_.stack;
    if (args_.turns > 0) return take_turns();
    attend_all(chunk);
    for (int64_t g = 0; g < members(); ++g)
      args_.path.chunks == 1 ? write_out(g) : write_partial(g, chunk);
  }

 private:
  // One row block of one head. A task has several.
  struct Member {
    int64_t h, i0, rows;
  };
  Member member(int64_t g) const {
    const int64_t i0 = (block0_ + g / args_.heads) * tile_.m;
    return {h0_ + g % args_.heads, i0, min64(tile_.m, p_.M - i0)};
  }

  void attend_all(int64_t chunk) {
    states_.clear();
    sweep(chunk * args_.path.chunk_keys, min64(p_.N, (chunk + 1) * args_.path.chunk_keys));
  }

  // The rows of a task: several blocks of a head.
  int64_t most_rows() const { return min64(p_.M, args_.stack * tile_.m); }

  // The outputs of a task's heads, and the weights that they return.
  void take_turns() {
    const int64_t i0 = block0_ * tile_.m, rows = min64(most_rows(), p_.M - i0);
    const KeyRange keys = tile_range(p_.mask, p_.N, b_, i0, i0 + rows);
    const int64_t begin = max64(0, keys.begin) / kWidth * kWidth, end = h0_ + args_.turns;
    sums_.begin({b_, h0_ / args_.turns, i0, rows, 0, p_.N});
    for (; h0_ < end; ++h0_) {
      fill(kept_, rows * ld_kept_, -kInf);
      attend_all(0);
      for (int64_t g = 0; g < members(); ++g) write_out(g);
      if (begin < keys.end) sums_.add(h0_, begin, keys.end - begin, kept_ + begin, ld_kept_);
    }
    sums_.write();
  }

  int64_t members() const { return args_.heads * min64(args_.stack, args_.blocks - block0_); }

  void sweep(int64_t begin, int64_t end) {
    const int64_t i1 = min64(p_.M, (block0_ + args_.stack) * tile_.m);
    const KeyRange keys = tile_range(p_.mask, p_.N, b_, block0_ * tile_.m, i1);
    if (keys.begin >= end || keys.end <= begin) return;  // chunks of other samples
    for (int64_t g = 0; g < members(); ++g) {
      const Member m = member(g);
      score_.use_slot(g);
      score_.load_queries(b_, m.h, m.i0, m.rows);
      if (end - begin > tile_.n)
        first_maxima(p_, b_, m.h, m.i0, m.rows, {begin, end}, states_.member(g).m);
    }
    const int64_t step = begins_vary_by_row(p_.mask) ? Score::kBeginStep : tile_.n;
    begin = max64(begin, keys.begin / step * step);
    // Tiles do not end where the keys of these row blocks end; the masks of each block cut them. So
    // a block's results do not depend on the other blocks of its stack.
    for (int64_t j0 = begin; j0 < min64(end, keys.end); j0 += tile_.n) {
      int64_t loaded = 0;
      for (int64_t g = 0; g < members(); ++g)
        loaded = attend(g, j0, min64(tile_.n, end - j0), loaded);
    }
  }

  // Computes one member on one tile, whose first `loaded` keys are packed. Returns how many are
  // packed now.
  int64_t attend(int64_t g, int64_t j0, int64_t cols, int64_t loaded) {
    const Member m = member(g);
    mask_.set_rows(b_, m.h, m.i0, m.rows);
    const int64_t needed = mask_.set_keys(j0, cols);
    if (needed == 0) {  // as a computed tile that masks all of a row: no maximum rises
      fill(states_.member(g).alpha, m.rows, 1.f);
      return loaded;
    }
    if (needed > loaded) {
      loaded = needed;
      score_.load_keys(b_, m.h / args_.group, j0, loaded);
      values_.load(b_, m.h / args_.group, j0, loaded);
    }
    score_.use_slot(g);
    const RowState state = states_.member(g);
    const int64_t used = Score::kCanNarrow ? needed : loaded;
    score_.use_keys(used);
    values_.use_keys(used);
    choose_form(score_, values_, mask_);
    // Keys that are read where they lie have no strips, nor have values that are summed by row.
    if (Score::kHasStrips && args_.path.way != Way::kRowsInPlace && !args_.path.values_by_row)
      mask_.find_strips();
    scores_of(score_, args_.units, mask_, m.rows, used, s_, tile_.n);
    if (args_.turns > 0)
      logits_of(mask_, args_.units.linear, m.rows, used, s_, tile_.n,
                kept_ + (m.i0 - block0_ * tile_.m) * ld_kept_ + j0, ld_kept_);
    values_.weigh(mask_, p_.dropout, {b_, m.h, m.i0, m.rows, j0, used}, state, args_.units.linear,
                  s_, tile_.n, drop_);
    values_.accumulate(s_, tile_.n, m.rows, state.alpha, mask_, state.o);
    return loaded;
  }

  void write_out(int64_t g) {
    const RowState state = states_.member(g);
    const Member m = member(g);
    for (int64_t i = 0; i < m.rows; ++i) {
      const float l = sum_lanes(load(state.l + i * kWidth)) / values_.weight_unit();
      state.alpha[i] = args_.write_row(b_, m.h, m.i0 + i, state.m[i], l);
    }
    unpack_rows(state.o, values_.stride(), 1.f / values_.output_unit(), state.alpha,
                matrix_at(p_.out, b_, m.h, m.i0, m.rows, p_.E));
  }

  void write_partial(int64_t g, int64_t chunk) {
    const RowState state = states_.member(g);
    const Member m = member(g);
    for (int64_t i = 0; i < m.rows; ++i) {
      float* const to = args_.partial(b_, m.h, chunk, m.i0 + i);
      to[p_.E] = state.m[i];
      to[p_.E + 1] = sum_lanes(load(state.l + i * kWidth)) / values_.weight_unit();
      if (met_no_key(to + p_.E)) continue;
      for (int64_t e = 0; e < p_.E; ++e)
        to[e] = state.o[i * values_.stride() + e] / values_.output_unit();
    }
  }

  const ForwardArgs& args_;
  const ForwardParams& p_;
  int64_t members_;
  Scratch scratch_;
  const typename Score::Tile tile_;
  Score score_;
  Values values_;
  MaskTile mask_;
  float *s_, *drop_;
  RowStates states_;
  int64_t ld_kept_;
  float* kept_;  // logits of a task's rows, of one head
  WeightSums sums_;
  int64_t b_ = 0, h0_ = 0, block0_ = 0;
};

// Merges the chunks of all rows.
FASTATTN_SHARED void merge_chunks(const ForwardArgs& args, const Parallel& parallel);

#ifdef FASTATTN_SHARED_CODE
// Merges the chunks of one (b, h), in order, with the arithmetic of an online softmax step.
class MergeWorker {
 public:
  explicit MergeWorker(const ForwardArgs& args)
      : args_(args), p_(args.p), o_(scratch_.floats(round_up(p_.E, kWidth))) {}

  void run(int64_t task) {
    const int64_t b = task / p_.H, h = task % p_.H;
    for (int64_t i = 0; i < p_.M; ++i) merge_row(b, h, i);
  }

 private:
  void merge_row(int64_t b, int64_t h, int64_t i) {
    float m = -kInf, l = 0.f;
    const int64_t end = args_.chunk0 + args_.chunks;
    for (int64_t chunk = args_.chunk0; chunk < end; ++chunk) {
      const float m_chunk = args_.partial(b, h, chunk, i)[p_.E];
      m = m_chunk > m ? m_chunk : m;
    }
    fill(o_, p_.E, 0.f);
    for (int64_t chunk = args_.chunk0; chunk < end; ++chunk) {
      const float* const from = args_.partial(b, h, chunk, i);
      if (met_no_key(from + p_.E)) continue;
      const float factor = __builtin_exp2f((from[p_.E] - m) * args_.units.linear.unit);
      l += factor * from[p_.E + 1];
      for (int64_t e = 0; e < p_.E; ++e) o_[e] += factor * from[e];
    }
    const float factor = args_.write_row(b, h, i, m, l);
    unpack_rows(o_, 0, factor, nullptr, matrix_at(p_.out, b, h, i, 1, p_.E));
  }

  const ForwardArgs& args_;
  const ForwardParams& p_;
  Scratch scratch_;
  float* o_;
};

FASTATTN_SHARED void merge_chunks(const ForwardArgs& args, const Parallel& parallel) {
  const double merged = static_cast<double>(forward_bytes(args.p, args.path));
  TaskLoop<MergeWorker, ForwardArgs>::run(args, args.p.B * args.p.H, merged, parallel);
}
#endif  // FASTATTN_SHARED_CODE

template <typename Score, typename Values = ValueTile>
static void forward(const ForwardParams& p, const Path& path, const Parallel& parallel) {
  const double work = pass_work(p, Score::kDimWork * p.D + p.E);
  const int64_t threads = work < path.parallel_work ? 1 : parallel.num_threads;
  const ForwardArgs args = forward_args<Score>(p, path, threads);
  TaskLoop<ForwardWorker<Score, Values>, ForwardArgs>::run(args, args.tasks(), work, parallel);
  if (args.path.chunks > 1) merge_chunks(args, parallel);
  if (p.weights_mode == WeightsMode::kNone || args.turns > 0) return;
  using Weights = WeightsWorker<Score>;
  const int64_t tasks = p.B * heads_out(p) * args.blocks * Weights::panels(args);
  TaskLoop<Weights, ForwardArgs>::run(args, tasks, work, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
