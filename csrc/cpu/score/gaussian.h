// The gaussian score: s_ij = -1/2 sum_d (q_id - k_jd)^2 / h_d^2, where h are the bandwidths. The
// square is not multiplied out, because its dot products would cancel where keys are close.
//
//   for 8 queries, kWidth keys        their 8 sums in registers
//     for dims                        a vector of keys and r in registers, shared by the queries
//       for 8 queries                 a difference, its product with r, an FMA
//
// Gradients, with x = q - k, g = dS x r and 1 / h_d^2 = c r_d^2:
//   dq_id = -c r_d sum_j g_ijd    dk_jd = c r_d sum_i g_ijd
//   dh_d = c r_d sum_ij g_ijd x_ijd / h_d
//
// problem/bandwidths.h says what r and c are. Each x is multiplied by its r before squaring, so no
// bandwidth leaves the range of floats. At a distance above 1e19 bandwidths, the score is -inf.
// Sums have two levels, because one sum over all dims loses digits. Watson, "Smooth regression
// analysis", 1964.
#pragma once

#include "cpu/base/pack.h"
#include "cpu/score/score.h"
#include "problem/bandwidths.h"

namespace fastattn::FASTATTN_ISA {

// As with the additive score, a tile of scores fits the L1 cache.
class GaussianScore : public FixedTile<64, kWidth == 16 ? 128 : 64> {
 public:
  GaussianScore(const AttentionParams& p, const Path&, Scratch& scratch, bool backward,
                int64_t slots = 1)
      : p_(p),
        slot_floats_(kBlockM * p.D + p.D),
        slots_(scratch.floats(slots * slot_floats_)),
        slot_rows_(scratch.ints(slots)),
        slot_factors_(scratch.floats(slots)),
        bandwidths_(scratch.floats(round_up(p.D, kWidth))),
        keys_(scratch.floats(kBlockN * p.D)) {
    if (!backward) return;
    query_grad_ = scratch.floats(kBlockM * p.D);
    tile_key_grad_ = scratch.floats(kBlockN * p.D);
    key_grad_ = scratch.of<double>(kBlockN * p.D);
    fill(tile_key_grad_, kBlockN * p.D, 0.f);
  }

  void load_keys(int64_t b, int64_t hkv, int64_t j0, int64_t cols) {
    cols_ = cols;
    for (int64_t c = 0; c < cols; c += kWidth) {
      const int64_t rows = min64(kWidth, cols - c);
      pack_transposed(matrix_at(p_.k, b, hkv, j0 + c, rows, p_.D), 1.f, keys_ + c * p_.D, kWidth);
    }
  }

  static int64_t query_bytes(const AttentionParams& p) { return 4 * p.D; }
  void use_slot(int64_t slot) { slot_ = slot; }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    slot_rows_[slot_] = static_cast<int32_t>(rows);
    load_bandwidths(b, h);
    for (int64_t i = 0; i < rows; i += kPanel) {
      const Matrix from = matrix_at(p_.q, b, h, i0 + i, min64(kPanel, rows - i), p_.D);
      pack_transposed(from, 1.f, queries() + i * p_.D, kPanel);
    }
  }

  void scores(float* s) const {
    for (int64_t i = 0; i < rows(); i += kPanel) {
      in_row_blocks<8>(min64(kPanel, rows() - i), [&](int64_t r, auto count) {
        score_rows<count>(queries() + i * p_.D + r, s + (i + r) * kBlockN);
      });
    }
  }

  void clear_key_grad() { zero_sums(key_grad_, round_up(cols_, kWidth) * p_.D); }

  // The mask is not used: difference() is 0 where dS is 0.
  void backward(const float* ds, const MaskTile&, float* grad_q, int64_t grad_q_stride,
                double* grad_w) {
    int64_t d = 0;
    for (; d + 2 <= p_.D; d += 2) gradient_dims<2>(d, ds, grad_w);
    if (d < p_.D) gradient_dims<1>(d, ds, grad_w);
    for (int64_t i = 0; i < rows(); ++i) {
      const float* const from = query_grad_ + i / kPanel * kPanel * p_.D + i % kPanel;
      for (d = 0; d < p_.D; ++d) grad_q[i * grad_q_stride + d] -= from[d * kPanel] * slope(d);
    }
    add_key_grad();
  }

  void store_key_grad(const View& grad_k, int64_t b, int64_t hkv, int64_t j0) {
    for (int64_t c = 0; c < cols_; c += kWidth) {
      const Matrix to = matrix_at(grad_k, b, hkv, j0 + c, min64(kWidth, cols_ - c), p_.D);
      float* const panel = keys_ + c * p_.D;  // of keys that are no longer needed
      round_sums(key_grad_ + c * p_.D, p_.D * kWidth, panel);
      unpack_rows(panel, kWidth, 1.f, nullptr, to.transposed());
    }
  }

 private:
  static constexpr int64_t kPanel = 16;      // queries of a panel [D][kPanel]
  static constexpr int64_t kBlockDims = 16;  // dims of one partial sum
  static constexpr int kGradRows = 4;

  int64_t rows() const { return slot_rows_[slot_]; }
  float* queries() const { return slots_ + slot_ * slot_floats_; }
  float* ratios() const { return queries() + kBlockM * p_.D; }  // r [D]
  float slope(int64_t d) const { return ratios()[d] * factor_; }

