// Fused attention, backward, for any score (cpu/score/score.h). P_ij = e^(s_ij - m_i) / l_i is
// recomputed, R is the factor of dropout, and W = R P are the weights that multiplied V:
//
//   dV_j = sum_i W_ij dO_i    dP_ij = R_ij (dO_i . V_j + dW_ij)    dS_ij = P_ij (dP_ij - delta_i)
//   dq, dk, dw from dS by the score; dbias = dS summed over the dims the bias was broadcast over
//
//   for (group of batches and key heads, chunk of keys)   a task; its dK, dV, dbias are its own
//     for key tiles, batches, key heads in it             K, V packed once; dK, dV stay in cache
//       for query heads of the key head, row blocks that keep some of these keys
//         S = scores, dP = dO V^T                         two tiles in the L2 cache
//         S, dP -> W, dS                                  in place; delta comes from delta.h
//         dV += W^T dO,  dK += dS^T Q,  dQ += dS K        dQ: an fp32 buffer per chunk (plan.h)
//   sum of dQ (dw, dbias) over chunks, and of a sink's terms over rows, in order: deterministic
//
// This takes five products; a separate pass for dQ would take seven. Dao et al., "FlashAttention",
// 2022, appendix B.
#pragma once

#include "cpu/loop/bias_grad.h"
#include "cpu/loop/delta.h"
#include "cpu/loop/tile_grads.h"
#include "cpu/score/values.h"
#include "problem/sink.h"

namespace fastattn::FASTATTN_ISA {
template <typename Score, typename Values>
class BackwardWorker {
 public:
  explicit BackwardWorker(const BackwardArgs& args)
      : args_(args),
        p_(args.p),
        tile_(Score::tile(args.path)),
        score_(p_, args.path, scratch_, true),
        mask_(p_, scratch_, tile_.m, tile_.n),
        ranges_(p_, scratch_, tile_.m),
        bias_(args, scratch_, tile_.m, tile_.n),
        values_(p_, p_.grad_out, scratch_, tile_.m, tile_.n),
        s_(scores_memory(scratch_, p_.M, tile_)),
        dp_(scores_memory(scratch_, p_.M, tile_)),
        slopes_(is_curved(p_) ? scores_memory(scratch_, p_.M, tile_) : nullptr),
        grads_(args, scratch_, mask_, s_, dp_, tile_.n) {}

  void run(int64_t task) {
    const BackwardGroups& groups = args_.plan.groups;
    const Path& path = args_.path;
    chunk_ = task % path.chunks;
    const int64_t group = task / path.chunks;
    const int64_t heads = groups.h > 0 ? p_.Hkv / groups.h : 0;
    const int64_t group_b = group / groups.h, group_h = group % groups.h;
    const int64_t b0 = group_b * p_.B / groups.b, b1 = (group_b + 1) * p_.B / groups.b;
    const int64_t h0 = group_h * heads;
    const int64_t begin = chunk_ * path.chunk_keys, end = min64(p_.N, begin + path.chunk_keys);
    const TaskHeads all = {b0, b1, h0 * args_.group, (h0 + heads) * args_.group};
    clear_sums(all);
    bias_.begin_task(all, args_.plan.copies.of(chunk_, group_b, group_h));
    for (int64_t j0 = begin; j0 < end; j0 += tile_.n) {
      const int64_t cols = min64(tile_.n, end - j0);
      bias_.begin_keys(j0, cols);
      for (int64_t b = b0; b < b1; ++b)
        for (int64_t hkv = h0; hkv < h0 + heads; ++hkv) key_tile(b, hkv, j0, cols);
    }
  }

 private:
  // Where this chunk's gradient of q_i goes, in rows of grad_q_stride().
  float* grad_q(int64_t b, int64_t h, int64_t i) const {
    const View& to = p_.grad_q;
    if (args_.plan.q_direct)
      return static_cast<float*>(to.data) + b * to.stride_b + h * to.stride_h + i * to.stride_r;
    const int64_t rows = p_.B * p_.H * p_.M;
    return args_.workspace(args_.plan.grad_q) + (chunk_ * rows + args_.row(b, h, i)) * p_.D;
  }
  int64_t grad_q_stride() const { return args_.plan.q_direct ? p_.grad_q.stride_r : p_.D; }
  double* grad_w(int64_t b, int64_t h) const {
    if (p_.w.data == nullptr) return nullptr;
    return args_.sums(args_.plan.grad_w) + ((chunk_ * p_.B + b) * p_.H + h) * p_.D;
  }

