// The scaled dot product as a score: s_ij = q_i . k_j, times |scale| in the logit. Queries are
// packed times the sign of the scale, which is 0 of 0.
//
// Gradients, with dS in natural units: dq_i = scale sum_j dS_ij k_j,  dk_j = scale sum_i dS_ij q_i.
//
// Keys are packed transposed, [D][kBlockN], so that a vector holds one component of kWidth keys.
// For dq they are also packed by rows.
#pragma once

#include "cpu/score/score.h"
#include "cpu/score/values.h"

namespace fastattn::FASTATTN_ISA {

// The tile consists of a register tile's 6 rows and 2 vectors. Measured on Zen 3 at d64: sizes from
// 48 to 128 differ by less than 3%. 64 keys cost 3% more packing, 128 queries more causal waste.
class DotScore : public FixedTile<96, kWidth == 16 ? 128 : 96> {
 public:
  DotScore(const AttentionParams& p, const Path& path, Scratch& scratch, bool backward,
           int64_t slots = 1)
      : p_(p),
        direct_(path.way == Way::kRowsInPlace),
        backward_(backward),
        ld_(tile_stride(p.D)),
        slot_floats_(round_up(p.M < kBlockM ? p.M : kBlockM, kTileRows) * ld_),
        slots_(scratch.floats(slots * slot_floats_)),
        slot_rows_(scratch.ints(slots)),
        q_(slots_),
        k_transposed_(direct_ ? nullptr : scratch.floats(p.D * kBlockN)) {
    if (!backward) return;
    k_rows_ = scratch.floats(kBlockN * ld_);
    grad_q_ = scratch.floats(kBlockM * ld_);
    grad_k_ = LongSums(scratch, (kBlockN + kTileRows) * ld_, p, kBlockM);
  }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    keys_ = matrix_at(p_.k, b, hkv, j0, cols, p_.D);
    if (!direct_) pack_transposed(keys_, 1.f, k_transposed_, kBlockN);
    if (backward_) k_finite_ = pack_rows(keys_, 1.f, k_rows_, ld_);
  }

  static double scale(const AttentionParams& p) { return __builtin_fabsf(p.scale); }

  static int64_t query_bytes(const AttentionParams& p) { return 4 * p.D; }
  void use_slot(int64_t slot) {
    slot_ = slot;
    q_ = slots_ + slot * slot_floats_;
  }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    slot_rows_[slot_] = static_cast<int32_t>(rows);
    q_finite_ = pack_rows(matrix_at(p_.q, b, h, i0, rows, p_.D), sign_of(p_.scale), q_, ld_);
    clear_padding(q_, ld_, rows);
  }

  void scores(float* s) {
    if (direct_) {
      dot_rows(q_, ld_, rows(), keys_, s, kBlockN);
    } else {
      gemm(ByRows{q_, ld_}, k_transposed_, kBlockN, rows(), round_up(keys_.rows, kWidth), p_.D, s,
           kBlockN, Store{});
    }
  }

  static constexpr bool kHasStrips = true;
  void scores_of(const Strips& strips, float* s) const {
    multiply_to_strips(ByRows{q_, ld_}, k_transposed_, kBlockN, strips, rows(), p_.D, s, kBlockN);
  }

  void clear_key_grad() { grad_k_.clear(round_up(keys_.rows, kTileRows) * ld_); }

  void backward(const float* ds, const MaskTile& mask, float* grad_q, int64_t grad_q_stride,
                double*) {
    const int64_t cols = keys_.rows, width = round_up(p_.D, kWidth);
    masked_gemm(mask, k_finite_, ByRows{ds, kBlockN}, k_rows_, ld_, rows(), width, cols, grad_q_,
                ld_, Store{});
    add_rows(grad_q_, ld_, rows(), p_.D, p_.scale, grad_q, grad_q_stride);
    grad_k_.begin_tile();
    masked_gemm(mask, q_finite_, ByCols{ds, kBlockN}, q_, ld_, cols, width, rows(), grad_k_.data(),
                ld_, Add{});
  }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    grad_k_.end();
    unpack_rows(grad_k_.data(), ld_, __builtin_fabsf(p_.scale), nullptr,
                matrix_at(grad_k, b, hkv, j0, keys_.rows, p_.D));
  }

 private:
  int64_t rows() const { return slot_rows_[slot_]; }

  const AttentionParams& p_;
  bool direct_, backward_, k_finite_ = true, q_finite_ = true;
  int64_t ld_, slot_floats_, slot_ = 0;
  float* slots_;
  int32_t* slot_rows_;
  float *q_, *k_transposed_;
  float *k_rows_ = nullptr, *grad_q_ = nullptr;
  LongSums grad_k_;
  Matrix keys_{};
};

}  // namespace fastattn::FASTATTN_ISA
