// Values and their gradients on the matrix unit, with the interfaces of score/values.h.
#pragma once

#include "cpu/score/amx/dot.h"
#include "cpu/score/amx/input.h"
#include "cpu/score/values.h"

namespace fastattn::FASTATTN_ISA {

// The weights of a tile on their way into a left operand.
template <Form kForm>
struct TileSink {
  const Operand& to;
  float* also;  // in fp32, too; may be nullptr
  int64_t ld;

  struct Row {
    static constexpr int kVectors = 2, kBits = (is_fp16(kForm) ? 11 : 8) * parts_of(kForm),
                         kOctaves = weight_octaves(kForm), kSlack = kOctaves == 0 ? 8 : 1;
    static constexpr bool kFlushes = true;
    int32_t* words;
    float* also;
    FASTATTN_MEMBER void put(int64_t c, const Vec (&w)[2]) const {
      write_row<kForm>(split<kForm>(w[0]), split<kForm>(w[1]),
                       words + c * (parts_of(kForm) * kTileWords / kTileDepth));
      if (__builtin_expect(also != nullptr, 0)) {
        store(also + c, w[0]);
        store(also + c + kWidth, w[1]);
      }
    }
  };
  FASTATTN_MEMBER Row row(int64_t i) const {
    return {to.tiles(i / kEdge, 0) + i % kEdge * kEdge, also == nullptr ? also : also + i * ld};
  }
  static constexpr bool kKeepsScores = true;
  FASTATTN_MEMBER Row row_apart(int64_t i) const { return {row(i).words, nullptr}; }
  bool is_in_place() const { return also != nullptr; }
};

// ValueTile on the matrix unit.
class AmxValueTile {
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
  // As weights are to be multiplied.
  DropoutParams in_units(DropoutParams dropout) const {
    dropout.scale *= dropout_unit_;
    return dropout;
  }
  void use_keys(int64_t cols) { cols_ = cols; }

  void load(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    values_.load(matrix_at(p_.v, b, hkv, j0, cols, p_.E), input_unit_);
    values_.pack<Depth::kRows, Side::kRight>(v_);
    values_.prefetch_next();
  }

  // Whether some kept pair has a value that does not fit.
  bool needs_wide(const MaskTile& mask) const {
    return values_.misfits().any() &&
           mask.keeps_any([](int64_t) { return false; },
                          [&](int64_t j) { return values_.is_misfit(j); });
  }
  void use_form(bool wide) {
    const Form form = wide ? wide_form_of(p_.q.dtype) : form_of(p_.q.dtype);
    values_.pack_as<Depth::kRows, Side::kRight>(form, v_);
    weights_.use(form);
  }

  // Calls f with where the softmax is to put the weights that replace scores s.
  template <typename F>
  FASTATTN_MEMBER void with_sink(float* s, int64_t ld, F f) {
    float* const also = values_.misfits().any_apart() ? s : nullptr;
    with_form(weights_.form(), [&](auto form) { f(TileSink<form>{weights_, also, ld}); });
  }

  // The operand of weights is filled already; `weights` itself only where rows of V stand apart.
  void accumulate(const float* weights, int64_t ld, int64_t rows, const float* scale, bool masked,
                  float* o) {
    for (int64_t i = 0; i < rows; ++i) {
      if (scale[i] == 1.f) continue;
      for (int64_t e = 0; e < ld_; e += kWidth)
        store(o + i * ld_ + e, fastattn::FASTATTN_ISA::load(o + i * ld_ + e) * scale[i]);
    }
    multiply_tiles(weights_, v_, rows, p_.E, cols_, true, o, ld_);
    accumulate_rows_apart(ByRows{weights, ld}, 1.f, rows, Misfits(), Misfits(), values_, cols_,
                          masked, o, ld_, 1);
  }