  void clear_sums(const TaskHeads& all) {
    for (int64_t b = all.b0; b < all.b1; ++b) {
      ranges_.use(b);
      for (int64_t h = all.h0; h < all.h1; ++h) {
        for (int64_t i = 0; i < p_.M; ++i)
          if (args_.plan.q_direct || args_.meets(ranges_.of_block(i / tile_.m), chunk_))
            fill(grad_q(b, h, i), p_.D, 0.f);
        if (p_.w.data != nullptr) zero_sums(grad_w(b, h), p_.D);
      }
    }
  }

  void key_tile(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    ranges_.use(b);
    const KeyRange kept = ranges_.all();
    const int64_t used = kept.begin >= j0 + cols ? 0 : max64(0, min64(cols, kept.end - j0));
    loaded_ = false;
    for (int64_t h = hkv * args_.group; h < (hkv + 1) * args_.group; ++h)
      for (int64_t i0 = 0; i0 < p_.M; i0 += tile_.m) {
        const TilePlace at = {b, h, i0, min64(tile_.m, p_.M - i0), j0, used};
        if (!pair(at, hkv)) bias_.skip_tile(at);
      }
    const int64_t written = loaded_ ? used : 0;
    if (loaded_) {
      score_.store_key_grad(p_.grad_k, b, hkv, j0);
      values_.store(p_.grad_v, b, hkv, j0);
    }
    unpack_zeros(matrix_at(p_.grad_k, b, hkv, j0 + written, cols - written, p_.D));
    unpack_zeros(matrix_at(p_.grad_v, b, hkv, j0 + written, cols - written, p_.E));
  }

  // One row block of one head against the current key tile. Returns whether any pair is kept.
  bool pair(TilePlace at, int64_t hkv) {
    if (at.cols == 0) return false;
    mask_.set_rows(at.b, at.h, at.i0, at.rows, ranges_.of_block(at.i0 / tile_.m));
    const int64_t needed = mask_.set_keys(at.j0, at.cols);
    if (needed == 0) return false;
    if (!loaded_) load_keys(at.b, hkv, at.j0, at.cols);
    if (Score::kCanNarrow) at.cols = needed;
    score_.use_keys(at.cols);
    values_.use_keys(at.cols);
    score_.load_queries(at.b, at.h, at.i0, at.rows);
    values_.load_grad_out(at.b, at.h, at.i0, at.rows);
    choose_form(score_, values_, mask_);
    if (Score::kHasStrips && p_.grad_bias.data == nullptr) mask_.find_strips();
    scores_of(score_, args_.units, mask_, at.rows, at.cols, s_, tile_.n, slopes_);
    values_.grad_weights(mask_, dp_);
    BiasGrad::Rows bias = bias_.begin_tile(at);
    values_.make_grads(
        score_,
        [&](auto&& sink, const GradUnits& units) __attribute__((always_inline)) {
          grads_.put({at, units, bias, slopes_}, sink);
          bias = {};  // should there be another time
        },
        GradsInPlace{s_, dp_, tile_.n});
    bias_.end_tile(at);
    if (mask_.sparse()) {
      mask_.strips().clear_others(s_, tile_.n, at.rows, at.cols);
      mask_.strips().clear_others(dp_, tile_.n, at.rows, at.cols);
    }
    values_.accumulate(s_, mask_);
    score_.backward(dp_, mask_, grad_q(at.b, at.h, at.i0), grad_q_stride(), grad_w(at.b, at.h));
    return true;
  }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    score_.load_keys(b, hkv, j0, cols);
    score_.clear_key_grad();
    values_.load_values(b, hkv, j0, cols);
    loaded_ = true;
  }

  const BackwardArgs& args_;
  const BackwardParams& p_;
  Scratch scratch_;
  const typename Score::Tile tile_;
  Score score_;
  MaskTile mask_;
  RowRanges ranges_;
  BiasGrad bias_;
  Values values_;
  float *s_, *dp_, *slopes_;
  TileGrads grads_;
  int64_t chunk_ = 0;
  bool loaded_ = false;
};

// What follows the sweep: sums over chunks, and the gradient of the bias in its own dtype.
FASTATTN_SHARED void finish_sums(const BackwardArgs& args, const Parallel& parallel);

#ifdef FASTATTN_SHARED_CODE
// Adds up the results of chunks in the workspace, and the terms of a sink, one (b, h) a task.
class ReduceWorker {
 public:
  explicit ReduceWorker(const BackwardArgs& args)
      : args_(args), p_(args.p), ranges_(p_, scratch_, args.block_m) {}

