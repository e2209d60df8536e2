// Values and their gradients on the matrix unit, in the backward pass.
#pragma once

#include "cpu/score/amx/dot.h"

namespace fastattn::FASTATTN_ISA {

constexpr Window kFinite = {0.f, __FLT_MAX__};

// Packs W and dS of a tile into operands, and splits each number once. W is for dV = W^T dO, dS for
// dK = dS^T Q and dQ = dS K.
template <Form kForm>
class PackedGrads {
 public:
  static constexpr int kRows = 2, kVectors = 2;
  static constexpr int64_t kStep = word_step(kForm), kWhole = kTileDepth;
  static constexpr Takes kTakes = Takes::kAll;  // a word has rows of two strips

  // If `also` is not nullptr, also stores the first `rows` rows in place.
  PackedGrads(const Operand& w_columns, const Operand& ds_columns, const Operand& ds_rows,
              const GradUnits& units, const GradsInPlace* also, int64_t rows)
      : w_columns_(w_columns),
        ds_columns_(ds_columns),
        ds_rows_(ds_rows),
        units_(units),
        also_(also),
        rows_(rows) {}

  // Whether no row of dS stands apart or is too large for its form.
  bool all_packed() const { return all_packed_; }
  GradTops tops() const { return {max_lanes(from_bits(fit_)), max_lanes(from_bits(apart_))}; }

  // Two rows, kStep apart. The loop over their columns holds this by value: its stores may change
  // members.
  struct Rows {
    int32_t *w, *ds, *row[2];  // words of the first columns
    int64_t next;              // words from 16 columns of W or dS to the next ones
    const PackedGrads* also;   // or nullptr
    int64_t i;
    VecI tops[2];

    FASTATTN_MEMBER void put(int64_t c, const Vec (&w_c)[2][2], const Vec (&ds_c)[2][2]) {
      Parts<kForm> part[2][2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int64_t words = (c / kEdge + v) * next;
        write_column_words<kForm>(split<kForm>(w_c[0][v]), split<kForm>(w_c[1][v]), w + words);
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n) {
          tops[n] = largest(tops[n], ds_c[n][v]);
          part[n][v] = split<kForm>(ds_c[n][v]);
        }
        write_column_words<kForm>(part[0][v], part[1][v], ds + words);
      }
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n)
        write_row<kForm>(part[n][0], part[n][1], row[n] + c / kTileDepth * kDepthWords);
      if (__builtin_expect(also != nullptr, 0)) also->put_also(i, c, w_c, ds_c);
    }
  };
  FASTATTN_MEMBER Rows row(int64_t i) const {
    const int64_t depth = i / kTileDepth, at = i % kTileDepth / words_apart(kForm) * kEdge;
    const auto row_of = [&](int64_t r) { return ds_rows_.tiles(r / kEdge, 0) + r % kEdge * kEdge; };
    return {w_columns_.tiles(0, depth) + at,
            ds_columns_.tiles(0, depth) + at,
            {row_of(i), row_of(i + kStep)},
            ds_columns_.edge_words(),
            also_ == nullptr ? nullptr : this,
            i,
            {}};
  }
  FASTATTN_MEMBER void end(const Rows& from) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      const float high = kAnyBf16.high * units_.ds;
      const Window any = {0.f, high < __FLT_MAX__ ? high : __FLT_MAX__};
      all_packed_ &= (is_fp16(kForm) ? Window{0.f, kLargestHalf} : any).has(from.tops[n]);
      VecI& most = any.has(from.tops[n]) ? fit_ : apart_;
      if (is_fp16(kForm) && kFinite.has(from.tops[n]))
        most = most > from.tops[n] ? most : from.tops[n];
    }
  }

 private:
  static constexpr int64_t kDepthWords = parts_of(kForm) * kTileWords;

  void put_also(int64_t i, int64_t c, const Vec (&w)[2][2], const Vec (&ds)[2][2]) const {
    for (int64_t n = 0; n < 2 && i + n * kStep < rows_; ++n)
      for (int v = 0; v < 2; ++v) {
        const int64_t at = (i + n * kStep) * also_->ld + c + v * kWidth;
        store(also_->w + at, w[n][v] * (1.f / units_.w));
        store(also_->ds + at, ds[n][v] * (1.f / units_.ds));
      }
  }

  const Operand &w_columns_, &ds_columns_, &ds_rows_;
  GradUnits units_;
  const GradsInPlace* also_;
  int64_t rows_;
  VecI fit_{}, apart_{};
  bool all_packed_ = true;
};

// ValueGrads on the matrix unit.
class AmxValueGrads : public GradDefaults {
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
        grad_v_(scratch, ld_ * block_n, p, block_m),
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
  bool look_at(const MaskTile& mask) const {
    return (grad_out_.outliers().any() || values_.outliers().any()) &&
           mask.keeps_any([&](int64_t i) { return grad_out_.is_outlier(i); },
                          [&](int64_t j) { return values_.is_outlier(j); });
  }
  void use_form(bool wide) {
    const Form form = wide ? wide_form_of(p_.q.dtype) : form_of(p_.q.dtype);
    values_.pack_as<Depth::kCols, Side::kRight>(form, v_);
    grad_out_.pack_as<Depth::kCols, Side::kLeft>(form, grad_out_rows_);
    grad_out_.pack_as<Depth::kRows, Side::kLeft>(form, grad_out_columns_);
    weights_.use(form);
  }