 private:
  const AttentionParams& p_;
  int64_t ld_, cols_ = 0;
  float input_unit_, dropout_unit_;
  AmxInput values_;
  Operand v_, weights_;
};

// ValueGrads on the matrix unit.
class AmxValueGrads {
 public:
  AmxValueGrads(const BackwardParams& p, const View& grad_out, Scratch& scratch, int64_t block_m,
                int64_t block_n)
      : p_(p),
        grad_out_view_(grad_out),
        block_n_(block_n),
        ld_(round_up(p.E, kEdge)),
        input_unit_(input_unit(p.q.dtype)),
        weight_unit_(two_to(weight_octaves(form_of(p.q.dtype))) * dropout_unit(p)),
        values_(scratch, block_n, p.E, p.q.dtype),
        grad_out_(scratch, block_m, p.E, p.q.dtype),
        v_(scratch, block_n, p.E, p.q.dtype),
        grad_out_rows_(scratch, block_m, p.E, p.q.dtype),
        grad_out_columns_(scratch, p.E, block_m, p.q.dtype),
        weights_(scratch, block_n, block_m, p.q.dtype),
        grad_v_(scratch, ld_ * block_n),
        grad_v_rows_(scratch.floats(block_n * ld_)) {}

  void use_keys(int64_t cols) { cols_ = cols; }

  void load_values(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    values_.load(matrix_at(p_.v, b, hkv, j0, cols, p_.E), input_unit_);
    values_.pack<Depth::kCols, Side::kRight>(v_);
    values_.prefetch_next();
    grad_v_.clear();
  }

  void load_grad_out(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    const Matrix from = matrix_at(grad_out_view_, b, h, i0, rows, p_.E);
    size_unit_ = size_unit(from, p_.stats + 2 * ((b * p_.H + h) * p_.M + i0));
    grad_out_unit_ = form_of(p_.q.dtype) == Form::kTwoHalves ? size_unit_ : 1.f;
    grad_out_.load(from, grad_out_unit_);
    grad_out_.pack<Depth::kCols, Side::kLeft>(grad_out_rows_);
    grad_out_.pack<Depth::kRows, Side::kLeft>(grad_out_columns_);
  }

  // Whether some kept pair has a value or gradient that does not fit.
  bool needs_wide(const MaskTile& mask) const {
    return (grad_out_.misfits().any() || values_.misfits().any()) &&
           mask.keeps_any([&](int64_t i) { return grad_out_.is_misfit(i); },
                          [&](int64_t j) { return values_.is_misfit(j); });
  }
  void use_form(bool wide) {
    const Form form = wide ? wide_form_of(p_.q.dtype) : form_of(p_.q.dtype);
    values_.pack_as<Depth::kCols, Side::kRight>(form, v_);
    grad_out_.pack_as<Depth::kCols, Side::kLeft>(form, grad_out_rows_);
    grad_out_.pack_as<Depth::kRows, Side::kLeft>(form, grad_out_columns_);
    weights_.use(form);
  }

  // dp [rows, block_n] times grad_weights_unit()
  float grad_weights_unit() const { return grad_out_unit_ * input_unit_; }
  void grad_weights(float* dp) {
    multiply_tiles(grad_out_rows_, v_, grad_out_.rows(), cols_, p_.E, false, dp, block_n_);
    multiply_rows_apart(grad_out_, values_, cols_, dp, block_n_);
  }

  void accumulate(float* weights, bool masked) {
    const int64_t rows = grad_out_.rows(), cols = cols_;
    const Matrix tile = {weights, DType::kFloat32, 0, block_n_, 1, rows, cols};
    if (!packed_) pack_tiles<Depth::kRows, Side::kRight>(tile, weight_unit_, Misfits(), weights_);
    grad_v_.use(weight_unit_ * grad_out_unit_);
    multiply_tiles(grad_out_columns_, weights_, p_.E, cols, rows, true, grad_v_.data(), block_n_);
    accumulate_rows_apart(ByCols{weights, block_n_}, weight_unit_, cols, Misfits(), Misfits(),
                          grad_out_, rows, masked, grad_v_.data(), 1, block_n_);
  }

