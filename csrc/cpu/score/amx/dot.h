// The dot-product score on the matrix unit (unit.h), with the interface of DotScore.
//
// Gradients of keys and values are accumulated transposed, dK^T = Q^T dS and dV^T = dO^T W. W and
// dS are then right operands as they lie, and no tile of scores needs to be transposed.
#pragma once

#include "cpu/score/amx/input.h"
#include "cpu/score/score.h"
#include "cpu/score/values.h"

namespace fastattn::FASTATTN_ISA {

// The largest finite numbers of dS, in its unit: of rows that fit, and of those that stand apart.
struct GradTops {
  float fit, apart;
};

// DotScore on the matrix unit.
class AmxDotScore : public ScoreDefaults {
 public:
  using Tile = TileSize;
  static Tile tile(const Path& path) { return path.unit; }

  AmxDotScore(const AttentionParams& p, const Path& path, Scratch& scratch, bool backward,
              int64_t slots = 1)
      : p_(p),
        tile_(path.unit),
        backward_(backward),
        ld_(round_up(p.D, kEdge)),
        slots_(scratch.of<Slot>(slots)),
        slot_(slots_),
        keys_(scratch, tile_.n, p.D, p.q.dtype),
        k_(scratch, tile_.n, p.D, p.q.dtype),
        input_unit_(input_unit(p.q.dtype)) {
    const int64_t rows = min64(p.M, tile_.m);
    for (int64_t n = 0; n < slots; ++n)
      new (slots_ + n)
          Slot{AmxInput(scratch, rows, p.D, p.q.dtype), Operand(scratch, rows, p.D, p.q.dtype)};
    if (!backward) return;
    k_rows_ = Operand(scratch, p.D, tile_.n, p.q.dtype);
    q_columns_ = Operand(scratch, p.D, tile_.m, p.q.dtype);
    ds_outliers_ = OutlierRows(scratch, tile_.m);
    ds_rows_ = Operand(scratch, tile_.m, tile_.n, p.q.dtype);
    ds_columns_ = Operand(scratch, tile_.n, tile_.m, p.q.dtype);
    grad_q_ = scratch.floats(tile_.m * ld_);
    grad_k_ = Sums(scratch, ld_ * tile_.n, p, tile_.m);
    grad_k_rows_ = scratch.floats(tile_.n * ld_);
  }

  static double scale(const AttentionParams& p) { return __builtin_fabsf(p.scale); }
  static float own_factor(const AttentionParams& p) {
    return input_unit(p.q.dtype) * input_unit(p.q.dtype);
  }

  static bool has_forms(const AttentionParams& p) {
    return form_of(p.q.dtype) != wide_form_of(p.q.dtype);
  }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    keys_.load(matrix_at(p_.k, b, hkv, j0, cols, p_.D), input_unit_);
    keys_.pack<Depth::kCols, Side::kRight>(k_);
    keys_.prefetch_next();
    if (backward_) keys_.pack<Depth::kRows, Side::kRight>(k_rows_);
  }

