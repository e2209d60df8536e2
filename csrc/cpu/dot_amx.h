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
  AmxInput(Scratch& scratch, int64_t rows, int64_t cols)
      : ld_(tile_stride(cols)), apart_(scratch, rows), dense_(scratch.floats(rows * ld_)) {}

  void load(const Matrix& from, float sign) {
    from_ = from, sign_ = sign, is_dense_ = false;
    if (from.stride_c != 1 && from.cols > 1) {
      use_dense();
      from_ = {dense_, DType::kFloat32, 0, ld_, 1, from.rows, from.cols};
      sign_ = 1.f;
    }
    from_.stride_c = 1;
    with_dtype(from_.dtype, [&](auto type) { apart_.scan<type>(from_, kSmallest, kLargest); });
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
  void pack(const Operand& to) const {
    pack_tiles<kDepth, kSide>(from_, sign_, apart_, to);
  }

  int64_t rows() const { return from_.rows; }
  int64_t cols() const { return from_.cols; }
  const Apart& apart() const { return apart_; }

  // All rows in fp32, made when asked for.
  const float* row(int64_t r) {
    if (!is_dense_) use_dense();
    return dense_ + r * ld_;
  }

 private:
  void use_dense() {
    pack_rows(from_, sign_, dense_, ld_);
    is_dense_ = true;
  }

  int64_t ld_ = 0;
  Matrix from_{};
  float sign_ = 1.f;
  Apart apart_;
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
  if (!a.apart().any() && !b.apart().any()) return;
  for (int64_t i = 0; i < a.rows(); ++i)
    for (int64_t j = 0; j < cols; ++j) {
      if (!a.apart().has(i) && !b.apart().has(j)) continue;
      Vec sum{};
      for (int64_t d = 0; d < a.cols(); d += kWidth) sum += load(a.row(i) + d) * load(b.row(j) + d);
      c[i * ld + j] = sum_lanes(sum);
    }
}