  void load_bandwidths(int64_t b, int64_t h) {
    pack_rows(matrix_at(p_.w, b, h, 0, 1, p_.D), 1.f, bandwidths_, 0);
    float least = kInf;
    for (int64_t d = 0; d < p_.D; ++d) {
      const float size = __builtin_fabsf(bandwidths_[d]);
      least = size < least ? size : least;
    }
    const Bandwidths all = bandwidths_of(static_cast<double>(least));
    for (int64_t d = 0; d < p_.D; ++d) ratios()[d] = ratio_of(all, bandwidths_[d]);
    factor_ = static_cast<float>(all.factor);
    slot_factors_[slot_] = static_cast<float>(-0.5 * kLog2eExact * all.factor);
  }

  // Writes s[r][0, cols) for kRows queries. `q` is the column of the first query in its panel.
  template <int kRows>
  __attribute__((noinline)) void score_rows(const float* q, float* s) const {
    const float* const ratio = ratios();
    const float factor = slot_factors_[slot_];
    for (int64_t c = 0; c < cols_; c += kWidth) {
      const float* const keys = keys_ + c * p_.D;
      Vec total[kRows] = {};
      for (int64_t d0 = 0; d0 < p_.D; d0 += kBlockDims) {
        Vec sum[kRows] = {};
        for (int64_t d = d0; d < min64(d0 + kBlockDims, p_.D); ++d) {
          const Vec key = load(keys + d * kWidth), to_unit = splat(ratio[d]);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const Vec distance = (splat(q[d * kPanel + r]) - key) * to_unit;
            sum[r] = multiply_add(distance, distance, sum[r]);
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) total[r] += sum[r];
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) store(s + r * kBlockN + c, total[r] * factor);
    }
  }

  // q - k, but 0 where dS is 0. A masked or infinitely distant key must not affect a gradient.
  FASTATTN_MEMBER static Vec difference(float q, Vec key, Vec ds) {
    return ds == Vec{} ? Vec{} : splat(q) - key;
  }

  // Adds a tile's key gradients to key_grad_.
  void add_key_grad() {
    float* from = tile_key_grad_;
    double* to = key_grad_;
    for (int64_t c = 0; c < cols_; c += kWidth)
      for (int64_t d = 0; d < p_.D; ++d, from += kWidth, to += kWidth) {
        add_to_sums(from, kWidth, static_cast<double>(slope(d)), to);
        store(from, Vec{});
      }
  }

  // Gradients of dims [d, d + kDims). Adds to tile_key_grad_ and grad_w, and writes query_grad_.
  template <int kDims>
  __attribute__((noinline)) void gradient_dims(int64_t d, const float* ds, double* grad_w) {
    Vec sums[kDims] = {};
    int64_t i = 0;
    const auto take = [&](auto rows) {
      gradient_rows<kDims, rows>(d, i, ds + i * kBlockN, sums);
      i += rows;
    };
    while (rows() - i >= kGradRows) take(std::integral_constant<int, kGradRows>{});
    while (rows() > i) take(std::integral_constant<int, 1>{});
    for (int n = 0; n < kDims; ++n)
      grad_w[d + n] += static_cast<double>(sum_lanes(sums[n]) * slope(d + n) / bandwidths_[d + n]);
  }

  // gradient_dims() for queries [i, i + kRows). Sums have two levels, and the sum over all
  // pairs has three.
  template <int kDims, int kRows>
  FASTATTN_MEMBER void gradient_rows(int64_t d, int64_t i, const float* ds, Vec (&sums)[kDims]) {
    const int64_t panel = i / kPanel * kPanel * p_.D + d * kPanel + i % kPanel;
    const float* const q = queries() + panel;
    const int64_t depth = p_.D, cols = cols_;  // copies: a store could change a member
    const float* const keys_of_dim = keys_ + d * kWidth;
    float* const grad_of_dim = tile_key_grad_ + d * kWidth;
    float ratio[kDims];
    for (int n = 0; n < kDims; ++n) ratio[n] = ratios()[d + n];
    Vec query[kDims][kRows] = {}, all[kDims] = {};
    for (int64_t c = 0; c < cols; c += kWidth) {
      const float* const keys = keys_of_dim + c * depth;
      Vec sum[kDims] = {}, grad[kDims] = {};
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Vec dsr = load(ds + r * kBlockN + c);
#pragma GCC unroll 2
        for (int n = 0; n < kDims; ++n) {
          const Vec x = difference(q[n * kPanel + r], load(keys + n * kWidth), dsr);
          const Vec g = dsr * (x * ratio[n]);
          query[n][r] += g;
          grad[n] += g;
          sum[n] += g * x;
        }
      }
#pragma GCC unroll 2
      for (int n = 0; n < kDims; ++n) {
        all[n] += sum[n];
        float* const to = grad_of_dim + c * depth + n * kWidth;
        store(to, load(to) + grad[n]);
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < kDims; ++n) {
      sums[n] += all[n];
      const Vec rows = sums_of<kRows>(query[n]);
      std::memcpy(query_grad_ + panel + n * kPanel, &rows, kRows * sizeof(float));
    }
  }

  const AttentionParams& p_;
  int64_t slot_floats_, slot_ = 0, cols_ = 0;
  float factor_ = 0.f;  // c, for the queries loaded last
  float* slots_;        // per slot: panels of queries, then r of the head
  int32_t* slot_rows_;
  float* slot_factors_;  // -c / 2, times log2(e)
  float* bandwidths_;    // h, for the queries loaded last
  float* keys_;          // a panel [D][kWidth] per kWidth keys
  // Panels. query_grad_ lacks the factor -c r, tile_key_grad_ lacks c r and is 0 between tiles.
  float *query_grad_ = nullptr, *tile_key_grad_ = nullptr;
  double* key_grad_ = nullptr;
};

}  // namespace fastattn::FASTATTN_ISA
