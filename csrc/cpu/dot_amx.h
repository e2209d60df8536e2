// The five products of scaled dot-product attention on the matrix unit (amx.h): the score, the
// values and their gradients with the interfaces of score_dot.h and value.h.
//
// Gradients of keys and values are accumulated transposed, dK^T = Q^T dS and dV^T = dO^T W, so that
// no tile of scores is ever transposed: W and dS are right operands there as they lie.
#pragma once

#include "cpu/amx.h"
#include "cpu/backward.h"
#include "cpu/score.h"
#include "cpu/value.h"

namespace fastattn::FASTATTN_ISA {

// A block of rows of an input, on the way into operands: rows that stand apart are kept in fp32.
class AmxInput {
 public:
  AmxInput() = default;
  AmxInput(Scratch& scratch, int64_t rows, int64_t cols, DType dtype)
      : dtype_(dtype),
        ld_(tile_stride(cols)),
        misfits_(scratch, rows),
        dense_(scratch.floats(rows * ld_)) {}

  // Everything made of the block is `factor` times it.
  void load(const Matrix& from, float factor) {
    from_ = from, factor_ = factor, is_dense_ = false;
    if (from.stride_c != 1 && from.cols > 1) {
      use_dense();
      from_ = {dense_, DType::kFloat32, 0, ld_, 1, from.rows, from.cols};
      factor_ = 1.f;
    }
    from_.stride_c = 1;
    // Of the input, times what a copy of it has been multiplied by. In bf16 its unit must leave
    // room for sums.
    const float unit = __builtin_fabsf(factor), copied = unit / __builtin_fabsf(factor_);
    const float high = kAnyBf16.high * unit < 0x1p100f ? kAnyBf16.high : 0x1p100f / unit;
    const Window wide = {kAnyBf16.low * copied, high * copied},
                 halves = {kSmallestHalf / unit * copied, kLargestHalf / unit * copied};
    with_dtype(from_.dtype, [&](auto type) {
      misfits_.scan<type>(from_, form_of(dtype_) == Form::kTwoHalves ? halves : wide, wide);
    });
  }

  // Asks for as many rows after those loaded, which come next: scanning them waits for memory else.
  void prefetch_next() const {
    const int64_t bytes = from_.dtype == DType::kFloat32 ? 4 : 2;
    const char* const next =
        static_cast<const char*>(from_.data) + (from_.offset + from_.rows * from_.stride_r) * bytes;
    for (int64_t r = 0; r < from_.rows; ++r)
      for (int64_t n = 0; n < from_.cols * bytes; n += kTileLine)
        _mm_prefetch(next + r * from_.stride_r * bytes + n, _MM_HINT_T1);
  }

  template <Depth kDepth, Side kSide>
  void pack(Operand& to) const {
    to.use(form_of(dtype_));
    pack_tiles<kDepth, kSide>(from_, factor_, misfits_, to);
  }
  // Anew, if what has been packed has another form.
  template <Depth kDepth, Side kSide>
  void pack_as(Form form, Operand& to) const {
    if (to.form() == form) return;
    to.use(form);
    pack_tiles<kDepth, kSide>(from_, factor_, misfits_, to);
  }

  int64_t rows() const { return from_.rows; }
  int64_t cols() const { return from_.cols; }
  const Misfits& misfits() const { return misfits_; }
  bool is_misfit(int64_t r) const { return r < rows() && misfits_.has(r); }

  // All rows in fp32, made when asked for.
  const float* row(int64_t r) {
    if (!is_dense_) use_dense();
    return dense_ + r * ld_;
  }

 private:
  void use_dense() {
    pack_rows(from_, factor_, dense_, ld_);
    is_dense_ = true;
  }

