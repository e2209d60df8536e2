// W and dS of a tile, from its scores and dP, for any score.
#pragma once

#include "cpu/loop/bias_grad.h"

namespace fastattn::FASTATTN_ISA {

class TileGrads {
 public:
  // S and dP have rows of ld.
  TileGrads(const BackwardArgs& args, Scratch& scratch, const MaskTile& mask, const float* s,
            const float* dp, int64_t ld)
      : args_(args),
        p_(args.p),
        mask_(mask),
        s_(s),
        dp_(dp),
        ld_(ld),
        drop_(scratch.floats(kRows * drop_ld())),
        grad_weights_(scratch.floats(kRows * ld)) {}

  // Where a tile lies, the factors of its results, where dS goes for the bias, and the slopes of a
  // curve, or nullptr.
  struct Tile {
    const TilePlace& at;
    const GradUnits& units;
    const BiasGrad::Rows& bias;
    const float* slopes;
  };
  template <typename Sink>
  FASTATTN_MEMBER void put(const Tile& tile, Sink& sink) {
    if constexpr (std::is_same_v<std::remove_const_t<Sink>, GradsInPlace>)
      put_in_place(tile, sink);
    else
      put_into(tile, sink);
  }

 private:
  void put_in_place(const Tile& tile, GradsInPlace sink);
  template <typename Sink>
  FASTATTN_MEMBER void put_into(const Tile& tile, Sink& sink) {
    with_logit(args_.units.linear, tile.slopes, ld_,
               [&](auto logit) __attribute__((always_inline)) {
                 mask_.with_masking([&](auto masking) { grad_scores<masking>(tile, logit, sink); });
               });
  }

  static constexpr int64_t kRows = 2;  // most rows that a sink takes
  int64_t drop_ld() const { return ld_ + 4 * kWidth; }

  // Factors of a tile: from scores to logits, of dP and dW before W and dS are computed, and of dS
  // after.
  template <typename Logit>
  struct Factors {
    Logit logit;
    float dp, grad_weights, grad_bias;
  };
  // Everything that the gradients of a row of scores depend on, beside its mask.
  struct Row {
    int64_t i;
    bool exists;
    RowStats stats;
    float delta;
    const float *s, *dp, *drop, *grad_weights;  // the last two or nullptr
    float* bias;                                // or nullptr
  };
  // `n`: the row's number among those that a sink takes at a time.
  Row row(const Tile& tile, int64_t i, int n) {
    const TilePlace& at = tile.at;
    const GradUnits& units = tile.units;
    if (i >= at.rows) return {i, false, {}, 0.f, nullptr, nullptr, nullptr, nullptr, nullptr};
    float *const drop = drop_ + n * drop_ld(), *const grad_weights = grad_weights_ + n * ld_;
    if (p_.dropout.enabled) dropout_row(p_.dropout, at, i, drop);
    const bool weights = p_.grad_weights.data != nullptr;
    if (weights) load_grad_weights(p_, at, i, grad_weights);
    const RowStats stats = args_.stats(at.b, at.h, at.i0 + i);
    return {i,
            true,
            {stats.shift, stats.factor * units.w, stats.most},
            *args_.delta(at.b, at.h, at.i0 + i) * (units.ds / units.w),
            s_ + i * ld_,
            dp_ + i * ld_,
            p_.dropout.enabled ? drop : nullptr,
            weights ? grad_weights : nullptr,
            tile.bias.row(i)};
  }

  // W and dS of kWidth pairs from column c on, exactly 0 where masked. kPlain: weights are P.
  template <Masking kMasking, bool kPlain, typename Logit>
  FASTATTN_MEMBER static void grads_at(const Row& row, const MaskTile::Row<kMasking>& masked,
                                       int64_t c, const Factors<Logit>& factors, Vec& w, Vec& ds) {
    masked.prefetch_next(c);
    const Vec s = masked(load(row.s + c), factors.logit, c),
              p = known_weight(s, factors.logit, row.stats);
    Vec dp = load(row.dp + c) * factors.dp;
    w = p;
    if (!kPlain && row.grad_weights != nullptr)
      dp += load(row.grad_weights + c) * factors.grad_weights;
    if (!kPlain && row.drop != nullptr) dp *= load(row.drop + c), w *= load(row.drop + c);
    ds = p * (dp - row.delta);
    if (kMasking != Masking::kNone) ds = s == splat(-kInf) ? Vec{} : ds;
  }