// C(r, :) += sum_k A(r, k) b_k, k < depth, where b_k, or row r or column k of A, stands apart.
// `masked`: zeros of A count as nothing. Element (r, c) of C is c[r * stride_r + c * stride_c].
template <typename A>
static void accumulate_rows_apart(A a, int64_t rows, const Apart& a_rows, const Apart& a_cols,
                                  AmxInput& b, int64_t depth, bool masked, float* c,
                                  int64_t stride_r, int64_t stride_c) {
  if (!a_rows.any() && !a_cols.any() && !b.apart().any()) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < depth; ++k) {
      const float ark = a.at(r, k);
      if (!a_rows.has(r) && !a_cols.has(k) && !b.apart().has(k)) continue;
      if (masked && ark == 0.f) continue;
      for (int64_t n = 0; n < b.cols(); ++n) c[r * stride_r + n * stride_c] += ark * b.row(k)[n];
    }
}

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
        keys_(scratch, kBlockN, p.D),
        k_(scratch, kBlockN, p.D, parts_of(p.q.dtype)) {
    if (!backward) return;
    const int64_t parts = parts_of(p.q.dtype);
    k_rows_ = Operand(scratch, p.D, kBlockN, parts);
    q_columns_ = Operand(scratch, p.D, kBlockM, parts);
    ds_apart_ = Apart(scratch, kBlockM);
    ds_rows_ = Operand(scratch, kBlockM, kBlockN, parts);
    ds_columns_ = Operand(scratch, kBlockN, kBlockM, parts);
    grad_q_ = scratch.floats(kBlockM * ld_);
    grad_k_ = scratch.floats(ld_ * kBlockN);
    grad_k_rows_ = scratch.floats(kBlockN * ld_);
  }

  float logit_scale() const { return abs_scale() * kLog2e; }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    keys_.load(matrix_at(p_.k, b, hkv, j0, cols, p_.D), 1.f);
    keys_.pack<Depth::kCols, Side::kRight>(k_);
    keys_.prefetch_next();
    if (backward_) keys_.pack<Depth::kRows, Side::kRight>(k_rows_);
  }

  void use_keys(int64_t cols) { cols_ = cols; }
  static int64_t query_bytes(const AttentionParams& p) { return 2 * parts_of(p.q.dtype) * p.D; }
  void use_slot(int64_t slot) { slots_.use(slot); }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    AmxInput& queries = slots_.queries();
    queries.load(matrix_at(p_.q, b, h, i0, rows, p_.D), __builtin_copysignf(1.f, p_.scale));
    queries.pack<Depth::kCols, Side::kLeft>(slots_.q());
    if (backward_) queries.pack<Depth::kRows, Side::kLeft>(q_columns_);
  }

  void scores(float* s) {
    AmxInput& queries = slots_.queries();
    multiply_tiles(slots_.q(), k_, queries.rows(), cols_, p_.D, false, s, kBlockN);
    multiply_rows_apart(queries, keys_, cols_, s, kBlockN);
  }

  void clear_key_grad() { fill(grad_k_, ld_ * kBlockN, 0.f); }

  void backward(const float* ds, bool masked, float* grad_q, int64_t grad_q_stride, float*) {
    AmxInput& queries = slots_.queries();
    const int64_t rows = queries.rows(), cols = cols_;
    const Matrix tile = {const_cast<float*>(ds), DType::kFloat32, 0, kBlockN, 1, rows, cols};
    if (!packed_) {
      ds_apart_.scan<DType::kFloat32>(tile, 0.f, kLargest);
      pack_tiles<Depth::kCols, Side::kLeft>(tile, 1.f, ds_apart_, ds_rows_);
      pack_tiles<Depth::kRows, Side::kRight>(tile, 1.f, ds_apart_, ds_columns_);
    }

    multiply_tiles(ds_rows_, k_rows_, rows, p_.D, cols, false, grad_q_, ld_);
    accumulate_rows_apart(ByRows{ds, kBlockN}, rows, ds_apart_, Apart(), keys_, cols, masked,
                          grad_q_, ld_, 1);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t d = 0; d < p_.D; ++d)
        grad_q[i * grad_q_stride + d] += p_.scale * grad_q_[i * ld_ + d];

    multiply_tiles(q_columns_, ds_columns_, p_.D, cols, rows, true, grad_k_, kBlockN);
    accumulate_rows_apart(ByCols{ds, kBlockN}, cols, Apart(), ds_apart_, queries, rows, masked,
                          grad_k_, 1, kBlockN);
  }

  // Where dS goes instead, and whether it did before the next call of backward(): no row of it
  // stands apart then, and `ds` is read only where some key or query does.
  const Operand& ds_rows() const { return ds_rows_; }
  const Operand& ds_columns() const { return ds_columns_; }
  void use_packed(bool packed) {
    packed_ = packed;
    if (packed) ds_apart_.clear();
  }
  bool rows_apart() { return keys_.apart().any() || slots_.queries().apart().any(); }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    const Matrix to = matrix_at(grad_k, b, hkv, j0, keys_.rows(), p_.D);
    unpack_columns(grad_k_, kBlockN, abs_scale(), grad_k_rows_, ld_, to);
  }

 private:
  // Blocks of queries that stay loaded side by side.
  class Slots {
   public:
    Slots(Scratch& scratch, const AttentionParams& p, int64_t count, int64_t rows)
        : list_(static_cast<Slot*>(scratch.of<Slot>(count))) {
      for (int64_t n = 0; n < count; ++n)
        new (list_ + n)
            Slot{AmxInput(scratch, rows, p.D), Operand(scratch, rows, p.D, parts_of(p.q.dtype))};
    }
    void use(int64_t slot) { current_ = slot; }
    AmxInput& queries() { return list_[current_].queries; }
    const Operand& q() const { return list_[current_].q; }

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
  Operand k_;  // of S = Q K^T
  Operand k_rows_, q_columns_;
  bool packed_ = false;
  Apart ds_apart_;
  Operand ds_rows_, ds_columns_;
  float *grad_q_ = nullptr, *grad_k_ = nullptr, *grad_k_rows_ = nullptr;
};

// The weights of a tile on their way into a left operand.
template <int kParts>
struct TileSink {
  const Operand& to;
  float* also;  // in fp32, too; may be nullptr
  int64_t ld;

  struct Row {
    static constexpr int kVectors = 2, kBits = 8 * kParts;
    static constexpr bool kFlushes = true;
    int32_t* words;
    float* also;
    FASTATTN_MEMBER void put(int64_t c, const Vec (&w)[2]) const {
      write_pair<kParts>(w[0], w[1], words + c * (kParts * kTileWords / kTileDepth));
      if (__builtin_expect(also != nullptr, 0)) {
        store(also + c, w[0]);
        store(also + c + kWidth, w[1]);
      }
    }
  };
  FASTATTN_MEMBER Row row(int64_t i) const {
    return {to.tiles(i / kEdge, 0) + i % kEdge * kEdge, also == nullptr ? also : also + i * ld};
  }
};