  void run(int64_t task) {
    const int64_t b = task / p_.H, h = task % p_.H;
    if (!args_.plan.q_direct) {
      ranges_.use(b);
      for (int64_t block = 0; block < args_.blocks; ++block) sum_queries(b, h, block);
    }
    if (p_.grad_sink.data != nullptr) sum_sink(b, h);
    if (p_.grad_w == nullptr) return;
    double* const sum = args_.sums(args_.plan.grad_w) + task * p_.D;
    const int64_t chunk_sums = p_.B * p_.H * p_.D;
    for (int64_t d = 0; d < p_.D; ++d) {
      for (int64_t chunk = 1; chunk < args_.path.chunks; ++chunk)
        sum[d] += sum[chunk * chunk_sums + d];
      p_.grad_w[task * p_.D + d] = static_cast<float>(sum[d]);
    }
  }

 private:
  void sum_queries(int64_t b, int64_t h, int64_t block) {
    const int64_t i0 = block * args_.block_m, rows = min64(args_.block_m, p_.M - i0);
    const Matrix to = matrix_at(p_.grad_q, b, h, i0, rows, p_.D);
    float* sum = nullptr;
    for (int64_t chunk = 0; chunk < args_.path.chunks; ++chunk) {
      if (!args_.meets(ranges_.of_block(block), chunk)) continue;
      float* const own = args_.workspace(args_.plan.grad_q) +
                         (chunk * p_.B * p_.H * p_.M + args_.row(b, h, i0)) * p_.D;
      sum == nullptr ? static_cast<void>(sum = own) : add(own, rows * p_.D, sum);
    }
    sum == nullptr ? unpack_zeros(to) : unpack_dense(sum, to);
  }
  void sum_sink(int64_t b, int64_t h) const {
    const View& to = p_.grad_sink;
    float* const first = static_cast<float*>(to.data) + b * to.stride_b + h * to.stride_h;
    const double natural = args_.units.natural / args_.units.saved;
    double sum = *first = 0.f;
    for (int64_t i = 0; i < p_.M; ++i) {
      const float delta = *args_.delta(b, h, i);
      if (to.stride_r != 0) sum = 0.;  // rows are heads
      sum += sink_term(p_, load_sink(p_.sink, b, h, i), natural, args_.row(b, h, i), delta,
                       [](double x) { return __builtin_exp(x); });
      first[i * to.stride_r] = static_cast<float>(sum);
    }
  }
  static void add(const float* from, int64_t count, float* to) {
    for (int64_t n = 0; n < count; ++n) to[n] += from[n];
  }

  const BackwardArgs& args_;
  const BackwardParams& p_;
  Scratch scratch_;
  RowRanges ranges_;
};

FASTATTN_SHARED void finish_sums(const BackwardArgs& args, const Parallel& parallel) {
  const BackwardParams& p = args.p;
  if (!args.plan.q_direct || p.grad_w != nullptr || p.grad_sink.data != nullptr) {
    const double summed = static_cast<double>(p.B * p.H) * static_cast<double>(p.M) *
                          static_cast<double>(p.D * args.path.chunks);
    TaskLoop<ReduceWorker, BackwardArgs>::run(args, p.B * p.H, summed, parallel);
  }
  if (p.grad_bias.data != nullptr && !args.plan.bias_direct) {
    const double size = static_cast<double>(p.bias_B * p.bias_H * p.bias_M * p.bias_N);
    TaskLoop<BiasGradWriter, BackwardArgs>::run(args, BiasGradWriter::tasks(p), size, parallel);
  }
}
#endif  // FASTATTN_SHARED_CODE

template <typename Score, typename Values = ValueGrads>
static void backward(const BackwardParams& p, const Path& path, const Parallel& parallel) {
  const int64_t block_m = Score::tile(path).m;
  const int64_t blocks = ceil_div(p.M, block_m), heads = p.B * p.H;
  const int64_t group = p.Hkv > 0 ? p.H / p.Hkv : 1;
  const LogitUnits units = logit_units(p, Score::scale(p), Score::own_factor(p));
  const BackwardArgs args = {{p, path, units, group, blocks}, plan_backward(p, path), block_m};
  const double rows = static_cast<double>(heads) * static_cast<double>(p.M);
  const double work = pass_work(p, 3 * Score::kDimWork * p.D + 2 * p.E);
  const double sweep = p.grad_weights.data == nullptr ? 1 : static_cast<double>(p.N);
  TaskLoop<DeltaWorker<Score, Values>, BackwardArgs>::run(
      args, heads * blocks, rows * static_cast<double>(p.E) * sweep, parallel);
  const int64_t tasks = args.plan.groups.b * args.plan.groups.h * path.chunks;
  TaskLoop<BackwardWorker<Score, Values>, BackwardArgs>::run(args, tasks, work, parallel);
  finish_sums(args, parallel);
}

}  // namespace fastattn::FASTATTN_ISA