  // Puts W and dS of rows into a sink. kPlain, in addition: all rows and columns exist.
  template <Masking kMasking, bool kPlain, typename Logit, typename Sink>
  FASTATTN_MEMBER void put_rows(const Row (&rows)[Sink::kRows], int64_t cols,
                                Factors<Logit> factors, bool overwrites, Sink& sink) const {
    const auto columns = columns_of<kMasking, Sink::kTakes>(mask_, rows[0].i, cols);
    const int64_t vectors = columns.count();
    MaskTile::Row<kMasking> masked[Sink::kRows];
    for (int n = 0; n < Sink::kRows; ++n) masked[n] = mask_.row<kMasking>(rows[n].i);
    auto to = sink.row(rows[0].i);
    for (int64_t first = 0; first < vectors; first += Sink::kVectors) {
      const int64_t c = columns.at(first);
      Vec w[Sink::kRows][Sink::kVectors], ds[Sink::kRows][Sink::kVectors];
#pragma GCC unroll 2
      for (int n = 0; n < Sink::kRows; ++n)
#pragma GCC unroll 2
        for (int v = 0; v < Sink::kVectors; ++v) {
          const int64_t at = c + v * kWidth;
          if (kPlain || (rows[n].exists && at < cols)) {
            grads_at<kMasking, kPlain>(rows[n], masked[n], at, factors, w[n][v], ds[n][v]);
            if (rows[n].bias != nullptr)
              BiasGrad::put(rows[n].bias + at, ds[n][v] * factors.grad_bias, overwrites);
            ds[n][v] = factors.logit.slope(rows[n].i, at, ds[n][v]);
          } else {
            w[n][v] = ds[n][v] = Vec{};
          }
        }
      to.put(c, w, ds);
    }
    sink.end(to);
  }

  // Turns S and dP into W and dS, and puts them into a sink: kRows rows, kStep rows apart, and
  // kVectors vectors at a time. There are zeros beyond the tile, up to multiples of kWhole rows.
  template <Masking kMasking, typename Logit, typename Sink>
  void grad_scores(const Tile& tile, Logit logit, Sink& sink) {
    static_assert(Sink::kRows <= kRows, "a row of factors each");
    const TilePlace& at = tile.at;
    const GradUnits& units = tile.units;
    const float made = units.ds / units.w;
    const Factors<Logit> factors = {logit, made / units.dp, made, 1.f / units.ds};
    const bool plain = !p_.dropout.enabled && p_.grad_weights.data == nullptr &&
                       at.cols % (Sink::kVectors * kWidth) == 0;
    for (int64_t i0 = 0; i0 < round_up(at.rows, Sink::kWhole); i0 += Sink::kRows * Sink::kStep)
      for (int64_t i = i0; i < i0 + Sink::kStep; ++i) {
        Row rows[Sink::kRows];
        for (int n = 0; n < Sink::kRows; ++n) rows[n] = row(tile, i + n * Sink::kStep, n);
        plain&& rows[Sink::kRows - 1].exists
            ? put_rows<kMasking, true>(rows, at.cols, factors, tile.bias.overwrites, sink)
            : put_rows<kMasking, false>(rows, at.cols, factors, tile.bias.overwrites, sink);
      }
  }

  const BackwardArgs& args_;
  const BackwardParams& p_;
  const MaskTile& mask_;
  const float *s_, *dp_;
  int64_t ld_;
  float *drop_, *grad_weights_;
};

#ifdef FASTATTN_SHARED_CODE
void TileGrads::put_in_place(const Tile& tile, GradsInPlace sink) { put_into(tile, sink); }
#endif

}  // namespace fastattn::FASTATTN_ISA