  float weight_unit() const { return weight_unit_; }
  // A power of 2 that makes the largest gradients a few thousand, where sums have room for it.
  float size_unit() const { return size_unit_; }

  // Where W goes instead, and whether it did before the next call of accumulate(): `weights` is
  // read then only where some row of dO stands apart.
  const Operand& weights() const { return weights_; }
  void use_packed(bool packed) { packed_ = packed; }
  bool rows_apart() const { return grad_out_.misfits().any_apart(); }
  int64_t rows() const { return grad_out_.rows(); }

  void store(const View& grad_v, int64_t b, int64_t hkv, int64_t j0) {
    const Matrix to = matrix_at(grad_v, b, hkv, j0, values_.rows(), p_.E);
    const float factor = grad_v_.unit() == 0.f ? 0.f : 1.f / grad_v_.unit();
    unpack_columns(grad_v_.data(), block_n_, factor, grad_v_rows_, ld_, to);
  }

 private:
  // Of rows that have a key, and stats: garbage in others must not change a bit of these.
  float size_unit(const Matrix& from, const float* stats) const {
    if (!is_fp16(form_of(p_.q.dtype))) return 1.f;
    VecI top{}, apart{};
    with_dtype(from.dtype, [&](auto type) {
      for (int64_t r = 0; r < from.rows; ++r) {
        const int64_t row = from.offset + r * from.stride_r;
        VecI of_row{};
        for (int64_t c = 0; c < from.cols; c += kWidth)
          of_row = largest(of_row, load_strided<type>(from.data, row + c * from.stride_c,
                                                      from.stride_c, from.cols - c));
        constexpr Window kFinite = {0.f, __FLT_MAX__};
        if (load_stats(stats, r).factor == 0.f || !kFinite.has(of_row)) continue;
        VecI& most = kAnyBf16.has(of_row) ? top : apart;
        most = most > of_row ? most : of_row;
      }
    });
    const float most = max_lanes(from_bits(top)), most_apart = max_lanes(from_bits(apart));
    if (most == 0.f) return grad_v_.unit() == 0.f ? 1.f : grad_v_.unit() / weight_unit_;
    // Of the same few sizes for most blocks: 2^11 to 2^15, in steps of 2^4. Rows that stand apart
    // are multiplied by it as well.
    int64_t n = min64(14 - exponent_of(most), kMostOctaves);
    if (most_apart != 0.f) n = min64(n, 80 - exponent_of(most_apart));
    const int64_t step = 4;
    const float unit = two_to((n >= 0 ? n : n - step + 1) / step * step);
    return grad_v_.bounded(weight_unit_ * unit) / weight_unit_;
  }

  const BackwardParams& p_;
  const View& grad_out_view_;
  int64_t block_n_, ld_, cols_ = 0;
  float input_unit_, weight_unit_, size_unit_ = 1.f, grad_out_unit_ = 1.f;
  AmxInput values_, grad_out_;
  Operand v_, grad_out_rows_, grad_out_columns_, weights_;
  bool packed_ = false;
  Sums grad_v_;
  float* grad_v_rows_;
};

template <int64_t kM, int64_t kN>
static void attend_tile(AmxDotScore<kM, kN>& score, AmxValueTile& values, const MaskTile& mask,
                        const DropoutParams& dropout, const TilePlace& at, const RowState& state,
                        float* s, float* drop, float* alpha) {
  choose_form(score, values, mask);
  score.scores(s);
  const DropoutParams in_units = values.in_units(dropout);
  values.with_sink(s, kN, [&](const auto& sink) {
    const FlushDenormals weights;  // the matrix unit does, too
    mask.with_masking([&](auto masking) {
      softmax_rows<masking>(mask, in_units, at, state, logit_scale(score), s, kN, drop, alpha,
                            sink);
    });
  });
  values.accumulate(s, kN, at.rows, alpha, mask.masked(), state.o);
}

}  // namespace fastattn::FASTATTN_ISA
