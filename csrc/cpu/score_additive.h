// The additive (Bahdanau) score: s_ij = sum_d w_d tanh(q_id + k_jd), exact, with no tanh in the loop over pairs:
//
//   tanh(q + k) = 1 - 2 u      u = 1 / (1 + E F)      E = e^(2 (q + c))      F = e^(2 (k - c))
//
// E costs an exponential an element of a query block, F one of a key tile; a pair costs a share of a division
// (additive_tile.h has the loops, their cost and the proof of their ranges). The centre c_d is 0 unless the keys of a
// tile need another: their values then lie around something else, and queries around its negative.
//
// Gradients, with dS in natural units and t = u (1 - u) = (1 - tanh^2) / 4:
//   dq_id = 4 w_d sum_j dS_ij t_ijd      dk_jd = 4 w_d sum_i dS_ij t_ijd      dw_d = sum_ij dS_ij (1 - 2 u_ijd)
//
// Nothing of size M N D exists, nothing is saved: u is recomputed from E and F.
// Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and translate", 2015.
#pragma once

#include "common/mask.h"
#include "cpu/additive_tile.h"
#include "cpu/pack.h"
#include "cpu/score.h"

namespace fastattn::FASTATTN_ISA {

class AdditiveScore {
 public:
  // A tile of scores and one of dS fit the L1 cache each; an exponential of a key then serves 64 pairs.
  static constexpr int64_t kBlockM = 64;
  static constexpr int64_t kBlockN = kWidth == 16 ? 128 : 64;