  DType dtype_ = DType::kFloat32;
  int64_t ld_ = 0;
  Matrix from_{};
  float factor_ = 1.f;
  Misfits misfits_;
  float* dense_ = nullptr;
  bool is_dense_ = false;
};

// to(r, c) = factor * from[c * ld + r], by way of `rows` [to.rows, ld_rows].
static void unpack_columns(float* from, int64_t ld, float factor, float* rows, int64_t ld_rows,
                           const Matrix& to) {
  pack_rows({from, DType::kFloat32, 0, 1, ld, to.rows, to.cols}, factor, rows, ld_rows);
  unpack_rows(rows, ld_rows, 1.f, nullptr, to);
}

// C(r, c) = a_r . b_c, [rows of a, ld], where one of the two stands apart and c < cols.
static void multiply_rows_apart(AmxInput& a, AmxInput& b, int64_t cols, float* c, int64_t ld) {
  if (!a.misfits().any_apart() && !b.misfits().any_apart()) return;
  for (int64_t i = 0; i < a.rows(); ++i)
    for (int64_t j = 0; j < cols; ++j) {
      if (!a.misfits().is_apart(i) && !b.misfits().is_apart(j)) continue;
      Vec sum{};
      for (int64_t d = 0; d < a.cols(); d += kWidth) sum += load(a.row(i) + d) * load(b.row(j) + d);
      c[i * ld + j] = sum_lanes(sum);
    }
}

// C(r, :) += factor sum_k A(r, k) b_k, k < depth, where b_k, or row r or column k of A, stands
// apart. `masked`: zeros of A count as nothing. Element (r, c) of C is c[r * stride_r + c *
// stride_c].
template <typename A>
static void accumulate_rows_apart(A a, float factor, int64_t rows, const Misfits& a_rows,
                                  const Misfits& a_cols, AmxInput& b, int64_t depth, bool masked,
                                  float* c, int64_t stride_r, int64_t stride_c) {
  if (!a_rows.any_apart() && !a_cols.any_apart() && !b.misfits().any_apart()) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < depth; ++k) {
      const float ark = factor * a.at(r, k);
      if (!a_rows.is_apart(r) && !a_cols.is_apart(k) && !b.misfits().is_apart(k)) continue;
      if (masked && ark == 0.f) continue;
      for (int64_t n = 0; n < b.cols(); ++n) c[r * stride_r + n * stride_c] += ark * b.row(k)[n];
    }
}

// ---- units ----

// Units are 2^-66 to 2^66: a number up to 2^60 is still finite in any of them.
constexpr int64_t kMostOctaves = 66;

// Sums in fp32 whose unit may have to change while they grow.
class Sums {
 public:
  Sums() = default;
  Sums(Scratch& scratch, int64_t count) : count_(count), data_(scratch.floats(count)) {}

  float* data() const { return data_; }
  void clear() {
    fill(data_, count_, 0.f);
    unit_ = 0.f;
  }
  // 0 if nothing has been added yet.
  float unit() const { return unit_; }
  void use(float unit) {
    const float factor = unit / unit_;
    for (int64_t n = 0; unit_ != 0.f && factor != 1.f && n < count_; n += kWidth)
      store(data_ + n, load(data_ + n) * factor);
    unit_ = unit;
  }
  // `unit`, or less where that would bring the sums near overflow.
  float bounded(float unit) const {
    if (unit_ == 0.f || unit <= unit_) return unit;
    VecI top{};
    for (int64_t n = 0; n < count_; n += kWidth) {
      const Vec x = load(data_ + n);
      top = largest(top, abs(x) < splat(kInf) ? x : Vec{});
    }
    const float most = max_lanes(from_bits(top));
    if (most == 0.f) return unit;
    const float bound = unit_ * two_to(max64(0, min64(126, 100 - exponent_of(most))));
    return unit < bound ? unit : bound;
  }

 private:
  int64_t count_ = 0;
  float* data_ = nullptr;
  float unit_ = 0.f;
};

// Whether a dense mask differs from row to row: it may consist of blocks then, and whole tiles of
// it be dropped.
FASTATTN_SIMD bool may_have_blocks(const AttentionParams& p) {
  return p.mask.keep != nullptr && p.mask.keep_stride_m != 0;
}

// DotScore on the matrix unit.
template <int64_t kM, int64_t kN>
class AmxDotScore {
 public:
  static constexpr int64_t kBlockM = kM, kBlockN = kN;

