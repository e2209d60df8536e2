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

  // Zeroes what the task (group, chunk), which owns keys [begin, end), will add to.
  void clear(int64_t group, int64_t chunk, int64_t begin, int64_t end) {
    if (!wanted_) return;
    const BackwardPlan& plan = args_.plan;
    const int64_t batches = p_.bias_B / plan.groups_b, heads = p_.bias_H / plan.groups_h;
    const int64_t b0 = group / plan.groups_h * batches, h0 = group % plan.groups_h * heads;
    for (int64_t b = b0; b < b0 + batches; ++b)
      for (int64_t h = h0; h < h0 + heads; ++h)
        unpack_zeros(p_.bias_N == 1 ? target(b, h, chunk, 0, p_.bias_M, 0, 1)
                                    : target(b, h, chunk, 0, p_.bias_M, begin, end - begin));
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

  // Sums over chunks and converts to the gradient's dtype.
  static void write(const BackwardArgs& args) {
    const BackwardParams& p = args.p;
    const int64_t chunks = p.bias_N == 1 ? args.plan.chunks : 1,
                  size = p.bias_B * p.bias_H * p.bias_M * p.bias_N;
    float* const sum = args.workspace(args.plan.grad_bias);
    for (int64_t chunk = 1; chunk < chunks; ++chunk)
      for (int64_t n = 0; n < size; ++n) sum[n] += sum[chunk * size + n];
    for (int64_t b = 0; b < p.bias_B; ++b)
      for (int64_t h = 0; h < p.bias_H; ++h)
        unpack_dense(sum + (b * p.bias_H + h) * p.bias_M * p.bias_N,
                     matrix_at(p.grad_bias, b, h, 0, p.bias_M, p.bias_N));
  }

 private:
  static constexpr int64_t kRowCapacity = 1024;  // more than any kBlockN

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

}  // namespace fastattn::FASTATTN_ISA
