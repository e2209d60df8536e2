// The row term of the softmax gradient, before the backward sweep proper:
//
//   delta_i = sum_e dO_ie O_ie + sum_j W_ij dW_ij - dlse_i
//
// W: weights after dropout; dW, dlse: gradients of the weights and of the log-sum-exp, if these
// were returned. The middle term recomputes the weights: one sweep over keys, only if there is dW.
#pragma once

#include "cpu/base/tasks.h"
#include "cpu/loop/args.h"
#include "cpu/score/score.h"
#include "cpu/tile/rows_in_place.h"
#include "cpu/tile/softmax.h"

namespace fastattn::FASTATTN_ISA {
// Gradient of the weights in row i of a tile, in fp32: to[c], c < cols rounded up to kWidth.
FASTATTN_SIMD void load_grad_weights(const BackwardParams& p, const TilePlace& at, int64_t i,
                                     float* to) {
  const bool mean = p.weights_mode == WeightsMode::kMean;
  Matrix from = matrix_at(p.grad_weights, at.b, mean ? 0 : at.h, at.i0 + i, 1, at.cols);
  from.offset += at.j0 * from.stride_c;
  pack_rows(from, mean ? 1.f / static_cast<float>(p.H) : 1.f, to, 0);
}

// Scores of a tile in rows of ld, two rows of scratch memory, and sums of rows, a vector each.
struct WeightTerms {
  const float* s;
  int64_t ld;
  float *drop, *grad_weights, *sum;
};

// Adds the terms W dW of a tile to the sums of its rows.
FASTATTN_SHARED void add_weight_terms_of(const BackwardArgs& args, const MaskTile& mask,
                                         const TilePlace& at, const WeightTerms& to);

#ifdef FASTATTN_SHARED_CODE
template <Masking kMasking>
static void add_masked_terms(const BackwardArgs& args, const MaskTile& mask, const TilePlace& at,
                             const WeightTerms& to) {
  const BackwardParams& p = args.p;
  const LinearLogit logit = args.units.linear;
  for (int64_t i = 0; i < at.rows; ++i) {
    const RowStats stats = args.stats(at.b, at.h, at.i0 + i);
    load_grad_weights(p, at, i, to.grad_weights);
    if (p.dropout.enabled) dropout_row(p.dropout, at, i, to.drop);
    const auto masked = mask.row<kMasking>(i);
    Vec sum = load(to.sum + i * kWidth);
    for (int64_t c = 0; c < at.cols; c += kWidth) {
      masked.prefetch_next(c);
      const Vec s = masked(load(to.s + i * to.ld + c), logit, c);
      Vec term = known_weight(s, logit, stats) * load(to.grad_weights + c);
      if (p.dropout.enabled) term *= load(to.drop + c);
      sum += s == splat(-kInf) ? Vec{} : term;
    }
    store(to.sum + i * kWidth, sum);
  }
}

FASTATTN_SHARED void add_weight_terms_of(const BackwardArgs& args, const MaskTile& mask,
                                         const TilePlace& at, const WeightTerms& to) {
  mask.with_masking([&](auto masking) { add_masked_terms<masking>(args, mask, at, to); });
}
#endif  // FASTATTN_SHARED_CODE

template <typename Score, typename Values>
class DeltaWorker {
 public:
  explicit DeltaWorker(const BackwardArgs& args)
      : args_(args),
        p_(args.p),
        tile_(Score::tile(args.path)),
        score_(p_, args.path, scratch_, false),
        mask_(p_, scratch_, tile_.m, tile_.n),
        s_(scores_memory(scratch_, p_.M, tile_)),
        drop_(scratch_.floats(tile_.n + 4 * kWidth)),
        grad_weights_(scratch_.floats(tile_.n)),
        sum_(scratch_.floats(tile_.m * kWidth)),
        term_(scratch_.floats(round_up(tile_.m, kWidth))),
        ld_(Values::kSumsByRow ? tile_stride(p_.E) : round_up(tile_.m, kWidth)),
        out_(scratch_.floats(Values::kSumsByRow ? ld_ : p_.E * ld_)),
        grad_out_(scratch_.floats(Values::kSumsByRow ? ld_ : p_.E * ld_)) {}

