// The gradient of the bias: dS, summed over the dims that the bias was broadcast over, in fp32.
// Accumulated in the gradient itself where that is fp32, else in the workspace; a bias broadcast
// over keys gets one sum per chunk of keys.
#pragma once

#include "cpu/delta.h"

namespace fastattn::FASTATTN_ISA {

class BiasGrad {
 public:
  BiasGrad(const BackwardArgs& args, Scratch& scratch)
      : args_(args),
        p_(args.p),
        wanted_(p_.grad_bias.data != nullptr),
        row_(scratch.floats(kRowCapacity)) {}

  // Zeroes what the task (group, chunk) will add to for keys [j0, j0 + cols), just before it does:
  // then it is in the cache.
  void clear_keys(int64_t group, int64_t chunk, int64_t j0, int64_t cols) {
    if (wanted_ && p_.bias_N > 1) clear(group, chunk, j0, cols);
  }
  // Likewise where it has one sum for all its keys, of which there may be none.
  void clear_sums(int64_t group, int64_t chunk) {
    if (wanted_ && p_.bias_N == 1) clear(group, chunk, 0, 1);
  }

  // Adds a tile of dS [rows, ld].
  void add(const TilePlace& at, int64_t chunk, const float* ds, int64_t ld) {
    if (!wanted_) return;
    const int64_t b = p_.bias_B == 1 ? 0 : at.b, h = p_.bias_H == 1 ? 0 : at.h;
    const bool sum_rows = p_.bias_M == 1, sum_cols = p_.bias_N == 1;
    const Matrix to = target(b, h, chunk, sum_rows ? 0 : at.i0, sum_rows ? 1 : at.rows,
                             sum_cols ? 0 : at.j0, sum_cols ? 1 : at.cols);
    if (!sum_rows) {
      for (int64_t i = 0; i < at.rows; ++i) add_row(ds + i * ld, at.cols, sum_cols, to, i);
      return;
    }
    for (int64_t c = 0; c < at.cols; c += kWidth) {
      Vec sum{};
      for (int64_t i = 0; i < at.rows; ++i) sum += load(ds + i * ld + c);
      store(row_ + c, sum);
    }
    add_row(row_, at.cols, sum_cols, to, 0);
  }

 private:
  static constexpr int64_t kRowCapacity = 1024;  // more than any kBlockN

  void clear(int64_t group, int64_t chunk, int64_t c0, int64_t cols) {
    const BackwardPlan& plan = args_.plan;
    const int64_t batches = p_.bias_B / plan.groups_b, heads = p_.bias_H / plan.groups_h;
    const int64_t b0 = group / plan.groups_h * batches, h0 = group % plan.groups_h * heads;
    for (int64_t b = b0; b < b0 + batches; ++b)
      for (int64_t h = h0; h < h0 + heads; ++h)
        unpack_zeros(target(b, h, chunk, 0, p_.bias_M, c0, cols));
  }

  // rows x cols of the fp32 sums, from (r0, c0).
  Matrix target(int64_t b, int64_t h, int64_t chunk, int64_t r0, int64_t rows, int64_t c0,
                int64_t cols) const {
    View view = p_.grad_bias;
    if (!args_.plan.bias_direct) {
      const int64_t N = p_.bias_N, M = p_.bias_M, size = p_.bias_B * p_.bias_H * M * N;
      float* const base = args_.workspace(args_.plan.grad_bias) + (N == 1 ? chunk * size : 0);
      view = {base, DType::kFloat32, p_.bias_H * M * N, M * N, N, 1};
    }
    Matrix out = matrix_at(view, b, h, r0, rows, cols);
    out.offset += c0 * out.stride_c;
    return out;
  }

  static void add_row(const float* from, int64_t cols, bool sum_cols, const Matrix& to, int64_t r) {
    float* const out = static_cast<float*>(to.data) + to.offset + r * to.stride_r;
    if (sum_cols) {
      Vec sum{};
      for (int64_t c = 0; c < cols; c += kWidth) sum += load(from + c);  // padding is 0
      out[0] += sum_lanes(sum);
    } else if (to.stride_c == 1) {
      for (int64_t c = 0; c < cols; ++c) out[c] += from[c];
    } else {
      for (int64_t c = 0; c < cols; ++c) out[c * to.stride_c] += from[c];
    }
  }

  const BackwardArgs& args_;
  const BackwardParams& p_;
  bool wanted_;
  float* row_;
};

// Sums over chunks and converts to the gradient's dtype, some rows of one (b, h) of the bias a
// task.
class BiasGradWriter {
 public:
  explicit BiasGradWriter(const BackwardArgs& args) : args_(args), p_(args.p) {}

  static int64_t tasks(const BackwardParams& p) {
    return p.bias_B * p.bias_H * ceil_div(p.bias_M, kRows);
  }

  void run(int64_t task) {
    const int64_t blocks = ceil_div(p_.bias_M, kRows), bh = task / blocks;
    const int64_t i0 = task % blocks * kRows, rows = min64(kRows, p_.bias_M - i0);
    const int64_t chunks = p_.bias_N == 1 ? args_.plan.chunks : 1, count = rows * p_.bias_N;
    const int64_t size = p_.bias_B * p_.bias_H * p_.bias_M * p_.bias_N;
    float* const sum = args_.workspace(args_.plan.grad_bias) + (bh * p_.bias_M + i0) * p_.bias_N;
    for (int64_t chunk = 1; chunk < chunks; ++chunk)
      for (int64_t n = 0; n < count; ++n) sum[n] += sum[chunk * size + n];
    unpack_dense(sum, matrix_at(p_.grad_bias, bh / p_.bias_H, bh % p_.bias_H, i0, rows, p_.bias_N));
  }

 private:
  static constexpr int64_t kRows = 64;

  const BackwardArgs& args_;
  const BackwardParams& p_;
};

}  // namespace fastattn::FASTATTN_ISA