  static constexpr bool kCanNarrow = true, kHasStrips = kTilesHaveStrips;
  void use_keys(int64_t cols) { cols_ = cols; }
  static int64_t query_bytes(const AttentionParams& p) {
    return 2 * parts_of(form_of(p.q.dtype)) * p.D;
  }
  void use_slot(int64_t slot) { slot_ = slots_ + slot; }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    AmxInput& queries = slot_->queries;
    queries.load(matrix_at(p_.q, b, h, i0, rows, p_.D), sign_of(p_.scale) * input_unit_);
    queries.pack<Depth::kCols, Side::kLeft>(slot_->q);
    if (backward_) queries.pack<Depth::kRows, Side::kLeft>(q_columns_);
  }

  void scores(float* s) { multiply(s, {}); }
  void scores_of(const Strips& strips, float* s) { multiply(s, {&strips}); }

  // Whether some kept pair has a query or a key that does not fit.
  bool look_at(const MaskTile& mask) {
    AmxInput& queries = slot_->queries;
    if (!queries.outliers().any() && !keys_.outliers().any()) return false;
    return mask.keeps_any([&](int64_t i) { return queries.is_outlier(i); },
                          [&](int64_t j) { return keys_.is_outlier(j); });
  }
  void use_form(bool wide) {
    AmxInput& queries = slot_->queries;
    const Form form = wide ? wide_form_of(p_.q.dtype) : form_of(p_.q.dtype);
    keys_.pack_as<Depth::kCols, Side::kRight>(form, k_);
    queries.pack_as<Depth::kCols, Side::kLeft>(form, slot_->q);
    if (!backward_) return;
    keys_.pack_as<Depth::kRows, Side::kRight>(form, k_rows_);
    queries.pack_as<Depth::kRows, Side::kLeft>(form, q_columns_);
    ds_rows_.use(form);
    ds_columns_.use(form);
  }

  void clear_key_grad() { grad_k_.clear(); }

  void backward(const float* ds, const MaskTile& mask, float* grad_q, int64_t grad_q_stride,
                double*) {
    AmxInput& queries = slot_->queries;
    const int64_t rows = queries.rows(), cols = cols_;
    const Matrix tile = {const_cast<float*>(ds), DType::kFloat32, 0, tile_.n, 1, rows, cols};
    if (!packed_) {
      constexpr Window kNotHuge = {0.f, kAnyBf16.high};
      ds_outliers_.scan<DType::kFloat32>(tile, kNotHuge, kNotHuge);
      pack_tiles<Depth::kCols, Side::kLeft>(tile, grad_unit_, ds_outliers_, ds_rows_);
      pack_tiles<Depth::kRows, Side::kRight>(tile, grad_unit_, ds_outliers_, ds_columns_);
    }

    multiply_tiles(ds_rows_, k_rows_, rows, p_.D, cols, false, grad_q_, ld_,
                   {.depth = mask.lists()});
    accumulate_rows_apart(ByRows{ds, tile_.n}, grad_unit_, rows, ds_outliers_, OutlierRows(), keys_,
                          cols, mask, grad_q_, ld_, 1);
    add_rows(grad_q_, ld_, rows, p_.D, p_.scale / (grad_unit_ * input_unit_), grad_q,
             grad_q_stride);

    grad_k_.begin_tile(grad_unit_);
    multiply_tiles(q_columns_, ds_columns_, p_.D, cols, rows, true, grad_k_.data(), tile_.n,
                   {.rows = mask.lists()});
    accumulate_rows_apart(ByCols{ds, tile_.n}, grad_unit_, cols, OutlierRows(), ds_outliers_,
                          queries, rows, mask, grad_k_.data(), 1, tile_.n);
  }

  // The factor of dS for the next tile: `first` for the first tile, else that of the sums, but not
  // above `bound`.
  float start_grad_unit(float first, float bound) {
    const float unit = grad_k_.unit() == 0.f ? first : grad_k_.unit();
    return grad_unit_ = !is_fp16(ds_rows_.form()) ? 1.f : unit < bound ? unit : bound;
  }
  // Adapts the factor of dS to the largest numbers in it. Returns whether it changed.
  bool change_grad_unit(GradTops tops) {
    constexpr float kLeast = 0x1p6f;  // keeps most bits of most numbers
    constexpr int64_t kAimed = 11;
    if (!is_fp16(ds_rows_.form())) return false;
    const int64_t before = exponent_of(grad_unit_);
    const bool good = tops.fit == 0.f || (tops.fit >= kLeast && tops.fit < kLargestHalf);
    int64_t n = good ? before : before + kAimed - exponent_of(tops.fit);
    if (tops.apart != 0.f) n = min64(n, before + kMostApart - exponent_of(tops.apart));
    grad_unit_ = grad_k_.bounded(two_to(max64(-kMostOctaves, min64(kMostOctaves, n))));
    return exponent_of(grad_unit_) != before;
  }
  float grad_unit() const { return grad_unit_; }

  // Operands that dS may be packed into directly. If it was, use_packed(true) says so before
  // backward(). Then no row of dS stands apart. `ds` is read only where a key or query does.
  const Operand& ds_rows() const { return ds_rows_; }
  const Operand& ds_columns() const { return ds_columns_; }
  void use_packed(bool packed) {
    packed_ = packed;
    if (packed) ds_outliers_.clear();
  }
  bool rows_apart() {
    return keys_.outliers().any_apart() || slot_->queries.outliers().any_apart();
  }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    const Matrix to = matrix_at(grad_k, b, hkv, j0, keys_.rows(), p_.D);
    grad_k_.end(1.f / input_unit_);
    const float unit = grad_k_.unit() * input_unit_;
    const float factor = unit == 0.f ? 0.f : __builtin_fabsf(p_.scale) / unit;
    unpack_columns(grad_k_.data(), tile_.n, factor, grad_k_rows_, ld_, to);
  }

 private:
  void multiply(float* s, Lists lists) {
    AmxInput& queries = slot_->queries;
    multiply_tiles(slot_->q, k_, queries.rows(), cols_, p_.D, false, s, tile_.n, lists);
    multiply_rows_apart(queries, keys_, cols_, s, tile_.n);
  }

  // A block of queries that stays loaded beside others.
  struct Slot {
    AmxInput queries;
    Operand q;
  };

  MatrixUnit unit_;
  const AttentionParams& p_;
  TileSize tile_;
  bool backward_;
  int64_t ld_, cols_ = 0;
  Slot *slots_, *slot_;
  AmxInput keys_;
  Operand k_;         // of S = Q K^T
  float input_unit_;  // of Q and K
  Operand k_rows_, q_columns_;
  bool packed_ = false;
  OutlierRows ds_outliers_;
  Operand ds_rows_, ds_columns_;
  float grad_unit_ = 1.f;  // of dS
  float* grad_q_ = nullptr;
  Sums grad_k_;
  float* grad_k_rows_ = nullptr;
};

}  // namespace fastattn::FASTATTN_ISA
