// The backward pass with few queries a head (Way::kRowsInPlace), as in training on one decoder
// step. The score and the values have the interfaces of score/dot.h and score/values.h.
//
// Memory bandwidth is the limit. Rows of K and V are read where they lie (tile/rows_in_place.h). A
// row of dK or dV is written once, after all queries that share it:
//
//   dK_j = scale sum_r dS_rj q_r    dV_j = sum_r W_rj dO_r    r: queries of the heads of a group
#pragma once

#include "cpu/score/score.h"
#include "cpu/score/values.h"

namespace fastattn::FASTATTN_ISA {

// The rows x_r of a group's heads, each with one coefficient per key of the current tile.
class RowSums {
 public:
  RowSums(const AttentionParams& p, Scratch& scratch, int64_t block_n, int64_t cols)
      : block_n_(block_n), ld_(round_up(cols, kWidth)) {
    const int64_t most = p.Hkv > 0 ? p.H / p.Hkv * p.M : 0;
    x_ = scratch.floats(most * ld_);
    c_ = scratch.floats(most * block_n);
  }

  void clear() { count_ = 0, finite_ = true; }

  // Adds rows x [rows, ld] and the coefficients [rows, block_n] of a tile.
  void add(const float* x, int64_t ld, const float* coefficients, int64_t rows,
           const MaskTile& mask) {
    VecI probe{};
    mask.with_masking([&](auto masking) __attribute__((always_inline)) {
      for (int64_t r = 0; r < rows; ++r, ++count_) {
        for (int64_t e = 0; e < ld_; e += kWidth) {
          const Vec own = load(x + r * ld + e);
          probe |= not_finite(own);
          store(x_ + count_ * ld_ + e, own);
        }
        for (int64_t j = 0; j < mask.cols(); j += kWidth) {
          const Vec c = load(coefficients + r * block_n_ + j) + 0.f;
          const VecI kept = mask.row<masking>(r).keeps(j);
          store(c_ + count_ * block_n_ + j, kept ? c : splat(kMasked));
        }
      }
    });
    finite_ = finite_ && !any_lane(probe);
  }

  // to(j, :) = factor * sum_r c_rj x_r. Some keys take a row together: 0 times a number is 0.
  void write(float factor, const Matrix& to) const {
    constexpr int kKeys = kVectorRegisters == 32 ? 4 : 2;
    with_dtype(to.dtype, [&](auto type) {
      int64_t j = 0;
      for (; finite_ && j + kKeys <= to.rows; j += kKeys) write_keys<type, kKeys>(factor, to, j);
      for (; j < to.rows; ++j) write_keys<type, 1>(factor, to, j);
    });
  }

 private:
  // The coefficient of a masked pair. That of a kept pair may be 0, and + 0 takes its sign away.
  static constexpr float kMasked = -0.f;
  static bool is_masked(float c) { return c == 0.f && __builtin_signbit(c); }

  template <DType kType, int kKeys>
  FASTATTN_MEMBER void write_keys(float factor, const Matrix& to, int64_t j) const {
    int64_t e = 0;
    const auto take = [&](auto vecs) __attribute__((always_inline)) {
      for (; e + vecs * kWidth <= ld_; e += vecs * kWidth)
        write_columns<kType, kKeys, vecs>(factor, to, j, e);
    };
    take(std::integral_constant<int, 4>{});
    take(std::integral_constant<int, 2>{});
    take(std::integral_constant<int, 1>{});
  }
  template <DType kType, int kKeys, int kVecs>
  FASTATTN_MEMBER void write_columns(float factor, const Matrix& to, int64_t j, int64_t e) const {
    Vec sum[kKeys][kVecs] = {};
    for (int64_t r = 0; r < count_; ++r) {
      const float* const c = c_ + r * block_n_ + j;
      if (kKeys == 1 && is_masked(c[0])) continue;  // skips NaN in x as well
      Vec x[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) x[v] = load(x_ + r * ld_ + e + v * kWidth);
#pragma GCC unroll 4
      for (int n = 0; n < kKeys; ++n)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) sum[n][v] += c[n] * x[v];
    }
#pragma GCC unroll 4
    for (int n = 0; n < kKeys; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const int64_t c = e + v * kWidth, at = to.offset + (j + n) * to.stride_r;
        store_strided<kType>(to.data, at + c * to.stride_c, to.stride_c, to.cols - c,
                             sum[n][v] * factor);
      }
  }

