// The returned attention weights: those of each head, or their mean over heads. The mean is summed
// in head order in scratch memory, so that nothing of size H M N exists.
//
// A task of the forward pass that takes its heads one after another keeps the logits of one. It
// adds up the weights when it knows the stats of the head's rows. Another sweep recomputes the
// scores where keys are split, or where such tasks would be too few or keep too much. Both give the
// same bits, unless a tile has a choice of forms: docs/decisions/0030-kept-logits.md.
#pragma once

#include "cpu/loop/args.h"
#include "cpu/score/score.h"

namespace fastattn::FASTATTN_ISA {

// Writes the logits of a tile, given its scores: -inf where a pair is masked.
FASTATTN_SHARED void logits_of(const MaskTile& mask, LinearLogit logit, int64_t rows, int64_t cols,
                               const float* s, int64_t ld_s, float* to, int64_t ld);

// Adds the weights of a tile, given its logits and the stats of its rows, to sums.
FASTATTN_SHARED void add_weights(const ForwardArgs& args, const TilePlace& at, const float* logits,
                                 int64_t ld_logits, float* drop, float* sums, int64_t ld);

#ifdef FASTATTN_SHARED_CODE
FASTATTN_SHARED void logits_of(const MaskTile& mask, LinearLogit logit, int64_t rows, int64_t cols,
                               const float* s, int64_t ld_s, float* to, int64_t ld) {
  mask.with_masking([&](auto masking) {
    for (int64_t i = 0; i < rows; ++i) {
      const auto masked = mask.row<masking>(i);
      for (int64_t c = 0; c < cols; c += kWidth) {
        masked.prefetch_next(c);
        store(to + i * ld + c, masked(load(s + i * ld_s + c), logit, c));
      }
    }
  });
}

FASTATTN_SHARED void add_weights(const ForwardArgs& args, const TilePlace& at, const float* logits,
                                 int64_t ld_logits, float* drop, float* sums, int64_t ld) {
  const DropoutParams& dropout = args.p.dropout;
  for (int64_t i = 0; i < at.rows; ++i) {
    const RowStats stats = args.stats(at.b, at.h, at.i0 + i);
    if (dropout.enabled) dropout_row(dropout, at, i, drop);
    for (int64_t c = 0; c < at.cols; c += kWidth) {
      Vec w = known_weight(load(logits + i * ld_logits + c), args.units.linear, stats);
      if (dropout.enabled) w *= load(drop + c);
      float* const to = sums + i * ld + c;
      store(to, load(to) + w);
    }
  }
}
#endif  // FASTATTN_SHARED_CODE

// The weights of a row block over some keys, added up over heads.
class WeightSums {
 public:
  WeightSums(const ForwardArgs& args, Scratch& scratch, int64_t rows, int64_t keys)
      : args_(args),
        ld_(round_up(keys, kWidth)),
        sums_(scratch.floats(rows * ld_)),
        drop_(scratch.floats(keys + 4 * kWidth)) {}

  // `place`: all rows and keys of these sums, and the head that they are written to.
  void begin(const TilePlace& place) {
    place_ = place;
    fill(sums_, place.rows * ld_, 0.f);
  }
  void add(int64_t h, int64_t j0, int64_t cols, const float* logits, int64_t ld_logits) {
    add_weights(args_, {place_.b, h, place_.i0, place_.rows, j0, cols}, logits, ld_logits, drop_,
                sums_ + (j0 - place_.j0), ld_);
  }
  void write() const {
    const ForwardParams& p = args_.p;
    const int64_t heads = max64(1, p.H / max64(1, heads_out(p)));
    Matrix to = matrix_at(p.weights, place_.b, place_.h, place_.i0, place_.rows, place_.cols);
    to.offset += place_.j0 * to.stride_c;
    unpack_rows(sums_, ld_, 1.f / static_cast<float>(heads), nullptr, to);
  }

 private:
  const ForwardArgs& args_;
  int64_t ld_;
  float *sums_, *drop_;
  TilePlace place_{};
};

// The sweep that recomputes scores. A task owns (b, head or all heads, row block, panel of keys).
template <typename Score>
class WeightsWorker {
 public:
  explicit WeightsWorker(const ForwardArgs& args)
      : args_(args),
        p_(args.p),
        tile_(Score::tile(args.path)),
        score_(p_, args.path, scratch_, false),
        mask_(p_, scratch_, tile_.m, tile_.n),
        s_(scores_memory(scratch_, p_.M, tile_)),
        sums_(args, scratch_, min64(p_.M, tile_.m), panel_keys(tile_)) {}

  static int64_t panels(const ForwardArgs& args) {
    return ceil_div(args.p.N, panel_keys(Score::tile(args.path)));
  }

  void run(int64_t task) {
    const int64_t panel = task % panels(args_), outer = task / panels(args_);
    const int64_t i0 = outer % args_.blocks * tile_.m, bh = outer / args_.blocks;
    const int64_t h_out = bh % heads_out(p_), heads = p_.H / max64(1, heads_out(p_));
    const int64_t begin = panel * panel_keys(tile_), end = min64(p_.N, begin + panel_keys(tile_));
    const TilePlace place{bh / heads_out(p_),        h_out, i0,
                          min64(tile_.m, p_.M - i0), begin, end - begin};
    sums_.begin(place);
    for (int64_t g = 0; g < heads; ++g) add_head(place, h_out * heads + g, end);
    sums_.write();
  }

 private:
  static int64_t panel_keys(const typename Score::Tile& tile) { return 4 * tile.n; }

  void add_head(const TilePlace& place, int64_t h, int64_t end) {
    mask_.set_rows(place.b, h, place.i0, place.rows);
    if (mask_.range().begin >= end || mask_.range().end <= place.j0) return;
    score_.load_queries(place.b, h, place.i0, place.rows);
    for (int64_t j0 = place.j0; j0 < end; j0 += tile_.n) {
      const int64_t cols = mask_.set_keys(j0, min64(tile_.n, end - j0));
      if (cols == 0) continue;
      score_.load_keys(place.b, h / args_.group, j0, cols);
      score_.use_form(score_.look_at(mask_));
      scores_of(score_, args_.units, mask_, place.rows, cols, s_, tile_.n);
      logits_of(mask_, args_.units.linear, place.rows, cols, s_, tile_.n, s_, tile_.n);
      sums_.add(h, j0, cols, s_, tile_.n);
    }
  }

  const ForwardArgs& args_;
  const ForwardParams& p_;
  Scratch scratch_;
  const typename Score::Tile tile_;
  Score score_;
  MaskTile mask_;
  float* s_;
  WeightSums sums_;
};

}  // namespace fastattn::FASTATTN_ISA