// ValueTile on the matrix unit.
class AmxValueTile {
 public:
  AmxValueTile(const AttentionParams& p, Scratch& scratch, int64_t block_m, int64_t block_n)
      : p_(p),
        ld_(tile_stride(p.E)),
        values_(scratch, block_n, p.E),
        v_(scratch, p.E, block_n, parts_of(p.q.dtype)),
        weights_(scratch, block_m, block_n, parts_of(p.q.dtype)) {}

  int64_t stride() const { return ld_; }
  void use_keys(int64_t cols) { cols_ = cols; }

  void load(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    values_.load(matrix_at(p_.v, b, hkv, j0, cols, p_.E), 1.f);
    values_.pack<Depth::kRows, Side::kRight>(v_);
    values_.prefetch_next();
  }

  // Calls f with where the softmax is to put the weights that replace scores s.
  template <typename F>
  FASTATTN_MEMBER void with_sink(float* s, int64_t ld, F f) {
    float* const also = values_.apart().any() ? s : nullptr;
    with_parts(weights_.parts(), [&](auto parts) { f(TileSink<parts>{weights_, also, ld}); });
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
    accumulate_rows_apart(ByRows{weights, ld}, rows, Apart(), Apart(), values_, cols_, masked, o,
                          ld_, 1);
  }

 private:
  const AttentionParams& p_;
  int64_t ld_, cols_ = 0;
  AmxInput values_;
  Operand v_, weights_;
};

template <int64_t kM, int64_t kN>
static void attend_tile(AmxDotScore<kM, kN>& score, AmxValueTile& values, const MaskTile& mask,
                        const DropoutParams& dropout, const TilePlace& at, const RowState& state,
                        float* s, float* drop, float* alpha) {
  score.scores(s);
  values.with_sink(s, kN, [&](const auto& sink) {
    const FlushDenormals weights;  // the matrix unit does, too
    mask.with_masking([&](auto masking) {
      softmax_rows<masking>(mask, dropout, at, state, logit_scale(score), s, kN, drop, alpha, sink);
    });
  });
  values.accumulate(s, kN, at.rows, alpha, mask.masked(), state.o);
}

// ValueGrads on the matrix unit.
class AmxValueGrads {
 public:
  AmxValueGrads(const AttentionParams& p, const View& grad_out, Scratch& scratch, int64_t block_m,
                int64_t block_n)
      : p_(p),
        grad_out_view_(grad_out),
        block_n_(block_n),
        ld_(round_up(p.E, kEdge)),
        values_(scratch, block_n, p.E),
        grad_out_(scratch, block_m, p.E),
        v_(scratch, block_n, p.E, parts_of(p.q.dtype)),
        grad_out_rows_(scratch, block_m, p.E, parts_of(p.q.dtype)),
        grad_out_columns_(scratch, p.E, block_m, parts_of(p.q.dtype)),
        weights_(scratch, block_n, block_m, parts_of(p.q.dtype)),
        grad_v_(scratch.floats(ld_ * block_n)),
        grad_v_rows_(scratch.floats(block_n * ld_)) {}

  void use_keys(int64_t cols) { cols_ = cols; }

  void load_values(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    values_.load(matrix_at(p_.v, b, hkv, j0, cols, p_.E), 1.f);
    values_.pack<Depth::kCols, Side::kRight>(v_);
    values_.prefetch_next();
    fill(grad_v_, ld_ * block_n_, 0.f);
  }

  void load_grad_out(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    grad_out_.load(matrix_at(grad_out_view_, b, h, i0, rows, p_.E), 1.f);
    grad_out_.pack<Depth::kCols, Side::kLeft>(grad_out_rows_);
    grad_out_.pack<Depth::kRows, Side::kLeft>(grad_out_columns_);
  }

  void grad_weights(float* dp) {
    multiply_tiles(grad_out_rows_, v_, grad_out_.rows(), cols_, p_.E, false, dp, block_n_);
    multiply_rows_apart(grad_out_, values_, cols_, dp, block_n_);
  }

  void accumulate(float* weights, bool masked) {
    const int64_t rows = grad_out_.rows(), cols = cols_;
    const Matrix tile = {weights, DType::kFloat32, 0, block_n_, 1, rows, cols};
    if (!packed_) pack_tiles<Depth::kRows, Side::kRight>(tile, 1.f, Apart(), weights_);
    multiply_tiles(grad_out_columns_, weights_, p_.E, cols, rows, true, grad_v_, block_n_);
    accumulate_rows_apart(ByCols{weights, block_n_}, cols, Apart(), Apart(), grad_out_, rows,
                          masked, grad_v_, 1, block_n_);
  }