  void run(int64_t task) {
    const int64_t block = task % args_.blocks, bh = task / args_.blocks;
    b_ = bh / p_.H;
    h_ = bh % p_.H;
    i0_ = block * tile_.m;
    rows_ = min64(tile_.m, p_.M - i0_);
    sum_out_terms();
    fill(sum_, rows_ * kWidth, 0.f);
    if (p_.grad_weights.data != nullptr) add_weight_terms();
    for (int64_t i = 0; i < rows_; ++i) {
      const float grad_lse = p_.grad_lse == nullptr ? 0.f : p_.grad_lse[args_.row(b_, h_, i0_ + i)];
      *args_.delta(b_, h_, i0_ + i) = term_[i] + sum_lanes(load(sum_ + i * kWidth)) - grad_lse;
    }
  }

 private:
  // Each term is summed in the order in which dO V^T is summed, but for that of the matrix unit. A
  // row that keeps one key has O = V: its two sums are then equal, and dS is exactly 0.
  void sum_out_terms() {
    if constexpr (Values::kSumsByRow)
      sum_by_row();
    else
      sum_by_column();
  }
  void sum_by_row() {  // as dot_rows()
    const Matrix out = {out_, DType::kFloat32, 0, ld_, 1, 1, p_.E};
    Vec sums;
    for (int64_t i = 0; i < rows_; ++i) {
      pack_rows(matrix_at(p_.out, b_, h_, i0_ + i, 1, p_.E), 1.f, out_, ld_);
      pack_rows(matrix_at(p_.grad_out, b_, h_, i0_ + i, 1, p_.E), 1.f, grad_out_, ld_);
      dot_rows(grad_out_, ld_, 1, out, reinterpret_cast<float*>(&sums), kWidth);
      term_[i] = sums[0];
    }
  }
  void sum_by_column() {  // as gemm()
    pack_transposed(matrix_at(p_.out, b_, h_, i0_, rows_, p_.E), 1.f, out_, ld_);
    pack_transposed(matrix_at(p_.grad_out, b_, h_, i0_, rows_, p_.E), 1.f, grad_out_, ld_);
    for (int64_t i = 0; i < rows_; i += kWidth) {
      Vec sum{};
      in_chains(p_.E, Store{}, [&](int64_t begin, int64_t length, auto) {
        Vec chain{};
        for (int64_t e = begin; e < begin + length; ++e)
          chain += load(grad_out_ + e * ld_ + i) * load(out_ + e * ld_ + i);
        sum += chain;
      });
      store(term_ + i, sum);
    }
  }

  void add_weight_terms() {
    mask_.set_rows(b_, h_, i0_, rows_);
    score_.load_queries(b_, h_, i0_, rows_);
    const KeyRange keys = mask_.range();
    for (int64_t j0 = keys.begin / tile_.n * tile_.n; j0 < keys.end; j0 += tile_.n) {
      const int64_t cols = mask_.set_keys(j0, min64(tile_.n, keys.end - j0));
      if (cols == 0) continue;
      score_.load_keys(b_, h_ / args_.group, j0, cols);
      score_.use_form(score_.look_at(mask_));
      scores_of(score_, args_.units, mask_, rows_, cols, s_, tile_.n);
      add_weight_terms_of(args_, mask_, {b_, h_, i0_, rows_, j0, cols},
                          {s_, tile_.n, drop_, grad_weights_, sum_});
    }
  }

  const BackwardArgs& args_;
  const BackwardParams& p_;
  Scratch scratch_;
  const typename Score::Tile tile_;
  Score score_;
  MaskTile mask_;
  float *s_, *drop_, *grad_weights_, *sum_, *term_;
  int64_t ld_;
  float *out_, *grad_out_;
  int64_t b_ = 0, h_ = 0, i0_ = 0, rows_ = 0;
};

}  // namespace fastattn::FASTATTN_ISA
