// The returned attention weights: another sweep after the forward pass, which recomputes scores and
// uses the saved stats.
#pragma once

#include "cpu/loop/args.h"
#include "cpu/score/score.h"

namespace fastattn::FASTATTN_ISA {

// A tile whose weights are added up.
struct WeightSums {
  const float* s;  // scores, in rows of ld_s
  int64_t ld_s;
  const RowStats* stats;  // of its rows
  float* drop;            // a row of scratch memory
  float* to;              // the sums, in rows of ld
  int64_t ld;
};

// Adds the weights of a tile to sums.
FASTATTN_SHARED void add_weights(const ForwardParams& p, LinearLogit logit, const MaskTile& mask,
                                 const TilePlace& at, const WeightSums& sums);

#ifdef FASTATTN_SHARED_CODE
template <Masking kMasking>
static void add_masked_weights(const ForwardParams& p, LinearLogit logit, const MaskTile& mask,
                               const TilePlace& at, const WeightSums& sums) {
  for (int64_t i = 0; i < at.rows; ++i) {
    float* const to = sums.to + i * sums.ld;
    const auto masked = mask.row<kMasking>(i);
    if (p.dropout.enabled) dropout_row(p.dropout, at.b, at.h, at.i0 + i, at.j0, at.cols, sums.drop);
    for (int64_t c = 0; c < at.cols; c += kWidth) {
      const Vec logits = masked(load(sums.s + i * sums.ld_s + c), logit, c);
      Vec w = known_weight(logits, logit, sums.stats[i]);
      if (p.dropout.enabled) w *= load(sums.drop + c);
      store(to + c, load(to + c) + w);
    }
  }
}

FASTATTN_SHARED void add_weights(const ForwardParams& p, LinearLogit logit, const MaskTile& mask,
                                 const TilePlace& at, const WeightSums& sums) {
  mask.with_masking([&](auto masking) { add_masked_weights<masking>(p, logit, mask, at, sums); });
}
#endif  // FASTATTN_SHARED_CODE

// Writes the attention weights per head, or their mean over heads. The mean is summed in head order
// in a panel of scratch memory, so that nothing of size H M N exists. A task owns (b, head or all
// heads, row block, panel of keys).
template <typename Score>
class WeightsWorker {
 public:
  explicit WeightsWorker(const ForwardArgs& args)
      : args_(args),
        p_(args.p),
        heads_(p_.H / max64(1, heads_out(p_))),
        tile_(Score::tile(args.path)),
        score_(p_, args.path, scratch_, false),
        mask_(p_, scratch_, tile_.m, tile_.n),
        s_(scratch_.floats(row_capacity(min64(p_.M, tile_.m)) * tile_.n)),
        drop_(scratch_.floats(tile_.n + 4 * kWidth)),
        panel_(scratch_.floats(min64(p_.M, tile_.m) * ld())),
        stats_(scratch_.of<RowStats>(tile_.m)) {}

  static int64_t heads_out(const ForwardParams& p) {
    return p.weights_mode == WeightsMode::kMean ? 1 : p.H;
  }
  static int64_t panels(const ForwardArgs& args) {
    return ceil_div(args.p.N, panel_keys(Score::tile(args.path)));
  }

  void run(int64_t task) {
    const int64_t panel = task % panels(args_), outer = task / panels(args_);
    const int64_t block = outer % args_.blocks, bh = outer / args_.blocks;
    b_ = bh / heads_out(p_);
    i0_ = block * tile_.m;
    rows_ = min64(tile_.m, p_.M - i0_);
    const int64_t h_out = bh % heads_out(p_), begin = panel * ld(), end = min64(p_.N, begin + ld());
    fill(panel_, rows_ * ld(), 0.f);
    for (int64_t g = 0; g < heads_; ++g) add_head(h_out * heads_ + g, begin, end);
    unpack_rows(panel_, ld(), 1.f / static_cast<float>(max64(1, heads_)), nullptr,
                column_slice(matrix_at(p_.weights, b_, h_out, i0_, rows_, end - begin), begin));
  }

 private:
  static int64_t panel_keys(const typename Score::Tile& tile) { return 4 * tile.n; }
  int64_t ld() const { return panel_keys(tile_); }

  static Matrix column_slice(Matrix matrix, int64_t begin) {
    matrix.offset += begin * matrix.stride_c;
    return matrix;
  }

  void add_head(int64_t h, int64_t begin, int64_t end) {
    mask_.set_rows(b_, h, i0_, rows_);
    if (mask_.range().begin >= end || mask_.range().end <= begin) return;
    score_.load_queries(b_, h, i0_, rows_);
    for (int64_t i = 0; i < rows_; ++i) stats_[i] = args_.stats(b_, h, i0_ + i);
    for (int64_t j0 = begin; j0 < end; j0 += tile_.n) {
      const int64_t cols = mask_.set_keys(j0, min64(tile_.n, end - j0));
      if (cols == 0) continue;
      score_.load_keys(b_, h / args_.group, j0, cols);
      score_.use_form(score_.look_at(mask_));
      scores_of(score_, args_.units, mask_, rows_, cols, s_, tile_.n);
      add_weights(p_, args_.units.linear, mask_, {b_, h, i0_, rows_, j0, cols},
                  {s_, tile_.n, stats_, drop_, panel_ + (j0 - begin), ld()});
    }
  }

  const ForwardArgs& args_;
  const ForwardParams& p_;
  int64_t heads_;
  Scratch scratch_;
  const typename Score::Tile tile_;
  Score score_;
  MaskTile mask_;
  float *s_, *drop_, *panel_;
  RowStats* stats_;
  int64_t b_ = 0, i0_ = 0, rows_ = 0;
};

}  // namespace fastattn::FASTATTN_ISA
