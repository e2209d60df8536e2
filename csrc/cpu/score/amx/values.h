// Values on the matrix unit.
#pragma once

#include "cpu/score/amx/dot.h"
#include "cpu/score/amx/input.h"
#include "cpu/score/values.h"

namespace fastattn::FASTATTN_ISA {

// Packs the weights of a tile into a left operand. kOver: writes them over the scores as well.
template <Form kForm, bool kOver = false>
struct TileSink {
  static constexpr bool kKeepsScores = true;
  static constexpr Takes kTakes = kTilesHaveStrips ? Takes::kPairs : Takes::kAll;
  struct Row {
    static constexpr int kVectors = 2, kBits = (is_fp16(kForm) ? 11 : 8) * parts_of(kForm),
                         kOctaves = weight_octaves(kForm), kSlack = kOctaves == 0 ? 8 : 1;
    static constexpr bool kFlushes = true;
    int32_t* words;
    float* s;
    FASTATTN_MEMBER void put(int64_t c, const Vec* w) const {
      write_row<kForm>(split<kForm>(w[0]), split<kForm>(w[1]),
                       words + c * (parts_of(kForm) * kTileWords / kTileDepth));
      if constexpr (kOver) {
        store(s + c, w[0]);
        store(s + c + kWidth, w[1]);
      }
    }
  };
  int32_t* words;
  int64_t edge_words;
  float* s;
  int64_t ld;
  bool over;  // whether the scores are to be overwritten at the end
  FASTATTN_MEMBER Row row(int64_t i) const {
    const uint64_t n = i;
    return {words + n / kEdge * edge_words + n % kEdge * kEdge, s + i * ld};
  }
  FASTATTN_MEMBER TileSink<kForm, true> overwriting() const {
    return {words, edge_words, s, ld, true};
  }
};

// ValueTile on the matrix unit.
class AmxValueTile : public FormDefaults {
 public:
  AmxValueTile(const AttentionParams& p, const Path&, Scratch& scratch, int64_t block_m,
               int64_t block_n)
      : p_(p),
        ld_(tile_stride(p.E)),
        input_unit_(input_unit(p.q.dtype)),
        dropout_unit_(dropout_unit(p)),
        values_(scratch, block_n, p.E, p.q.dtype),
        v_(scratch, p.E, block_n, p.q.dtype),
        weights_(scratch, block_m, block_n, p.q.dtype) {}

  int64_t stride() const { return ld_; }
  float weight_unit() const { return two_to(weight_octaves(form_of(p_.q.dtype))); }
  float output_unit() const { return weight_unit() * dropout_unit_ * input_unit_; }
  void use_keys(int64_t cols) { cols_ = cols; }

  void load(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    values_.load(matrix_at(p_.v, b, hkv, j0, cols, p_.E), input_unit_);
    values_.pack<Depth::kRows, Side::kRight>(v_);
    values_.prefetch_next();
  }

  // Whether some kept pair has a value that does not fit.
  bool look_at(const MaskTile& mask) const {
    return values_.outliers().any() &&
           mask.keeps_any([](int64_t) { return false; },
                          [&](int64_t j) { return values_.is_outlier(j); });
  }
  void use_form(bool wide) {
    const Form form = wide ? wide_form_of(p_.q.dtype) : form_of(p_.q.dtype);
    values_.pack_as<Depth::kRows, Side::kRight>(form, v_);
    weights_.use(form);
  }

  void weigh(const MaskTile& mask, const DropoutParams& dropout, const TilePlace& at,
             const RowState& state, LinearLogit logit, float* s, int64_t ld, float* drop) {
    DropoutParams in_units = dropout;
    in_units.scale *= dropout_unit_;
    with_form(weights_.form(), [&](auto form) {
      const TileSink<form> sink{weights_.tiles(0, 0), weights_.edge_words(), s, ld,
                                values_.outliers().any_apart()};
      const FlushDenormals weights;  // like the matrix unit
      mask.with_masking([&](auto masking) {
        softmax_rows<masking>(mask, in_units, at, state, logit, s, ld, drop, sink);
      });
    });
  }

  // The operand of weights is filled already. `weights` is filled only where rows of V stand apart.
  void accumulate(const float* weights, int64_t ld, int64_t rows, const float* scale,
                  const MaskTile& mask, float* o) {
    for (int64_t i = 0; i < rows; ++i) {
      if (scale[i] == 1.f) continue;
      for (int64_t e = 0; e < ld_; e += kWidth)
        store(o + i * ld_ + e, fastattn::FASTATTN_ISA::load(o + i * ld_ + e) * scale[i]);
    }
    multiply_tiles(weights_, v_, rows, p_.E, cols_, true, o, ld_, {.depth = mask.lists()});
    accumulate_rows_apart(ByRows{weights, ld}, 1.f, rows, OutlierRows(), OutlierRows(), values_,
                          cols_, mask, o, ld_, 1);
  }

 private:
  const AttentionParams& p_;
  int64_t ld_, cols_ = 0;
  float input_unit_, dropout_unit_;
  AmxInput values_;
  Operand v_, weights_;
};

}  // namespace fastattn::FASTATTN_ISA
