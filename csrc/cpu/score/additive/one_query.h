// The additive score with one query per head, where every head has keys of its own. Decoding is
// such a problem, and so is training on one step of a decoder. Each key then has one pair, so an
// exponential per pair costs no more than one per key. Keys are read where they lie, vectorised
// over d, and nothing is packed. Two vectors of terms share a division.
//
//   s_j = sum_d w_d tanh(q_d + k_jd)    tanh = 1 - 2 u    u = 1 / (1 + z)    z = e^(2 (q + k))
//
// Gradients, with t = z u^2 = (1 - tanh^2) / 4. A key has one pair, so the key's gradient is one
// product, not a sum. store_key_grad() writes the product once, at its final place. scores() saves
// z for the gradients: one tile, which fits the L2 cache.
//
//   dk_jd = 4 w_d dS_j t_jd    dq_d = sum_j dk_jd    dw_d = sum_j dS_j tanh_jd
#pragma once

#include "cpu/score/additive/terms.h"
#include "cpu/score/score.h"
#include "cpu/tile/rows_in_place.h"
#include "problem/mask.h"

namespace fastattn::FASTATTN_ISA {

class OneQueryAdditive : public FixedTile<1, 64> {
 public:
  static constexpr int64_t kDimWork = kTanhWork;

  OneQueryAdditive(const AttentionParams& p, const Path&, Scratch& scratch, bool backward,
                   int64_t = 1)
      : p_(p),
        ld_(round_up(p.D, kStep)),
        z_stride_(tile_stride(ld_)),
        q_(zeros(scratch)),
        w_(zeros(scratch)),
        half_(scratch.floats(ld_ / 2)),
        z_(backward ? scratch.floats(kBlockN * z_stride_) : nullptr),
        grad_q_(backward ? zeros(scratch) : nullptr),
        grad_w_(backward ? zeros(scratch) : nullptr) {}

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    keys_ = matrix_at(p_.k, b, hkv, j0, cols, p_.D);
  }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t) {
    pack_rows(matrix_at(p_.q, b, h, i0, 1, p_.D), 1.f, q_, 0);
    pack_rows(matrix_at(p_.w, 0, h, 0, 1, p_.D), 1.f, w_, 0);
    fit_weights();
    for (int64_t d = 0; d < ld_; d += kStep)
      store(half_ + d / 2, (load(w_ + d) + load(w_ + d + kWidth)) * 0.5f);
  }

  void scores(float* s) const {
    with_dtype(p_.k.dtype, [&](auto type) {
      z_ == nullptr ? score_keys<type, false>(s) : score_keys<type, true>(s);
    });
  }

  void clear_key_grad() {}

  // Only remembers the arguments. The keys of a tile have no other pairs, so store_key_grad() does
  // all the work. The mask is not used: z counts as finite, so 0 * NaN does not occur. A NaN input
  // reaches the gradients through dS.
  void backward(const float* ds, const MaskTile&, float* grad_q, int64_t, double* grad_w) {
    ds_ = ds, grad_q_out_ = grad_q, grad_w_out_ = grad_w;
  }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    const Matrix to = matrix_at(grad_k, b, hkv, j0, keys_.rows, p_.D);
    fill(grad_q_, ld_, 0.f);
    fill(grad_w_, ld_, 0.f);
    with_dtype(to.dtype, [&](auto type) {
      int64_t j = 0;
      for (; j + 4 <= to.rows; j += 4) key_grads<type, 4>(to, j);
      for (; j < to.rows; ++j) key_grads<type, 1>(to, j);
    });
    for (int64_t d = 0; d < p_.D; ++d) grad_q_out_[d] += grad_q_[d] * (w_[d] * weight_unit_) * 4.f;
    add_to_sums(grad_w_, p_.D, 2., grad_w_out_);
  }

 private:
  static constexpr int64_t kStep = 2 * kWidth;  // rows are padded to this with zeros

  float* zeros(Scratch& scratch) const {
    float* const all = scratch.floats(ld_);
    fill(all, ld_, 0.f);
    return all;
  }

  // Divides the weights by a power of 2 that leaves room for products with z.
  void fit_weights() {
    constexpr int kBits = 60;
    int exponent = 0;
    const float heaviest = heaviest_weight(w_, p_.D);
    if (heaviest == heaviest) __builtin_frexpf(heaviest, &exponent);
    weight_unit_ = exponent <= kBits ? 1.f : two_to(exponent - kBits);
    if (weight_unit_ == 1.f) return;
    for (int64_t d = 0; d < p_.D; ++d) w_[d] /= weight_unit_;
  }

  // w tanh / 2 of dims [d, d + kStep): a lane has the sum of two dims, kWidth apart. If kKeep,
  // row `z` receives z of these dims.
  template <bool kKeep>
  FASTATTN_MEMBER Vec terms(int64_t d, Vec key0, Vec key1, float* z) const {
    const auto power = [&](int64_t at, Vec key) __attribute__((always_inline)) {
      const Vec exponent = (load(q_ + at) + key) * (2.f * kLog2e);
      return exp2_weight(min(splat(kMaxExponent), exponent));  // NaN stays NaN
    };
    const Vec z0 = power(d, key0), z1 = power(d + kWidth, key1);
    if constexpr (kKeep) {
      store(z + d, z0);
      store(z + d + kWidth, z1);
    }
    const Vec x0 = z0 + 1.f, x1 = z1 + 1.f;
    const Vec num = load(w_ + d) * x1 + load(w_ + d + kWidth) * x0;
    return minus_quotient(load(half_ + d / 2), num, x0 * x1);
  }

  // s[j] for keys_.rows rounded up to kWidth. Scores past the last key repeat that of the last key.
  template <DType kType, bool kKeep>
  void score_keys(float* s) const {
    const int64_t whole = keys_.cols / kStep * kStep, ahead = prefetch_distance<kType>(keys_);
    for (int64_t j = 0; j < keys_.rows; j += kWidth) {
      Vec sums[kWidth];
      for (int lane = 0; lane < kWidth; ++lane) {
        const int64_t n = min64(j + lane, keys_.rows - 1), row = keys_.offset + n * keys_.stride_r;
        float* const z = kKeep ? z_ + n * z_stride_ : nullptr;
        prefetch_rows<kType>(keys_, j + lane + ahead, j + lane + ahead + 1);
        Vec sum{};
        for (int64_t d = 0; d < whole; d += kStep)
          sum += terms<kKeep>(d, load_as<kType>(keys_.data, row + d),
                              load_as<kType>(keys_.data, row + d + kWidth), z);
        if (whole < keys_.cols)
          sum += terms<kKeep>(
              whole, load_first<kType>(keys_.data, row + whole, keys_.cols - whole),
              load_first<kType>(keys_.data, row + whole + kWidth, keys_.cols - whole - kWidth), z);
        sums[lane] = sum;
      }
      store(s + j, sums_of<kWidth>(sums) * (2.f * kLog2e * weight_unit_));
    }
  }

  // Writes the gradients of keys [j, j + kKeys). Adds dS t to grad_q_ and dS tanh / 2 to grad_w_.
  template <DType kType, int kKeys>
  FASTATTN_MEMBER void key_grads(const Matrix& to, int64_t j) const {
    for (int64_t d = 0; d < ld_; d += kStep) {
      Vec sum_q[2] = {}, sum_w[2] = {};
      const float unit = 4.f * weight_unit_;
      const Vec weight[2] = {load(w_ + d) * unit, load(w_ + d + kWidth) * unit};
#pragma GCC unroll 4
      for (int64_t n = j; n < j + kKeys; ++n) {
        const float* const from = z_ + n * z_stride_ + d;
        const Vec most = splat(__builtin_exp2f(kMaxExponent)), ds = splat(ds_[n]);
        const Vec z[2] = {min(load(from), most), min(load(from + kWidth), most)};  // not NaN
        const Vec x[2] = {z[0] + 1.f, z[1] + 1.f};
        const Vec reciprocal = quotient(splat(1.f), x[0] * x[1]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const Vec u = reciprocal * x[1 - v], g = ds * u * (z[v] * u);
          sum_q[v] += g;
          sum_w[v] += ds * (splat(0.5f) - u);
          const int64_t c = d + v * kWidth;
          store_strided<kType>(to.data, to.offset + n * to.stride_r + c * to.stride_c, to.stride_c,
                               to.cols - c, g * weight[v]);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int64_t c = d + v * kWidth;
        store(grad_q_ + c, load(grad_q_ + c) + sum_q[v]);
        store(grad_w_ + c, load(grad_w_ + c) + sum_w[v]);
      }
    }
  }

  const AttentionParams& p_;
  int64_t ld_, z_stride_;
  float *q_, *w_, *half_;  // [D], [D]; half the sums of weights kWidth apart [D / 2]
  float *z_, *grad_q_, *grad_w_;
  float weight_unit_ = 1.f;
  const float* ds_ = nullptr;
  float* grad_q_out_ = nullptr;
  double* grad_w_out_ = nullptr;
  Matrix keys_{};
};

}  // namespace fastattn::FASTATTN_ISA