  int64_t block_n_, ld_, count_ = 0;
  bool finite_ = true;
  float *x_, *c_;
};

class FewDotScore : public FixedTile<8, 128> {
 public:
  FewDotScore(const AttentionParams& p, const Path&, Scratch& scratch, bool)
      : p_(p),
        ld_(tile_stride(p.D)),
        q_(scratch.floats(kBlockM * ld_)),
        grad_q_(scratch.floats(kBlockM * ld_)),
        ones_(scratch.floats(kBlockM)),
        listed_(scratch.ints(kBlockN)),
        grad_k_(p, scratch, kBlockN, p.D) {
    fill(ones_, kBlockM, 1.f);
  }

  static double scale(const AttentionParams& p) { return __builtin_fabsf(p.scale); }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    keys_ = matrix_at(p_.k, b, hkv, j0, cols, p_.D);
  }
  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    rows_ = rows;
    pack_rows(matrix_at(p_.q, b, h, i0, rows, p_.D), sign_of(p_.scale), q_, ld_);
  }

  void scores(float* s) { dot_rows(q_, ld_, rows_, keys_, s, kBlockN); }

  void clear_key_grad() { grad_k_.clear(); }

  void backward(const float* ds, const MaskTile& mask, float* grad_q, int64_t grad_q_stride,
                double*) {
    fill(grad_q_, rows_ * ld_, 0.f);
    add_weighted_rows(mask, ds, kBlockN, rows_, keys_, ones_, grad_q_, ld_, listed_);
    add_rows(grad_q_, ld_, rows_, p_.D, p_.scale, grad_q, grad_q_stride);
    grad_k_.add(q_, ld_, ds, rows_, mask);
  }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    grad_k_.write(__builtin_fabsf(p_.scale), matrix_at(grad_k, b, hkv, j0, keys_.rows, p_.D));
  }

 private:
  const AttentionParams& p_;
  int64_t ld_, rows_ = 0;
  float *q_, *grad_q_, *ones_;
  int32_t* listed_;
  RowSums grad_k_;
  Matrix keys_{};
};

class FewValueGrads : public GradDefaults {
 public:
  static constexpr bool kSumsByRow = true;

  FewValueGrads(const AttentionParams& p, const View& grad_out, Scratch& scratch, int64_t block_m,
                int64_t block_n)
      : p_(p),
        grad_out_view_(grad_out),
        block_n_(block_n),
        ld_(tile_stride(p.E)),
        grad_out_(scratch.floats(block_m * ld_)),
        packed_(rows_are_contiguous(p.v) ? nullptr : scratch.floats(block_n * ld_)),
        grad_v_(p, scratch, block_n, p.E) {}

  void load_values(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    values_ = matrix_at(p_.v, b, hkv, j0, cols, p_.E);
    grad_v_.clear();
    if (packed_ == nullptr) return;
    pack_rows(values_, 1.f, packed_, ld_);
    values_ = {packed_, DType::kFloat32, 0, ld_, 1, cols, p_.E};
  }
  void load_grad_out(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    rows_ = rows;
    pack_rows(matrix_at(grad_out_view_, b, h, i0, rows, p_.E), 1.f, grad_out_, ld_);
  }

  void grad_weights(const MaskTile&, float* dp) {
    dot_rows(grad_out_, ld_, rows_, values_, dp, block_n_);
  }
  void accumulate(const float* weights, const MaskTile& mask) {
    grad_v_.add(grad_out_, ld_, weights, rows_, mask);
  }
  void store(const View& grad_v, int64_t b, int64_t hkv, int64_t j0) {
    grad_v_.write(1.f, matrix_at(grad_v, b, hkv, j0, values_.rows, p_.E));
  }

 private:
  const AttentionParams& p_;
  const View& grad_out_view_;
  int64_t block_n_, ld_, rows_ = 0;
  float *grad_out_, *packed_;  // values that cannot be read as vectors, or nullptr
  RowSums grad_v_;
  Matrix values_{};
};

}  // namespace fastattn::FASTATTN_ISA
