// The additive (Bahdanau) score: s_ij = sum_d w_d tanh(q_id + k_jd). Each tanh has an
// absolute error of about 1e-7, beside 0 too. The loop over pairs has no tanh:
//
//   tanh(q + k) = 1 - 2 u      u = 1 / (1 + E F)      E = e^(2 (q + c))      F = e^(2 (k - c))
//
// E takes one exponential per element of a query block, and F one per element of a key tile. A pair
// takes a quarter or half of a division per dim. tile.h has the loops and what bounds them. terms.h
// proves their range.
//
// The centre c is 0 unless the keys of a tile are far from 0. If keys are far from each other, or
// not finite, their tile takes an exponential per pair and dim instead. Keys that no row of the
// tile keeps do not influence this choice.
//
// Gradients, with dS in natural units and t = u (1 - u) = (1 - tanh^2) / 4:
//   dq_id = 4 w_d sum_j dS_ij t_ijd                dk_jd = 4 w_d sum_i dS_ij t_ijd
//   dw_d = sum_ij dS_ij (1 - 2 u_ijd)
//
// No array has size M N D. The forward pass saves no u: the backward pass recomputes u from E and
// F. Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and
// translate", 2015.
#pragma once

#include "cpu/base/pack.h"
#include "cpu/score/additive/tile.h"
#include "cpu/score/score.h"

namespace fastattn::FASTATTN_ISA {

// A tile of scores fits the L1 cache. An exponential of a key serves 64 pairs.
class AdditiveScore : public FixedTile<64, kWidth == 16 ? 128 : 64> {
 public:
  static constexpr int64_t kBeginStep = kBlockN, kDimWork = kTanhWork;

  AdditiveScore(const AttentionParams& p, const Path&, Scratch& scratch, bool backward,
                int64_t slots = 1)
      : p_(p),
        scratch_(scratch),
        backward_(backward),
        dims_(round_up(p.D + 1, 2)),
        ld_(tile_stride(p.D)),
        keys_(key_panels()),
        kept_(scratch.ints(kBlockN)),
        every_(list_all(scratch, kBlockN)),
        centre_(scratch.floats(dims_)),
        factors_(scratch.floats(kPanelRows * dims_)),
        slots_(make_slots(slots)),
        slot_(slots_) {
    if (!backward) return;
    gradient_e_ = query_panels(dims_);
    query_grad_ = query_panels(dims_);
    tile_key_grad_ = key_panels();
    key_grad_ = scratch.of<double>(kBlockN * dims_);
    fill(tile_key_grad_, kBlockN * dims_, 0.f);
    rows_out_ = scratch.floats(kPanelRows * ld_);
  }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    from_ = matrix_at(p_.k, b, hkv, j0, cols, p_.D);
    pack_keys();
    for (int64_t c = 0; c < kBlockN; ++c) kept_[c] = -1;
    all_near_ = range_of(largest_key()) == Range::kNear;
    is_chosen_ = false;
    if (all_near_) use_range(Range::kNear);
  }

  // Chooses how to compute the scores of a tile, from the keys that some row of the tile keeps.
  // Garbage in other keys changes no bit. The number of loaded keys changes no bit either.
  bool look_at(const MaskTile& mask) {
    if (!all_near_) choose_range(mask);
    return false;
  }