  // Where W goes instead, and whether it did before the next call of accumulate(): `weights` is
  // read then only where some row of dO stands apart.
  const Operand& weights() const { return weights_; }
  void use_packed(bool packed) { packed_ = packed; }
  bool rows_apart() const { return grad_out_.apart().any(); }
  int64_t rows() const { return grad_out_.rows(); }

  void store(const View& grad_v, int64_t b, int64_t hkv, int64_t j0) {
    const Matrix to = matrix_at(grad_v, b, hkv, j0, values_.rows(), p_.E);
    unpack_columns(grad_v_, block_n_, 1.f, grad_v_rows_, ld_, to);
  }

 private:
  const AttentionParams& p_;
  const View& grad_out_view_;
  int64_t block_n_, ld_, cols_ = 0;
  AmxInput values_, grad_out_;
  Operand v_, grad_out_rows_, grad_out_columns_, weights_;
  bool packed_ = false;
  float *grad_v_, *grad_v_rows_;
};

// W and dS of a tile on their way into operands, where each is split once: W for dV = W^T dO, dS
// for dK = dS^T Q and dQ = dS K.
template <int kParts>
class PackedGrads {
 public:
  static constexpr int kRows = 2, kVectors = 2;
  static constexpr int64_t kStep = kEdge;

  // Puts the first `rows` rows in place, too, if `also` is not nullptr.
  PackedGrads(const Operand& w_columns, const Operand& ds_columns, const Operand& ds_rows,
              const GradsInPlace* also, int64_t rows)
      : w_columns_(w_columns),
        ds_columns_(ds_columns),
        ds_rows_(ds_rows),
        also_(also),
        rows_(rows) {}

  // Whether no row of dS stands apart.
  bool all_packed() const { return all_packed_; }

  FASTATTN_MEMBER void begin(int64_t i) {
    i_ = i;
    top_[0] = top_[1] = VecI{};
  }
  FASTATTN_MEMBER void put(int64_t c, const Vec (&w)[2][2], const Vec (&ds)[2][2]) {
    const int64_t edge = c / kEdge, row = i_ % kEdge * kEdge;
    Vec part[2][2][kParts];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      write_pair<kParts>(w[0][v], w[1][v], w_columns_.tiles(edge + v, i_ / kTileDepth) + row);
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) {
        top_[n] = largest(top_[n], ds[n][v]);
        split(ds[n][v], part[n][v]);
      }
      write_parts<kParts>(part[0][v], part[1][v],
                          ds_columns_.tiles(edge + v, i_ / kTileDepth) + row);
    }
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n)
      write_parts<kParts>(part[n][0], part[n][1],
                          ds_rows_.tiles(i_ / kEdge + n, c / kTileDepth) + row);
    if (__builtin_expect(also_ != nullptr, 0)) put_also(c, w, ds);
  }
  FASTATTN_MEMBER void end() {
    all_packed_ &= !stands_apart(top_[0], 0.f, kLargest) && !stands_apart(top_[1], 0.f, kLargest);
  }

 private:
  void put_also(int64_t c, const Vec (&w)[2][2], const Vec (&ds)[2][2]) const {
    for (int64_t n = 0; n < 2 && i_ + n * kStep < rows_; ++n)
      for (int v = 0; v < 2; ++v) {
        const int64_t at = (i_ + n * kStep) * also_->ld + c + v * kWidth;
        store(also_->w + at, w[n][v]);
        store(also_->ds + at, ds[n][v]);
      }
  }

  const Operand &w_columns_, &ds_columns_, &ds_rows_;
  const GradsInPlace* also_;
  int64_t rows_, i_ = 0;
  VecI top_[2];
  bool all_packed_ = true;
};

template <int64_t kM, int64_t kN, typename Fill>
static void finish_grads(AmxDotScore<kM, kN>& score, AmxValueGrads& values, bool dense, Fill fill,
                         GradsInPlace in_place) {
  dense |= score.rows_apart() || values.rows_apart();
  bool packed = false;
  with_parts(score.ds_rows().parts(), [&](auto parts) {
    PackedGrads<parts> sink(values.weights(), score.ds_columns(), score.ds_rows(),
                            dense ? &in_place : nullptr, values.rows());
    fill(sink);
    packed = sink.all_packed();
  });
  if (!packed && !dense) fill(in_place);
  score.use_packed(packed);
  values.use_packed(packed);
}

}  // namespace fastattn::FASTATTN_ISA