  // dp [rows, block_n] times grad_weights_unit()
  void grad_weights(const MaskTile& mask, float* dp) {
    multiply_tiles(grad_out_rows_, v_, grad_out_.rows(), cols_, p_.E, false, dp, block_n_,
                   {.columns = mask.lists()});
    multiply_rows_apart(grad_out_, values_, cols_, dp, block_n_);
  }

  void accumulate(float* weights, const MaskTile& mask) {
    const int64_t rows = grad_out_.rows(), cols = cols_;
    const Matrix tile = {weights, DType::kFloat32, 0, block_n_, 1, rows, cols};
    if (!packed_)
      pack_tiles<Depth::kRows, Side::kRight>(tile, weight_unit_, OutlierRows(), weights_);
    grad_v_.begin_tile(weight_unit_ * grad_out_unit_);
    multiply_tiles(grad_out_columns_, weights_, p_.E, cols, rows, true, grad_v_.data(), block_n_,
                   {.rows = mask.lists()});
    accumulate_rows_apart(ByCols{weights, block_n_}, weight_unit_, cols, OutlierRows(),
                          OutlierRows(), grad_out_, rows, mask, grad_v_.data(), 1, block_n_);
  }

  template <typename Score, typename Fill>
  void make_grads(Score& score, Fill fill, GradsInPlace in_place) {
    const bool dense = score.rows_apart() || rows_apart();
    bool packed = false;
    // The factor of earlier tiles may be too large for dS of these queries. dS of the output has
    // about its gradient's size. What lse or weights add may be of any size: 2^40 leaves room up to
    // 2^87.
    const bool others = p_.grad_lse != nullptr || p_.grad_weights.data != nullptr;
    const float bound = others ? 0x1p40f : size_unit_ * 0x1p60f;
    GradUnits units = {weight_unit_, grad_weights_unit(), score.start_grad_unit(size_unit_, bound)};
    with_form(score.ds_rows().form(), [&](auto form) {
      const auto pack = [&] {
        PackedGrads<form> sink(weights_, score.ds_columns(), score.ds_rows(), units,
                               dense ? &in_place : nullptr, grad_out_.rows());
        fill(sink, units);
        packed = sink.all_packed();
        return sink.tops();
      };
      if (!score.change_grad_unit(pack())) return;
      packed = false;
      units.ds = score.grad_unit();
      if (!dense) pack();  // else pack W and dS later, from the places of S and dP
    });
    if (!packed && !dense) fill(in_place, GradUnits{1.f, units.dp, 1.f});
    score.use_packed(packed);
    packed_ = packed;
  }

  void store(const View& grad_v, int64_t b, int64_t hkv, int64_t j0) {
    const Matrix to = matrix_at(grad_v, b, hkv, j0, values_.rows(), p_.E);
    grad_v_.end(1.f);
    const float factor = grad_v_.unit() == 0.f ? 0.f : 1.f / grad_v_.unit();
    unpack_columns(grad_v_.data(), block_n_, factor, grad_v_rows_, ld_, to);
  }

 private:
  float grad_weights_unit() const { return grad_out_unit_ * input_unit_; }  // of dP
  bool rows_apart() const { return grad_out_.outliers().any_apart(); }

  // Only rows with a key and stats count: garbage in others must not change a bit of these.
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
        if (stats[2 * r + 1] == 0.f || !kFinite.has(of_row)) continue;  // a row without keys
        VecI& most = kAnyBf16.has(of_row) ? top : apart;
        most = most > of_row ? most : of_row;
      }
    });
    const float most = max_lanes(from_bits(top)), most_apart = max_lanes(from_bits(apart));
    const float before = grad_v_.unit() == 0.f ? 1.f : grad_v_.unit() / weight_unit_;
    // Most blocks have one of few sizes: 2^11 to 2^15, in steps of 2^4. Rows that stand apart are
    // multiplied by this factor as well. A block of such rows alone keeps the one before, if that
    // leaves them finite.
    int64_t n = most == 0.f ? exponent_of(before) : min64(14 - exponent_of(most), kMostOctaves);
    if (most_apart != 0.f) n = min64(n, kMostApart - exponent_of(most_apart));
    const int64_t step = 4;
    const float unit = two_to((n >= 0 ? n : n - step + 1) / step * step);
    return grad_v_.bounded(weight_unit_ * unit) / weight_unit_;
  }

  const BackwardParams& p_;
  const View& grad_out_view_;
  int64_t block_n_, ld_, cols_ = 0;
  float input_unit_, weight_unit_, grad_out_unit_ = 1.f;
  // A power of 2 that brings the largest gradients to a few thousand, if sums have room for it.
  float size_unit_ = 1.f;
  AmxInput values_, grad_out_;
  Operand v_, grad_out_rows_, grad_out_columns_, weights_;
  bool packed_ = false;  // whether W is in weights_; else accumulate() packs it
  Sums grad_v_;
  float* grad_v_rows_;
};

}  // namespace fastattn::FASTATTN_ISA