  static int64_t query_bytes(const AttentionParams& p) { return 4 * p.D; }
  void use_slot(int64_t slot) { slot_ = slots_ + slot; }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    slot_->rows = rows;
    slot_->prepared = kNothing;
    select_head(h);
    for (int64_t i = 0; i < rows; i += kPanelRows) {
      float* const panel = slot_->q + i * dims_;
      pack_transposed(matrix_at(p_.q, b, h, i0 + i, min64(kPanelRows, rows - i), p_.D), 1.f, panel,
                      kPanelRows);
      fill(panel + p_.D * kPanelRows, (dims_ - p_.D) * kPanelRows, kNoTerm);
    }
  }

  void scores(float* s) {
    score_panels(s, [&](int64_t) { return Columns{every_, AllColumns{cols_}.count()}; });
  }

  static constexpr bool kHasStrips = true;
  void scores_of(const Strips& strips, float* s) {
    static_assert(kPanelRows == kStripRows);
    score_panels(s, [&](int64_t i) { return strips.of_row(i); });
  }

  void clear_key_grad() { zero_sums(key_grad_, round_up(cols_, kWidth) * dims_); }

  // Must follow scores() of the same tile. The mask is not used: u is always finite, so 0 * NaN
  // does not occur. A NaN input reaches the gradients through dS.
  void backward(const float* ds, const MaskTile&, float* grad_q, int64_t grad_q_stride,
                double* grad_w) {
    with_range([&](auto range) {
      for (int64_t d = 0; d < p_.D; d += 2) {
        float sums[2];
        gradient_dims<range>(d, ds, sums);
        add_to_sums(sums, min64(2, p_.D - d), 2., grad_w + d);
      }
    });
    for (int64_t i = 0; i < slot_->rows; i += kPanelRows)
      add_query_grad(i, grad_q + i * grad_q_stride, grad_q_stride);
    add_key_grad();
  }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    for (int64_t c = 0; c < cols_; c += kWidth) {
      const int64_t cols = min64(kWidth, cols_ - c);
      float* const panel = key_panel(keys_, c);  // of keys that are no longer needed
      round_sums(key_grad_ + c * dims_, p_.D * kWidth, panel);
      pack_transposed(dense(panel, kWidth, cols), 1.f, rows_out_, ld_);
      unpack_rows(rows_out_, ld_, 1.f, nullptr, matrix_at(grad_k, b, hkv, j0 + c, cols, p_.D));
    }
  }

 private:
  static constexpr float kNoTerm = -50.f;  // a query of padding: tanh is -1

  // Values of Slot::prepared, which says what `e` of a slot was computed for. A Range means that
  // range with centre 0. kCentred + n means centre number n.
  static constexpr int64_t kNothing = -1, kCentred = 3;

  // A block of queries of one head.
  struct Slot {
    float* q;         // panels [dims_][kPanelRows]
    float* e;         // panels [terms.all][kPanelRows]: c E, or q if exact; in the terms' order
    float* w;         // [D]
    Terms near, far;  // all == 0: not listed yet
    int64_t rows, head, prepared;
  };

  float* query_panels(int64_t depth) { return scratch_.floats(kBlockM * depth); }
  float* key_panels() { return scratch_.floats(kBlockN * dims_); }
  float* key_panel(float* panels, int64_t c) const { return panels + c * dims_; }

  Slot* make_slots(int64_t count) {
    Slot* const slots = scratch_.of<Slot>(count);
    for (int64_t n = 0; n < count; ++n) {
      Slot& slot = slots[n];
      slot.q = query_panels(dims_);
      slot.e = query_panels(max64(terms_capacity(p_.D, kNearRule), terms_capacity(p_.D, kFarRule)));
      slot.w = scratch_.floats(p_.D);
      slot.near = make_terms(scratch_, p_.D, kNearRule);
      slot.far = make_terms(scratch_, p_.D, kFarRule);
      slot.rows = 0, slot.head = -1, slot.prepared = kNothing;
      fill(slot.q, kBlockM * dims_, 0.f);  // the loops also read rows past the last query
    }
    return slots;
  }

  // A panel as a matrix whose rows are dims.
  Matrix dense(float* panel, int64_t stride, int64_t cols) const {
    return {panel, DType::kFloat32, 0, stride, 1, p_.D, cols};
  }

  // ---- weights ----

  void select_head(int64_t h) {
    if (h == slot_->head) return;
    slot_->head = h;
    pack_rows(matrix_at(p_.w, 0, h, 0, 1, p_.D), 1.f, slot_->w, p_.D);
    slot_->near.all = slot_->far.all = 0;
  }

  // The terms for the range of the current keys. Lists them at the first use.
  Terms& terms() const {
    Terms& terms = range_ == Range::kNear ? slot_->near : slot_->far;
    if (terms.all == 0) list_terms(slot_->w, p_.D, rule(), terms);
    return terms;
  }

  // ---- keys ----

  // Packs the keys themselves. exponentiate_keys() may then turn them into F.
  void pack_keys() {
    for (int64_t c = 0; c < cols_; c += kWidth) {
      Matrix from = from_;
      from.offset += c * from.stride_r;
      from.rows = min64(kWidth, cols_ - c);
      float* const panel = key_panel(keys_, c);
      pack_transposed(from, 1.f, panel, kWidth);
      fill(panel + p_.D * kWidth, (dims_ - p_.D) * kWidth, 0.f);
    }
  }

  void choose_range(const MaskTile& mask) {
    bool same = is_chosen_;
    for (int64_t c = 0; c < cols_; ++c) {
      const int32_t kept = mask.keeps_key(c) ? -1 : 0;
      same &= kept_[c] == kept;
      kept_[c] = kept;
    }
    if (same) return;
    if (is_chosen_) pack_keys();
    is_chosen_ = true;
    const float largest = largest_key();
    use_range(range_of(largest));
    if (range_ == Range::kExact && largest < kInf) use_centre();
  }

  void use_range(Range range) {
    fill(centre_, dims_, 0.f);
    set_range(range, static_cast<int64_t>(range));
  }

  // Avoids the exponential per pair, if the kept keys are near a centre of their own.
  void use_centre() {
    const Range range = range_of(find_centre());
    if (range != Range::kExact) set_range(range, kCentred + centres_++);
  }

  void set_range(Range range, int64_t wanted) {
    range_ = range, wanted_ = wanted;
    if (range != Range::kExact) exponentiate_keys();
  }

  // The range for keys at most `distance` from their centre. If `distance` is NaN: kExact.
  static Range range_of(float distance) {
    if (distance <= kNearRule.key_limit) return Range::kNear;
    return distance <= kFarRule.key_limit ? Range::kFar : Range::kExact;
  }

  const RangeRule& rule() const { return range_ == Range::kNear ? kNearRule : kFarRule; }

  // Calls f with the range of the current keys as a compile-time constant.
  template <typename F>
  FASTATTN_MEMBER void with_range(F f) const {
    switch (range_) {
      case Range::kNear:
        return f(std::integral_constant<Range, Range::kNear>{});
      case Range::kFar:
        return f(std::integral_constant<Range, Range::kFar>{});
      case Range::kExact:
        return f(std::integral_constant<Range, Range::kExact>{});
    }
  }

  // The largest |k| of the kept keys: NaN if one is NaN, else infinity if one is infinite. Absolute
  // values are compared as integers. As integers, infinity exceeds every number, and NaN infinity.
  float largest_key() const {
    VecI largest{};
    for (int64_t c = 0; c < cols_; c += kWidth) {
      const VecI kept = load_lanes<VecI>(kept_ + c);
      for (int64_t d = 0; d < p_.D; ++d) {
        const VecI size = bits_of(abs(load(key_panel(keys_, c) + d * kWidth))) & kept;
        largest = size > largest ? size : largest;
      }
    }
    return max_lanes(from_bits(largest));
  }

  // Sets the centre of every dim to the middle of the kept keys. Returns the largest distance of a
  // kept key from its centre.
  float find_centre() {
    float largest = 0.f;
    for (int64_t d = 0; d < p_.D; ++d) {
      float low = kInf, high = -kInf;
      for (int64_t j = 0; j < cols_; ++j) {
        if (!kept_[j]) continue;
        const float k = key_panel(keys_, j / kWidth * kWidth)[d * kWidth + j % kWidth];
        low = k < low ? k : low;
        high = k > high ? k : high;
      }
      centre_[d] = 0.5f * low + 0.5f * high;
      const float distance = 0.5f * high - 0.5f * low;
      largest = distance > largest ? distance : largest;
    }
    return largest;
  }

  // Turns the packed keys into F. The clamp changes only values that no row uses. One kind is keys
  // that no row keeps: NaN becomes the limit. The other kind is the zeros past the last key, which
  // may be far from the centre.
  void exponentiate_keys() {
    const Vec limit = splat(rule().key_limit);
    for (int64_t c = 0; c < cols_; c += kWidth) {
      float* const panel = key_panel(keys_, c);
      for (int64_t d = 0; d < dims_; ++d) {
        const Vec k = load(panel + d * kWidth) - centre_[d];
        store(panel + d * kWidth, exp(max(min(k, limit), -limit) * 2.f));
      }
    }
  }

  // ---- queries ----

  // Computes `e` for the current keys, unless `e` is up to date.
  void prepare_queries() {
    if (slot_->prepared == wanted_) return;
    slot_->prepared = wanted_;
    const bool exact = range_ == Range::kExact;
    for (int64_t i = 0; i < slot_->rows; i += kPanelRows) {
      const float* const factors =
          exact ? slot_->q + i * dims_ : exponentiate_queries(slot_->q + i * dims_);
      order_by_terms(factors, slot_->e + i * terms().all);
      if (backward_) drop_nan(factors, gradient_e_ + i * dims_);
    }
  }

  const float* exponentiate_queries(const float* q) {
    const Vec limit = splat(kSaturation + rule().key_limit);
    for (int64_t d = 0; d < dims_; ++d)
      for (int64_t n = d * kPanelRows; n < (d + 1) * kPanelRows; n += kWidth) {
        const Vec x = min(limit, load(q + n) + centre_[d]);  // NaN passes
        store(factors_ + n, exp(x * 2.f));
      }
    return factors_;
  }

  // Scores count factors below this as 0. If the range is exact, no factor is below.
  Vec least() const { return splat(range_ == Range::kExact ? -kInf : rule().least()); }

  void order_by_terms(const float* factors, float* e) const {
    const Terms& terms = this->terms();
    const Vec least = this->least();
    for (int64_t n = 0; n < terms.all; ++n) {
      const float unit = range_ == Range::kExact ? 1.f : terms.unit[n];
      for (int64_t r = 0; r < kPanelRows; r += kWidth) {
        const Vec x = load(factors + terms.dim[n] * kPanelRows + r);
        store(e + n * kPanelRows + r, (x < least ? Vec{} : x) * unit);  // NaN passes
      }
    }
  }

  void drop_nan(const float* factors, float* to) const {
    const float unit = grad_unit();
    const Vec least = this->least() * kGradLeast;
    for (int64_t n = 0; n < dims_ * kPanelRows; n += kWidth) {
      const Vec x = load(factors + n);
      store(to + n, x >= least ? x * unit : Vec{});
    }
  }

  // ---- tiles ----

  template <typename Listed>
  void score_panels(float* s, Listed columns_of) {
    prepare_queries();
    with_range([&](auto range) {
      for (int64_t i = 0; i < slot_->rows; i += kPanelRows)
        score_panel<range>(i, columns_of(i), s + i * kBlockN);
    });
  }

  template <Range kRange>
  void score_panel(int64_t i, Columns columns, float* s) const {
    const Terms& terms = this->terms();
    const float* const e = slot_->e + i * terms.all;
    const KeyPanels keys = {keys_, dims_ * kWidth};
    in_row_blocks<8>(min64(kPanelRows, slot_->rows - i), [&](int64_t r, auto count) {
      score_rows<kRange, count>(terms, e + r, keys, columns, s + r * kBlockN, kBlockN);
    });
  }

  float grad_unit() const {
    return range_ == Range::kFar ? kGradUnit<Range::kFar> : kGradUnit<Range::kNear>;
  }

  // Gradients of dims d and d + 1, without their factor 4 w. Sets sums[n] to
  // sum_ij dS_ij tanh_ij / 2.
  template <Range kRange>
  __attribute__((noinline)) void gradient_dims(int64_t d, const float* ds, float* sums) {
    const auto dim = [&](int64_t n) -> GradDim {
      return {gradient_e_ + n * kPanelRows, keys_ + n * kWidth, query_grad_ + n * kPanelRows,
              tile_key_grad_ + n * kWidth, Vec{}};
    };
    GradDim dims[2] = {dim(d), dim(d + 1)};
    int64_t i = 0;
    const auto take = [&](auto rows) {
      gradient_sums<kRange, rows>(dims, dims_ * kWidth, ds + i * kBlockN, kBlockN, cols_);
      i += rows;
      const int64_t step = rows + (i % kPanelRows == 0 ? (dims_ - 1) * kPanelRows : 0);
      for (GradDim& n : dims) n.e += step, n.grad_e += step;
    };
    while (slot_->rows - i >= kGradRows) take(std::integral_constant<int, kGradRows>{});
    while (slot_->rows > i) take(std::integral_constant<int, 1>{});
    for (int n = 0; n < 2; ++n) sums[n] = sum_lanes(dims[n].weight);
  }

  void add_query_grad(int64_t i, float* grad_q, int64_t stride) {
    const int64_t rows = min64(kPanelRows, slot_->rows - i);
    pack_transposed(dense(query_grad_ + i * dims_, kPanelRows, rows), 4.f / grad_unit(), rows_out_,
                    ld_);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < p_.D; ++d)
        grad_q[r * stride + d] += rows_out_[r * ld_ + d] * slot_->w[d];
  }

  // Multiplies the key gradients of a tile by the weights of its head, and adds them to key_grad_.
  void add_key_grad() {
    const double unit = 4. / static_cast<double>(grad_unit());
    for (int64_t c = 0; c < cols_; c += kWidth) {
      float* from = key_panel(tile_key_grad_, c);
      double* to = key_grad_ + c * dims_;
      for (int64_t d = 0; d < p_.D; ++d, from += kWidth, to += kWidth) {
        add_to_sums(from, kWidth, unit * static_cast<double>(slot_->w[d]), to);
        store(from, Vec{});
      }
    }
  }

  const AttentionParams& p_;
  Scratch& scratch_;
  bool backward_;
  int64_t dims_;  // of panels: D and one for padding terms, rounded up to even
  int64_t ld_;
  float* keys_;
  int32_t* kept_;   // -1 where some row keeps the key, or before choose_range(); else 0
  int32_t* every_;  // the first columns of all vectors
  float *centre_, *factors_;
  Slot *slots_, *slot_;
  Matrix from_{};
  int64_t cols_ = 0, centres_ = 0;
  bool all_near_ = false, is_chosen_ = false;  // of the loaded keys; choose_range() has run
  Range range_ = Range::kFar;
  int64_t wanted_ = kNothing;  // see Slot::prepared
  float *gradient_e_ = nullptr, *query_grad_ = nullptr, *tile_key_grad_ = nullptr;
  double* key_grad_ = nullptr;
  float* rows_out_ = nullptr;
};

}  // namespace fastattn::FASTATTN_ISA
