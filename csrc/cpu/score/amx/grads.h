// W and dS of a tile on their way into operands.
#pragma once

#include "cpu/score/amx/values.h"

namespace fastattn::FASTATTN_ISA {

// W and dS of a tile on their way into operands, where each is split once: W for dV = W^T dO, dS
// for dK = dS^T Q and dQ = dS K.
template <Form kForm>
class PackedGrads {
 public:
  static constexpr int kRows = 2, kVectors = 2;
  static constexpr int64_t kStep = word_step(kForm), kWhole = kTileDepth;

  // Puts the first `rows` rows in place, too, if `also` is not nullptr.
  PackedGrads(const Operand& w_columns, const Operand& ds_columns, const Operand& ds_rows,
              const GradUnits& units, const GradsInPlace* also, int64_t rows)
      : w_columns_(w_columns),
        ds_columns_(ds_columns),
        ds_rows_(ds_rows),
        units_(units),
        also_(also),
        rows_(rows) {}

  // Whether no row of dS stands apart, nor is too large for its form.
  bool all_packed() const { return all_packed_; }
  // The largest number in dS, but for rows that stand apart.
  float top() const { return max_lanes(from_bits(top_)); }

  FASTATTN_MEMBER void begin(int64_t i) {
    i_ = i;
    tops_[0] = tops_[1] = VecI{};
  }
  FASTATTN_MEMBER void put(int64_t c, const Vec (&w)[2][2], const Vec (&ds)[2][2]) {
    const int64_t edge = c / kEdge, depth = i_ / kTileDepth,
                  row = i_ % kTileDepth / words_apart(kForm) * kEdge;
    Parts<kForm> part[2][2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      write_column_words<kForm>(split<kForm>(w[0][v]), split<kForm>(w[1][v]),
                                w_columns_.tiles(edge + v, depth) + row);
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) {
        tops_[n] = largest(tops_[n], ds[n][v]);
        part[n][v] = split<kForm>(ds[n][v]);
      }
      write_column_words<kForm>(part[0][v], part[1][v], ds_columns_.tiles(edge + v, depth) + row);
    }
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      const int64_t i = i_ + n * kStep;
      write_row<kForm>(part[n][0], part[n][1],
                       ds_rows_.tiles(i / kEdge, c / kTileDepth) + i % kEdge * kEdge);
    }
    if (__builtin_expect(also_ != nullptr, 0)) put_also(c, w, ds);
  }
  FASTATTN_MEMBER void end() {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      const float high = kAnyBf16.high * units_.ds;
      const Window any = {0.f, high < __FLT_MAX__ ? high : __FLT_MAX__};
      all_packed_ &= (is_fp16(kForm) ? Window{0.f, kLargestHalf} : any).has(tops_[n]);
      if (is_fp16(kForm) && any.has(tops_[n])) top_ = top_ > tops_[n] ? top_ : tops_[n];
    }
  }

 private:
  void put_also(int64_t c, const Vec (&w)[2][2], const Vec (&ds)[2][2]) const {
    for (int64_t n = 0; n < 2 && i_ + n * kStep < rows_; ++n)
      for (int v = 0; v < 2; ++v) {
        const int64_t at = (i_ + n * kStep) * also_->ld + c + v * kWidth;
        store(also_->w + at, w[n][v] * (1.f / units_.w));
        store(also_->ds + at, ds[n][v] * (1.f / units_.ds));
      }
  }

  const Operand &w_columns_, &ds_columns_, &ds_rows_;
  GradUnits units_;
  const GradsInPlace* also_;
  int64_t rows_, i_ = 0;
  VecI tops_[2], top_{};
  bool all_packed_ = true;
};

template <int64_t kM, int64_t kN, typename Fill>
static void finish_grads(AmxDotScore<kM, kN>& score, AmxValueGrads& values, Fill fill,
                         GradsInPlace in_place) {
  const bool dense = score.rows_apart() || values.rows_apart();
  bool packed = false;
  GradUnits units = {values.weight_unit(), values.grad_weights_unit(),
                     score.start_grad_unit(values.size_unit())};
  with_form(score.ds_rows().form(), [&](auto form) {
    const auto pack = [&] {
      PackedGrads<form> sink(values.weights(), score.ds_columns(), score.ds_rows(), units,
                             dense ? &in_place : nullptr, values.rows());
      fill(sink, units);
      packed = sink.all_packed();
      return sink.top();
    };
    if (!score.change_grad_unit(pack())) return;
    packed = false;
    units.ds = score.grad_unit();
    if (!dense) pack();  // else W and dS lie where S and dP were, and will be packed from there
  });
  if (!packed && !dense) fill(in_place, GradUnits{1.f, units.dp, 1.f});
  score.use_packed(packed);
  values.use_packed(packed);
}

}  // namespace fastattn::FASTATTN_ISA
