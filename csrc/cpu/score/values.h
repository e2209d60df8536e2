// A block of values and its products: O = scale O + W V, and the products of the backward pass.
#pragma once

#include "cpu/score/score.h"
#include "cpu/tile/gemm.h"
#include "cpu/tile/rows_in_place.h"
#include "cpu/tile/softmax.h"

namespace fastattn::FASTATTN_ISA {

// gemm_chain() that skips A(r, k) of a masked pair, even if row k of B is not finite. Tiles with
// both masked pairs and such rows need it, because 0 * NaN must not carry garbage past the mask. It
// is slower, but sums in the same order, so garbage changes no bit.
template <typename A, typename Into>
FASTATTN_SHARED void gemm_of_kept(const MaskTile& mask, A a, const float* b, int64_t ldb,
                                  int64_t rows, int64_t cols, int64_t depth, float* c, int64_t ldc,
                                  Into into);

// gemm_chain() of weights, or of their gradients, which are 0 where the mask drops a pair. The
// depth is a block of keys or queries.
template <typename A, typename Into>
static void masked_gemm(const MaskTile& mask, bool finite, A a, const float* b, int64_t ldb,
                        int64_t rows, int64_t cols, int64_t depth, float* c, int64_t ldc,
                        Into into) {
  if (mask.sparse() && finite)
    return multiply_strips(a, mask.strips(), depth, b, ldb, rows, cols, c, ldc, into);
  if (mask.masked() && !finite)
    return gemm_of_kept(mask, a, b, ldb, rows, cols, depth, c, ldc, into);
  gemm_chain(a, b, ldb, rows, cols, depth, c, ldc, into);
}

class ValueTile : public FormDefaults {
 public:
  ValueTile(const AttentionParams& p, const Path& path, Scratch& scratch, int64_t, int64_t block_n)
      : v_(p.v),
        E_(p.E),
        direct_(path.values_in_place),
        by_row_(path.values_by_row),
        ld_(tile_stride(p.E)),
        packed_(direct_ ? nullptr : scratch.floats(block_n * ld_)),
        listed_(by_row_ ? scratch.ints(block_n) : nullptr) {}

  int64_t stride() const { return ld_; }  // also of the rows of O

  // The factors of weights and their sums, and of outputs.
  static float weight_unit() { return 1.f; }
  static float output_unit() { return 1.f; }

  void load(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    values_ = matrix_at(v_, b, hkv, j0, cols, E_);
    if (direct_) return;  // then no mask asks whether all are finite
    finite_ = pack_rows(values_, 1.f, packed_, ld_);
    values_ = {packed_, DType::kFloat32, 0, ld_, 1, cols, E_};
  }

  void weigh(const MaskTile& mask, const DropoutParams& dropout, const TilePlace& at,
             const RowState& state, LinearLogit logit, float* s, int64_t ld, float* drop) const {
    softmax_step(mask, dropout, at, state, logit, s, ld, drop);
  }
  void accumulate(float* weights, int64_t ld, int64_t rows, const float* scale,
                  const MaskTile& mask, float* o) {
    if (by_row_) return add_weighted_rows(mask, weights, ld, rows, values_, scale, o, ld_, listed_);
    const float* const rows_of_v = static_cast<const float*>(values_.data) + values_.offset;
    masked_gemm(mask, finite_, ByRows{weights, ld}, rows_of_v, values_.stride_r, rows,
                round_up(E_, kWidth), values_.rows, o, ld_, RescaleAdd{scale});
  }

 private:
  View v_;
  int64_t E_;
  bool direct_, by_row_, finite_ = true;
  int64_t ld_;
  float* packed_;
  int32_t* listed_;
  Matrix values_{};
};

// The backward pass over a block of values and a block of output gradients: dP = dO V^T and
// dV += W^T dO.
class ValueGrads : public GradDefaults {
 public:
  ValueGrads(const AttentionParams& p, const View& grad_out, Scratch& scratch, int64_t block_m,
             int64_t block_n)
      : p_(p),
        grad_out_view_(grad_out),
        block_n_(block_n),
        ld_(tile_stride(p.E)),
        grad_out_(scratch.floats(round_up(min64(p.M, block_m), kTileRows) * ld_)),
        v_transposed_(scratch.floats(p.E * block_n)),
        grad_v_(scratch, (block_n + kTileRows) * ld_, p, block_m) {}

  void load_values(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    pack_transposed(matrix_at(p_.v, b, hkv, j0, cols, p_.E), 1.f, v_transposed_, block_n_);
    grad_v_.clear(round_up(cols, kTileRows) * ld_);
  }

  void load_grad_out(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    rows_ = rows;
    finite_ = pack_rows(matrix_at(grad_out_view_, b, h, i0, rows, p_.E), 1.f, grad_out_, ld_);
    clear_padding(grad_out_, ld_, rows);
  }

  // dp [rows, block_n]
  void grad_weights(const MaskTile& mask, float* dp) {
    const ByRows a{grad_out_, ld_};
    if (mask.sparse())
      return multiply_to_strips(a, v_transposed_, block_n_, mask.strips(), rows_, p_.E, dp,
                                block_n_);
    gemm(a, v_transposed_, block_n_, rows_, round_up(cols_, kWidth), p_.E, dp, block_n_, Store{});
  }

  void accumulate(float* weights, const MaskTile& mask) {
    grad_v_.begin_tile();
    masked_gemm(mask, finite_, ByCols{weights, block_n_}, grad_out_, ld_, cols_,
                round_up(p_.E, kWidth), rows_, grad_v_.data(), ld_, Add{});
  }

  void store(const View& grad_v, int64_t b, int64_t hkv, int64_t j0) {
    grad_v_.end();
    unpack_rows(grad_v_.data(), ld_, 1.f, nullptr, matrix_at(grad_v, b, hkv, j0, cols_, p_.E));
  }

 private:
  const AttentionParams& p_;
  const View& grad_out_view_;
  int64_t block_n_, ld_, rows_ = 0, cols_ = 0;
  bool finite_ = true;
  float *grad_out_, *v_transposed_;
  LongSums grad_v_;
};

#ifdef FASTATTN_SHARED_CODE
template <typename A, typename Into>
FASTATTN_SHARED void gemm_of_kept(const MaskTile& mask, A a, const float* b, int64_t ldb,
                                  int64_t rows, int64_t cols, int64_t depth, float* c, int64_t ldc,
                                  Into into) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < cols; n += kWidth) {
      Vec sum{};
      for (int64_t k = 0; k < depth; ++k)
        if (mask.keeps(a, r, k)) sum += a.at(r, k) * load(b + k * ldb + n);
      store(c + r * ldc + n, into(c + r * ldc + n, r, sum));
    }
}

#ifndef FASTATTN_ALONE
#define FASTATTN_GEMM(A, Into)                                                                     \
  template void gemm_of_kept(const MaskTile&, A, const float*, int64_t, int64_t, int64_t, int64_t, \
                             float*, int64_t, Into)
FASTATTN_GEMM(ByRows, Store);
FASTATTN_GEMM(ByRows, RescaleAdd);
FASTATTN_GEMM(ByCols, Add);
#undef FASTATTN_GEMM
#endif
#endif  // FASTATTN_SHARED_CODE

}  // namespace fastattn::FASTATTN_ISA