  AdditiveScore(const AttentionParams& p, Scratch& scratch, bool backward)
      : p_(p),
        backward_(backward),
        dims_(round_up(p.D + 1, 2)),
        ld_(tile_stride(p.D)),
        q_(query_panels(scratch, dims_)),
        e_(query_panels(scratch, terms_capacity(p.D))),
        keys_(key_panels(scratch)),
        centre_(scratch.floats(dims_)),
        w_(scratch.floats(dims_)) {
    terms_.dim = scratch.ints(terms_capacity(p.D));
    terms_.weight = scratch.floats(terms_capacity(p.D));
    terms_.unit = scratch.floats(terms_capacity(p.D));
    terms_.half = scratch.floats(terms_capacity(p.D));
    fill(q_, kBlockM * dims_, 0.f);  // rows past the last query are computed with, too
    if (!backward) return;
    gradient_e_ = query_panels(scratch, dims_);
    query_grad_ = query_panels(scratch, dims_);
    head_key_grad_ = key_panels(scratch);
    key_grad_ = key_panels(scratch);
    rows_out_ = scratch.floats(kPanelRows * ld_);
    ds_tail_ = scratch.floats(kGradRows * kBlockN);
    reciprocals_ = scratch.floats(kGradVecs * kGradRows * kBlockN);
  }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    ++loaded_keys_;
    bool finite = true;
    for (int64_t c = 0; c < cols; c += kWidth) {
      float* const panel = key_panel(keys_, c);
      finite &= pack_transposed(matrix_at(p_.k, b, hkv, j0 + c, min64(kWidth, cols - c), p_.D), 1.f, panel, kWidth);
      fill(panel + p_.D * kWidth, (dims_ - p_.D) * kWidth, 0.f);
    }
    choose_range(finite);
    with_range([&](auto range) { exponentiate_keys<decltype(range)>(); });
  }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    rows_ = rows;
    select_head(h);
    for (int64_t i = 0; i < rows; i += kPanelRows) {
      float* const panel = query_panel(q_, dims_, i);
      pack_transposed(matrix_at(p_.q, b, h, i0 + i, min64(kPanelRows, rows - i), p_.D), 1.f, panel, kPanelRows);
      fill(panel + p_.D * kPanelRows, (dims_ - p_.D) * kPanelRows, kNoTerm);
    }
    prepared_ = {};
  }

  void scores(float* s) {
    with_range([&](auto range) {
      prepare<decltype(range)>();
      for (int64_t i = 0; i < rows_; i += kPanelRows) score_panel<decltype(range)>(i, s + i * kBlockN);
    });
  }
  float row_constant(int64_t) const { return 0.f; }

  void clear_key_grad() {
    fill(head_key_grad_, kBlockN * dims_, 0.f);
    fill(key_grad_, kBlockN * dims_, 0.f);
    head_pending_ = false;
  }

  // After scores() of the same tile. `masked` needs no care: what is NaN has its place in dS, and u is always finite.
  void backward(const float* ds, bool, float* grad_q, int64_t grad_q_stride, float* grad_w) {
    const int64_t whole = rows_ / kGradRows * kGradRows;
    for (int64_t i = 0; i < rows_ - whole; ++i)
      std::memcpy(ds_tail_ + i * kBlockN, ds + (whole + i) * kBlockN, kBlockN * sizeof(float));
    fill(ds_tail_ + (rows_ - whole) * kBlockN, (kGradRows - (rows_ - whole)) * kBlockN, 0.f);
    const float ds_sum = sum_tile(ds);
    head_pending_ = true;
    with_range([&](auto range) {
      for (int64_t d = 0; d < p_.D; d += 2) {
        float sums[2];
        gradient_dims<decltype(range)>(d, ds, sums);
        for (int64_t n = 0; n < min64(2, p_.D - d); ++n) grad_w[d + n] += ds_sum - 2.f * sums[n];
      }
    });
    for (int64_t i = 0; i < rows_; i += kPanelRows) add_query_grad(i, grad_q + i * grad_q_stride, grad_q_stride);
  }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    finish_head();
    for (int64_t c = 0; c < cols_; c += kWidth) {
      const int64_t cols = min64(kWidth, cols_ - c);
      pack_transposed(dense(key_panel(key_grad_, c), kWidth, cols), 1.f, rows_out_, ld_);
      unpack_rows(rows_out_, ld_, 1.f, nullptr, matrix_at(grad_k, b, hkv, j0 + c, cols, p_.D));
    }
  }

 private:
  enum class Range { kNear, kFar, kAny };
  // For which tile of keys e_ has been computed. Tiles with the centre 0 are all one.
  struct Prepared {
    bool valid = false;
    Range range = Range::kNear;
    int64_t centred_keys = 0;
  };
  static constexpr float kNoTerm = -50.f;  // as a query: tanh is -1, the term a constant

  static int64_t terms_capacity(int64_t D) { return round_up(D, 4) + 4 * Terms::kMaxSegments; }
  static float* query_panels(Scratch& scratch, int64_t depth) { return scratch.floats(kBlockM * depth); }
  float* key_panels(Scratch& scratch) const { return scratch.floats(kBlockN * dims_); }
  static float* query_panel(float* panels, int64_t depth, int64_t i) { return panels + i * depth; }
  float* key_panel(float* panels, int64_t c) const { return panels + c * dims_; }

  // The dims of a panel.
  Matrix dense(float* panel, int64_t stride, int64_t cols) const {
    return {panel, DType::kFloat32, 0, stride, 1, p_.D, cols};
  }

  template <typename F>
  void with_range(F f) {
    switch (range_) {
      case Range::kNear:
        return f(NearRange{});
      case Range::kFar:
        return f(FarRange{});
      case Range::kAny:
        return f(AnyRange{});
    }
  }

  // ---- weights ----

  void select_head(int64_t h) {
    if (h == head_) return;
    finish_head();
    head_ = h;
    pack_rows(matrix_at(p_.w, 0, h, 0, 1, p_.D), 1.f, w_, dims_);
    list_terms();
  }

  void list_terms() {
    float largest = 0.f;
    bool finite = true;
    for (int64_t d = 0; d < p_.D; ++d) {
      const float size = __builtin_fabsf(w_[d]);
      finite &= size < kInf;
      largest = size > largest ? size : largest;
    }
    int exponent = 0;
    if (finite) __builtin_frexpf(largest, &exponent);
    // Weights that are not finite make every score NaN.
    terms_.scale = finite ? 2.f * kLog2e * __builtin_ldexpf(largest > 0.f, exponent) : __builtin_nanf("");
    terms_.segments = 0;
    int64_t count = 0;
    int last_level = 0;
    for (int level = Terms::kMaxSegments - 1; level >= 0; --level) {
      const int64_t begin = count;
      for (int64_t d = 0; d < p_.D; ++d) {
        const float weight = finite ? __builtin_ldexpf(w_[d], -exponent) : 1.f;
        if (level_of(weight) == level) add_term(count++, d, level_weight(weight, level));
      }
      if (count == begin) continue;
      while (count % 4 != 0) add_term(count++, p_.D, 0x1p-8f);
      const float rescale = __builtin_ldexpf(1.f, kWeightBits * (level - last_level));
      terms_.segment[terms_.segments++] = {count, begin == 0 ? 1.f : rescale};
      last_level = level;
    }
    terms_.scale = __builtin_ldexpf(terms_.scale, -kWeightBits * last_level);
    num_terms_ = count;
  }

  void add_term(int64_t n, int64_t d, float weight) {
    terms_.dim[n] = static_cast<int32_t>(d);
    terms_.weight[n] = weight;
  }

  // Of a weight relative to a power of two above the largest.
  static int level_of(float weight) {
    int exponent = 0;
    __builtin_frexpf(weight, &exponent);
    const int level = weight == 0.f ? Terms::kMaxSegments : -exponent / kWeightBits;
    return level < Terms::kMaxSegments ? level : Terms::kMaxSegments - 1;
  }
  // Weights below 2^-40 of the largest count as that: 0 must not lose the NaN that its dim may hold.
  static float level_weight(float weight, int level) {
    const float scaled = __builtin_ldexpf(weight, kWeightBits * level);
    return __builtin_fabsf(scaled) >= 0x1p-8f ? scaled : __builtin_copysignf(0x1p-8f, scaled);
  }

  // ---- ranges ----

  // A function of the keys of this tile alone: a row's result must not depend on its neighbours.
  void choose_range(bool finite) {
    fill(centre_, dims_, 0.f);
    centred_ = false;
    range_ = Range::kAny;
    if (!finite) return;
    const float reach = largest_key();
    if (reach <= NearRange::kLimit) return void(range_ = Range::kNear);
    const float half_range = find_centre();
    if (half_range > FarRange::kLimit) return;
    range_ = half_range <= NearRange::kLimit ? Range::kNear : Range::kFar;
    centred_ = range_ == Range::kNear || reach > FarRange::kLimit;
    if (!centred_) fill(centre_, dims_, 0.f);
  }

  float largest_key() {
    Vec largest{};
    for (int64_t c = 0; c < cols_; c += kWidth)
      for (int64_t d = 0; d < p_.D; ++d) largest = max(largest, abs(load(key_panel(keys_, c) + d * kWidth)));
    return max_lanes(largest);
  }

  // Centres every dim on the keys of the tile; returns the largest distance of a key from it.
  float find_centre() {
    float largest = 0.f;
    for (int64_t d = 0; d < p_.D; ++d) {
      float low = kInf, high = -kInf;
      for (int64_t j = 0; j < cols_; ++j) {
        const float k = key_panel(keys_, j / kWidth * kWidth)[d * kWidth + j % kWidth];
        low = k < low ? k : low;
        high = k > high ? k : high;
      }
      centre_[d] = 0.5f * low + 0.5f * high;
      const float reach = high - centre_[d] > centre_[d] - low ? high - centre_[d] : centre_[d] - low;
      largest = reach > largest ? reach : largest;
    }
    return largest;
  }

  // The clamp is for the zeros past the last key: c need not be near 0.
  template <typename R>
  void exponentiate_keys() {
    if constexpr (!R::kExact) {
      for (int64_t c = 0; c < cols_; c += kWidth) {
        float* const panel = key_panel(keys_, c);
        for (int64_t d = 0; d < dims_; ++d) {
          const Vec k = load(panel + d * kWidth) - centre_[d];
          store(panel + d * kWidth, exp(max(min(k, splat(R::kLimit)), splat(-R::kLimit)) * 2.f));
        }
      }
    }
  }

  // ---- queries ----

  // Turns the queries into c E, in the order of the terms, for the range and the centre of the current keys.
  template <typename R>
  void prepare() {
    const int64_t centred_keys = centred_ ? loaded_keys_ : 0;
    if (prepared_.valid && prepared_.range == range_ && prepared_.centred_keys == centred_keys) return;
    prepared_ = {true, range_, centred_keys};
    constexpr int kShare = R::kShare;
    for (int64_t n = 0; n < num_terms_; ++n) terms_.unit[n] = unit_of<R>() / terms_.weight[n];
    for (int64_t n = 0; n < num_terms_; n += kShare) {
      float sum = 0.f;
      for (int64_t t = n; t < n + kShare; ++t) sum += terms_.dim[t] == p_.D ? 2.f * terms_.weight[t] : terms_.weight[t];
      terms_.half[n / kShare] = 0.5f * sum / unit_of<R>();
    }
    for (int64_t i = 0; i < rows_; i += kPanelRows) {
      const float* const q = query_panel(q_, dims_, i);
      float* const e = query_panel(e_, num_terms_, i);
      for (int64_t n = 0; n < num_terms_; ++n) {
        const int64_t d = terms_.dim[n];
        for (int64_t r = 0; r < kPanelRows; r += kWidth)
          store(e + n * kPanelRows + r, query_factor<R>(load(q + d * kPanelRows + r), centre_[d], terms_.unit[n]));
      }
      if (!backward_) continue;
      float* const g = query_panel(gradient_e_, dims_, i);
      for (int64_t d = 0; d < dims_; ++d)
        for (int64_t r = 0; r < kPanelRows; r += kWidth) {
          const Vec factor = query_factor<R>(load(q + d * kPanelRows + r), centre_[d], kGradUnit);
          store(g + d * kPanelRows + r, factor == factor ? factor : Vec{});
        }
    }
  }

  template <typename R>
  FASTATTN_MEMBER static Vec query_factor(Vec q, float centre, float unit) {
    if constexpr (R::kExact) {
      return q;
    } else {
      const Vec clamped = min(splat(kSaturation + R::kLimit), q + centre);
      return exp(clamped * 2.f) * unit;
    }
  }

  // ---- tiles ----

  template <typename R>
  void score_panel(int64_t i, float* s) {
    const float* const e = query_panel(e_, num_terms_, i);
    const KeyPanels keys = {keys_, dims_ * kWidth};
    const int64_t rows = min64(kPanelRows, rows_ - i);
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) score_rows<R, 8>(terms_, e + r, keys, cols_, s + r * kBlockN, kBlockN);
    if (rows & 4) score_rows<R, 4>(terms_, e + r, keys, cols_, s + r * kBlockN, kBlockN), r += 4;
    if (rows & 2) score_rows<R, 2>(terms_, e + r, keys, cols_, s + r * kBlockN, kBlockN), r += 2;
    if (rows & 1) score_rows<R, 1>(terms_, e + r, keys, cols_, s + r * kBlockN, kBlockN);
  }

  // Dims d and d + 1; sums[n] = sum_ij dS_ij u_ij.
  template <typename R>
  __attribute__((noinline)) void gradient_dims(int64_t d, const float* ds, float* sums) {
    const KeyPanels keys = {keys_ + d * kWidth, dims_ * kWidth};
    Vec weight[2] = {};
    for (int64_t i = 0; i < rows_; i += kGradRows) {
      const float* const from = i + kGradRows <= rows_ ? ds + i * kBlockN : ds_tail_;
      const int64_t at = i / kPanelRows * kPanelRows * dims_ + d * kPanelRows + i % kPanelRows;
      gradient_reciprocals<R>(gradient_e_ + at, keys, cols_, reciprocals_);
      const Vec query =
          gradient_sums(reciprocals_, from, kBlockN, cols_, head_key_grad_ + d * kWidth, keys.stride, weight);
      float lanes[kWidth];
      store(lanes, query);
      std::memcpy(query_grad_ + at, lanes, sizeof(lanes) / 2);
      std::memcpy(query_grad_ + at + kPanelRows, lanes + kGradRows, sizeof(lanes) / 2);
    }
    sums[0] = kGradUnit * sum_lanes(weight[0]);
    sums[1] = kGradUnit * sum_lanes(weight[1]);
  }

  float sum_tile(const float* ds) const {
    Vec sum{};
    for (int64_t i = 0; i < rows_; ++i)
      for (int64_t c = 0; c < cols_; c += kWidth) sum += load(ds + i * kBlockN + c);
    return sum_lanes(sum);
  }

  void add_query_grad(int64_t i, float* grad_q, int64_t stride) {
    const int64_t rows = min64(kPanelRows, rows_ - i);
    pack_transposed(dense(query_panel(query_grad_, dims_, i), kPanelRows, rows), 4.f * kGradUnit, rows_out_, ld_);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < p_.D; ++d) grad_q[r * stride + d] += rows_out_[r * ld_ + d] * w_[d];
  }

  // The weights of a head multiply what it has added to the key gradients.
  void finish_head() {
    if (!head_pending_) return;
    head_pending_ = false;
    for (int64_t c = 0; c < cols_; c += kWidth)
      for (int64_t d = 0; d < p_.D; ++d) {
        float* const from = key_panel(head_key_grad_, c) + d * kWidth;
        float* const to = key_panel(key_grad_, c) + d * kWidth;
        store(to, load(to) + load(from) * (4.f * kGradUnit) * w_[d]);
        store(from, Vec{});
      }
  }

  const AttentionParams& p_;
  bool backward_;
  int64_t dims_;  // of panels: D, then a dim of no terms, which pads fractions; even
  int64_t ld_;
  float *q_, *e_, *keys_, *centre_, *w_;
  Terms terms_{};
  int64_t num_terms_ = 0, head_ = -1;
  int64_t rows_ = 0, cols_ = 0, loaded_keys_ = 0;
  Range range_ = Range::kNear;
  bool centred_ = false, head_pending_ = false;
  Prepared prepared_;
  float *gradient_e_ = nullptr, *query_grad_ = nullptr, *head_key_grad_ = nullptr, *key_grad_ = nullptr;
  float *rows_out_ = nullptr, *ds_tail_ = nullptr, *reciprocals_ = nullptr;
};

}  // namespace fastattn::FASTATTN_ISA