  AmxDotScore(const AttentionParams& p, Scratch& scratch, bool backward, int64_t slots = 1)
      : p_(p),
        backward_(backward),
        ld_(round_up(p.D, kEdge)),
        slots_(scratch, p, slots, min64(p.M, kBlockM)),
        keys_(scratch, kBlockN, p.D, p.q.dtype),
        k_(scratch, kBlockN, p.D, p.q.dtype),
        input_unit_(input_unit(p.q.dtype)) {
    if (!backward) return;
    k_rows_ = Operand(scratch, p.D, kBlockN, p.q.dtype);
    q_columns_ = Operand(scratch, p.D, kBlockM, p.q.dtype);
    ds_misfits_ = Misfits(scratch, kBlockM);
    ds_rows_ = Operand(scratch, kBlockM, kBlockN, p.q.dtype);
    ds_columns_ = Operand(scratch, kBlockN, kBlockM, p.q.dtype);
    grad_q_ = scratch.floats(kBlockM * ld_);
    grad_k_ = Sums(scratch, ld_ * kBlockN);
    grad_k_rows_ = scratch.floats(kBlockN * ld_);
  }

  float logit_scale() const { return abs_scale() * kLog2e / (input_unit_ * input_unit_); }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    keys_.load(matrix_at(p_.k, b, hkv, j0, cols, p_.D), input_unit_);
    keys_.pack<Depth::kCols, Side::kRight>(k_);
    keys_.prefetch_next();
    if (backward_) keys_.pack<Depth::kRows, Side::kRight>(k_rows_);
  }

  void use_keys(int64_t cols) { cols_ = cols; }
  static int64_t query_bytes(const AttentionParams& p) {
    return 2 * parts_of(form_of(p.q.dtype)) * p.D;
  }
  void use_slot(int64_t slot) { slots_.use(slot); }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    AmxInput& queries = slots_.queries();
    queries.load(matrix_at(p_.q, b, h, i0, rows, p_.D), __builtin_copysignf(input_unit_, p_.scale));
    queries.pack<Depth::kCols, Side::kLeft>(slots_.q());
    if (backward_) queries.pack<Depth::kRows, Side::kLeft>(q_columns_);
  }

  void scores(float* s) {
    AmxInput& queries = slots_.queries();
    multiply_tiles(slots_.q(), k_, queries.rows(), cols_, p_.D, false, s, kBlockN);
    multiply_rows_apart(queries, keys_, cols_, s, kBlockN);
  }

  // Whether some kept pair has a query or a key that does not fit.
  bool needs_wide(const MaskTile& mask) {
    AmxInput& queries = slots_.queries();
    if (!queries.misfits().any() && !keys_.misfits().any()) return false;
    return mask.keeps_any([&](int64_t i) { return queries.is_misfit(i); },
                          [&](int64_t j) { return keys_.is_misfit(j); });
  }
  void use_form(bool wide) {
    AmxInput& queries = slots_.queries();
    const Form form = wide ? wide_form_of(p_.q.dtype) : form_of(p_.q.dtype);
    keys_.pack_as<Depth::kCols, Side::kRight>(form, k_);
    queries.pack_as<Depth::kCols, Side::kLeft>(form, slots_.q());
    if (!backward_) return;
    keys_.pack_as<Depth::kRows, Side::kRight>(form, k_rows_);
    queries.pack_as<Depth::kRows, Side::kLeft>(form, q_columns_);
    ds_rows_.use(form);
    ds_columns_.use(form);
  }

  void clear_key_grad() { grad_k_.clear(); }

  void backward(const float* ds, bool masked, float* grad_q, int64_t grad_q_stride, float*) {
    AmxInput& queries = slots_.queries();
    const int64_t rows = queries.rows(), cols = cols_;
    const Matrix tile = {const_cast<float*>(ds), DType::kFloat32, 0, kBlockN, 1, rows, cols};
    if (!packed_) {
      constexpr Window kNotHuge = {0.f, kAnyBf16.high};
      ds_misfits_.scan<DType::kFloat32>(tile, kNotHuge, kNotHuge);
      pack_tiles<Depth::kCols, Side::kLeft>(tile, grad_unit_, ds_misfits_, ds_rows_);
      pack_tiles<Depth::kRows, Side::kRight>(tile, grad_unit_, ds_misfits_, ds_columns_);
    }

    multiply_tiles(ds_rows_, k_rows_, rows, p_.D, cols, false, grad_q_, ld_);
    accumulate_rows_apart(ByRows{ds, kBlockN}, grad_unit_, rows, ds_misfits_, Misfits(), keys_,
                          cols, masked, grad_q_, ld_, 1);
    const float factor = p_.scale / (grad_unit_ * input_unit_);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t d = 0; d < p_.D; ++d)
        grad_q[i * grad_q_stride + d] += factor * grad_q_[i * ld_ + d];

    grad_k_.use(grad_unit_);
    multiply_tiles(q_columns_, ds_columns_, p_.D, cols, rows, true, grad_k_.data(), kBlockN);
    accumulate_rows_apart(ByCols{ds, kBlockN}, grad_unit_, cols, Misfits(), ds_misfits_, queries,
                          rows, masked, grad_k_.data(), 1, kBlockN);
  }

  // What dS of the next tile is to be multiplied by, `first` if it is the first.
  float start_grad_unit(float first) {
    const bool fp16 = is_fp16(ds_rows_.form());
    return grad_unit_ = !fp16 ? 1.f : grad_k_.unit() == 0.f ? first : grad_k_.unit();
  }
  // Whether numbers of which `top` is the largest should have another unit, which they get.
  bool change_grad_unit(float top) {
    constexpr float kLeast = 0x1p6f;  // most numbers keep most of their bits
    constexpr int64_t kAimed = 11;
    if (!is_fp16(ds_rows_.form()) || top == 0.f) return false;
    if (top >= kLeast && top < kLargestHalf) return false;
    const float before = grad_unit_;
    const int64_t n = exponent_of(before) + kAimed - exponent_of(top);
    grad_unit_ = grad_k_.bounded(two_to(max64(-kMostOctaves, min64(kMostOctaves, n))));
    return grad_unit_ != before;
  }
  float grad_unit() const { return grad_unit_; }

  // Where dS goes instead, and whether it did before the next call of backward(): no row of it
  // stands apart then, and `ds` is read only where some key or query does.
  const Operand& ds_rows() const { return ds_rows_; }
  const Operand& ds_columns() const { return ds_columns_; }
  void use_packed(bool packed) {
    packed_ = packed;
    if (packed) ds_misfits_.clear();
  }
  bool rows_apart() {
    return keys_.misfits().any_apart() || slots_.queries().misfits().any_apart();
  }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    const Matrix to = matrix_at(grad_k, b, hkv, j0, keys_.rows(), p_.D);
    const float factor = grad_k_.unit() == 0.f ? 0.f : abs_scale() / (grad_k_.unit() * input_unit_);
    unpack_columns(grad_k_.data(), kBlockN, factor, grad_k_rows_, ld_, to);
  }

 private:
  // Blocks of queries that stay loaded side by side.
  class Slots {
   public:
    Slots(Scratch& scratch, const AttentionParams& p, int64_t count, int64_t rows)
        : list_(static_cast<Slot*>(scratch.of<Slot>(count))) {
      for (int64_t n = 0; n < count; ++n)
        new (list_ + n)
            Slot{AmxInput(scratch, rows, p.D, p.q.dtype), Operand(scratch, rows, p.D, p.q.dtype)};
    }
    void use(int64_t slot) { current_ = slot; }
    AmxInput& queries() { return list_[current_].queries; }
    Operand& q() { return list_[current_].q; }

   private:
    struct Slot {
      AmxInput queries;
      Operand q;
    };
    Slot* list_;
    int64_t current_ = 0;
  };

  float abs_scale() const { return __builtin_fabsf(p_.scale); }

  MatrixUnit unit_;
  const AttentionParams& p_;
  bool backward_;
  int64_t ld_, cols_ = 0;
  Slots slots_;
  AmxInput keys_;
  Operand k_;         // of S = Q K^T
  float input_unit_;  // of Q and K
  Operand k_rows_, q_columns_;
  bool packed_ = false;
  Misfits ds_misfits_;
  Operand ds_rows_, ds_columns_;
  float grad_unit_ = 1.f;  // of dS
  float* grad_q_ = nullptr;
  Sums grad_k_;
  float* grad_k_rows_ = nullptr;
};

template <int64_t kM, int64_t kN>
static void choose_form(AmxDotScore<kM, kN>& score, const MaskTile& mask) {
  score.use_form(score.needs_wide(mask));
}
// Score and values together.
template <int64_t kM, int64_t kN, typename Values>
static void choose_form(AmxDotScore<kM, kN>& score, Values& values, const MaskTile& mask) {
  const bool wide = score.needs_wide(mask) || values.needs_wide(mask);
  score.use_form(wide);
  values.use_form(wide);
}

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
  AmxValueTile(const AttentionParams& p, Scratch& scratch, int64_t block_m, int64_t block_n)
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
