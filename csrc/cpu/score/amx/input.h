// Inputs as operands, the rows that stand apart, and sums whose unit may change.
#pragma once

#ifdef __AMX_BF16__
#include "cpu/score/amx/multiply.h"
#else
#include "cpu/score/amx/pairs.h"
#endif
#include "cpu/tile/gemm.h"

namespace fastattn::FASTATTN_ISA {

// A block of rows of an input, to be packed into operands. Rows that stand apart stay in fp32.
class AmxInput {
 public:
  AmxInput(Scratch& scratch, int64_t rows, int64_t cols, DType dtype)
      : dtype_(dtype),
        ld_(tile_stride(cols)),
        outliers_(scratch, rows),
        dense_(scratch.floats(rows * ld_)) {}

  // Everything made from the block has the factor `factor`.
  void load(const Matrix& from, float factor) {
    from_ = from, factor_ = factor, is_dense_ = false;
    if (from.stride_c != 1 && from.cols > 1) {
      use_dense();
      from_ = {dense_, DType::kFloat32, 0, ld_, 1, from.rows, from.cols};
      factor_ = 1.f;
    }
    from_.stride_c = 1;
    // Both are factors of the input; `copied` is what a dense copy was multiplied by. In bf16, the
    // unit must leave room for sums.
    const float unit = __builtin_fabsf(factor), copied = unit / __builtin_fabsf(factor_);
    const float high = kAnyBf16.high * unit < 0x1p100f ? kAnyBf16.high : 0x1p100f / unit;
    const Window wide = {kAnyBf16.low * copied, high * copied},
                 halves = {kSmallestHalf / unit * copied, kLargestHalf / unit * copied};
    with_dtype(from_.dtype, [&](auto type) {
      outliers_.scan<type>(from_, form_of(dtype_) == Form::kTwoHalves ? halves : wide, wide);
    });
  }

  // Prefetches as many rows after the loaded ones, while these are multiplied.
  void prefetch_next() const {
    with_dtype(from_.dtype, [&](auto type) { prefetch_rows<type, 2>(from_, rows(), 2 * rows()); });
  }

  template <Depth kDepth, Side kSide>
  void pack(Operand& to) const {
    to.use(form_of(dtype_));
    pack_tiles<kDepth, kSide>(from_, factor_, outliers_, to);
  }
  // Packs again if `to` has another form.
  template <Depth kDepth, Side kSide>
  void pack_as(Form form, Operand& to) const {
    if (to.form() == form) return;
    to.use(form);
    pack_tiles<kDepth, kSide>(from_, factor_, outliers_, to);
  }

  int64_t rows() const { return from_.rows; }
  int64_t cols() const { return from_.cols; }
  const OutlierRows& outliers() const { return outliers_; }
  bool is_outlier(int64_t r) const { return r < rows() && outliers_.has(r); }

  // Row r in fp32. The first call converts all rows.
  const float* row(int64_t r) {
    if (!is_dense_) use_dense();
    return dense_ + r * ld_;
  }

 private:
  void use_dense() {
    pack_rows(from_, factor_, dense_, ld_);
    is_dense_ = true;
  }

  DType dtype_;
  int64_t ld_;
  Matrix from_{};
  float factor_ = 1.f;
  OutlierRows outliers_;
  float* dense_;
  bool is_dense_ = false;
};

// to(r, c) = factor * from[c * ld + r]; `rows` [to.rows, ld_rows] is scratch memory.
static void unpack_columns(float* from, int64_t ld, float factor, float* rows, int64_t ld_rows,
                           const Matrix& to) {
  pack_rows({from, DType::kFloat32, 0, 1, ld, to.rows, to.cols}, factor, rows, ld_rows);
  unpack_rows(rows, ld_rows, 1.f, nullptr, to);
}

// C(r, c) = a_r . b_c, [rows of a, ld], for c < cols, if a_r or b_c stands apart.
static void multiply_rows_apart(AmxInput& a, AmxInput& b, int64_t cols, float* c, int64_t ld) {
  if (!a.outliers().any_apart() && !b.outliers().any_apart()) return;
  for (int64_t i = 0; i < a.rows(); ++i)
    for (int64_t j = 0; j < cols; ++j) {
      if (!a.outliers().is_apart(i) && !b.outliers().is_apart(j)) continue;
      Vec sum{};
      for (int64_t d = 0; d < a.cols(); d += kWidth) sum += load(a.row(i) + d) * load(b.row(j) + d);
      c[i * ld + j] = sum_lanes(sum);
    }
}

// C(r, :) += factor sum_k A(r, k) b_k over the k < depth for which b_k, or row r or column k of A,
// stands apart. Masked pairs of A are skipped. Element (r, c) of C is c[r * stride_r + c *
// stride_c].
template <typename A>
static void accumulate_rows_apart(A a, float factor, int64_t rows, const OutlierRows& a_rows,
                                  const OutlierRows& a_cols, AmxInput& b, int64_t depth,
                                  const MaskTile& mask, float* c, int64_t stride_r,
                                  int64_t stride_c) {
  if (!a_rows.any_apart() && !a_cols.any_apart() && !b.outliers().any_apart()) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < depth; ++k) {
      if (!a_rows.is_apart(r) && !a_cols.is_apart(k) && !b.outliers().is_apart(k)) continue;
      if (!mask.keeps(a, r, k)) continue;
      const float ark = factor * a.at(r, k);
      for (int64_t n = 0; n < b.cols(); ++n) c[r * stride_r + n * stride_c] += ark * b.row(k)[n];
    }
}

// Units are 2^-66 to 2^66: a number up to 2^60 stays finite in each. Rows that stand apart may be
// larger, but not above 2^81 in their unit, which leaves room for products and sums.
constexpr int64_t kMostOctaves = 66, kMostApart = 80;

// Sums whose unit may have to change while they grow.
class Sums {
 public:
  Sums() = default;
  Sums(Scratch& scratch, int64_t count, const AttentionParams& p, int64_t tile_rows)
      : count_(count), sums_(scratch, count, p, tile_rows) {}

  float* data() const { return sums_.data(); }
  void clear() {
    sums_.clear(count_);
    unit_ = 0.f;
  }
  void end(float last) { unit_ = sums_.end(unit_, last); }
  // 0 if nothing has been added yet.
  float unit() const { return unit_; }
  // Before a tile is added, in this unit.
  void begin_tile(float unit) {
    sums_.begin_tile(unit_);
    const float factor = unit / unit_;
    for (int64_t n = 0; unit_ != 0.f && factor != 1.f && n < count_; n += kWidth)
      store(data() + n, load(data() + n) * factor);
    unit_ = unit;
  }
  // `unit`, or less if that would bring the sums near overflow.
  float bounded(float unit) const {
    if (unit_ == 0.f || unit <= unit_) return unit;
    VecI top{};
    for (int64_t n = 0; n < count_; n += kWidth) {
      const Vec x = load(data() + n);
      top = largest(top, abs(x) < splat(kInf) ? x : Vec{});
    }
    const float most = max_lanes(from_bits(top));
    if (most == 0.f) return unit;
    const float bound = unit_ * two_to(max64(0, min64(126, 100 - exponent_of(most))));
    return unit < bound ? unit : bound;
  }

 private:
  int64_t count_ = 0;
  LongSums sums_;
  float unit_ = 0.f;
};

}  // namespace fastattn::FASTATTN_ISA
