// The gradient of the bias: dS, summed over the dims over which the bias was broadcast, and for a
// line over diagonals. Sums of rows, columns and diagonals are double, in the workspace. Sums of
// single pairs over batches and heads are fp32. They lie in the gradient itself if that is fp32,
// else in the workspace, and the first tile that meets a sum sets it. Zeroing first would be
// another pass through memory.
#pragma once

#include "cpu/loop/delta.h"

namespace fastattn::FASTATTN_ISA {

class BiasGrad {
 public:
  BiasGrad(const BackwardArgs& args, Scratch& scratch, int64_t block_m, int64_t block_n)
      : args_(args),
        p_(args.p),
        wanted_(p_.grad_bias.data != nullptr),
        stride_(round_up(block_n, kWidth)),
        tile_(wanted_ ? scratch.floats(block_m * stride_) : nullptr) {}

  // Call these before a task, and before its keys [j0, j0 + cols).
  void begin_task(const TaskHeads& task, int64_t copy) {
    if (!wanted_) return;
    heads_ = task;
    first_batch_ = task.b0, copy_ = copy;
    if (p_.bias_B == 1) heads_.b0 = 0, heads_.b1 = 1;
    if (p_.bias_H == 1) heads_.h0 = 0, heads_.h1 = 1;
    if (is_whole()) clear(0, p_.bias_M * p_.bias_N);
  }
  void begin_keys(int64_t j0, int64_t cols) {
    cols_ = cols;
    if (wanted_ && !is_whole() && p_.bias_M == 1) clear(j0, cols);
  }

  // Where the gradients of a tile's scores go, and whether they overwrite what is there. Rows that
  // share sums overlap.
  struct Rows {
    float* data = nullptr;  // or nullptr
    int64_t stride = 0;
    bool overwrites = false;
    float* row(int64_t i) const { return data == nullptr ? nullptr : data + i * stride; }
  };
  FASTATTN_MEMBER static void put(float* to, Vec ds, bool overwrites) {
    store(to, overwrites ? ds : load(to) + ds);
  }
  // For the tile `at`, in whole vectors; end_tile() follows.
  Rows begin_tile(const TilePlace& at) {
    if (!wanted_) return {};
    is_direct_ = p_.bias_M > 1 && p_.bias_N > 1 && at.cols % kWidth == 0;
    if (p_.bias_M == 1) return begin_shared(at);
    if (!is_direct_) return {tile_, stride_, true};
    const Matrix to = sums_of(at, 0, at.cols);
    return {static_cast<float*>(to.data) + to.offset, to.stride_r, is_set_by(at)};
  }
  void end_tile(const TilePlace& at) {
    if (!wanted_) return;
    if (has_long_sums(p_)) return add_to_long_sums(at);
    if (!is_direct_) add_tile(at);
    if (is_set_by(at) && at.cols < cols_) unpack_zeros(sums_of(at, at.cols, cols_ - at.cols));
  }
  // Replaces both calls for a tile whose pairs are all masked.
  void skip_tile(const TilePlace& at) {
    if (wanted_ && !has_long_sums(p_) && is_set_by(at)) unpack_zeros(sums_of(at, 0, cols_));
  }

 private:
  // Whether all keys share the sums, or share some: then a task clears them once.
  bool is_whole() const { return p_.bias_N == 1 || p_.bias_is_line; }

  // Whether this tile is the first to meet its sums of pairs.
  bool is_set_by(const TilePlace& at) const {
    return (p_.bias_B > 1 || at.b == first_batch_) && (p_.bias_H > 1 || at.h == 0);
  }

  // One row of sums in `tile_`. Column c of row i belongs to element c + rows - 1 - i of a line.
  Rows begin_shared(const TilePlace& at) {
    const int64_t last = p_.bias_is_line ? at.rows - 1 : 0;
    fill(tile_, last + round_up(at.cols, kWidth), 0.f);
    return {tile_ + last, p_.bias_is_line ? -1 : 0, false};
  }

  void add_to_long_sums(const TilePlace& at) {
    double* const to = long_sums(p_.bias_B == 1 ? 0 : at.b, p_.bias_H == 1 ? 0 : at.h);
    if (p_.bias_is_line) {
      const int64_t first = p_.M - at.i0 - at.rows + at.j0;
      return add_to_sums(tile_, at.rows - 1 + at.cols, 1., to + first);
    }
    if (p_.bias_N > 1) return add_to_sums(tile_, at.cols, 1., to + at.j0);
    const int64_t first = p_.bias_M == 1 ? 0 : at.i0, rows = p_.bias_M == 1 ? 1 : at.rows;
    for (int64_t i = 0; i < rows; ++i) {
      Vec sum{};
      for (int64_t c = 0; c < at.cols; c += kWidth) sum += load(tile_ + i * stride_ + c);
      to[first + i] += static_cast<double>(sum_lanes(sum));  // what is past the last column is 0
    }
  }
  void add_tile(const TilePlace& at) {
    const Matrix to = sums_of(at, 0, at.cols);
    if (is_set_by(at)) return unpack_rows(tile_, stride_, 1.f, nullptr, to);
    float* const out = static_cast<float*>(to.data) + to.offset;
    for (int64_t i = 0; i < to.rows; ++i)
      for (int64_t c = 0; c < to.cols; ++c) out[i * to.stride_r + c] += tile_[i * stride_ + c];
  }

  // The task's sums of a head of the bias.
  double* long_sums(int64_t b, int64_t h) const {
    const int64_t head = (copy_ * p_.bias_B + b) * p_.bias_H + h;
    return args_.sums(args_.plan.grad_bias) + head * p_.bias_M * p_.bias_N;
  }
  void clear(int64_t first, int64_t count) {
    for (int64_t b = heads_.b0; b < heads_.b1; ++b)
      for (int64_t h = heads_.h0; h < heads_.h1; ++h) zero_sums(long_sums(b, h) + first, count);
  }

  // The sums of the pairs in columns [begin, begin + cols) of a tile.
  Matrix sums_of(const TilePlace& at, int64_t begin, int64_t cols) const {
    View view = p_.grad_bias;
    if (!args_.plan.bias_direct) {
      const int64_t N = p_.bias_N, M = p_.bias_M, size = p_.bias_B * p_.bias_H * M * N;
      float* const base = args_.workspace(args_.plan.grad_bias) + copy_ * size;
      view = {base, DType::kFloat32, p_.bias_H * M * N, M * N, N, 1};
    }
    Matrix out =
        matrix_at(view, p_.bias_B == 1 ? 0 : at.b, p_.bias_H == 1 ? 0 : at.h, at.i0, at.rows, cols);
    out.offset += (at.j0 + begin) * out.stride_c;
    return out;
  }

  const BackwardArgs& args_;
  const BackwardParams& p_;
  bool wanted_;
  bool is_direct_ = false;
  TaskHeads heads_{};                   // of the bias
  int64_t first_batch_ = 0, copy_ = 0;  // of the task: copy_ says which sums are its own
  int64_t stride_, cols_ = 0;
  float* tile_;  // dS of the tile or its shared sums, unless dS is added to the gradient at once
};

// Sums over copies and converts to the gradient's dtype. A task takes some rows of one (b, h).
class BiasGradWriter {
 public:
  explicit BiasGradWriter(const BackwardArgs& args)
      : args_(args),
        p_(args.p),
        rounded_(has_long_sums(p_) ? scratch_.floats(max64(kRows, p_.bias_N)) : nullptr) {}

  static int64_t tasks(const BackwardParams& p) {
    return p.bias_B * p.bias_H * ceil_div(p.bias_M, kRows);
  }

  void run(int64_t task) {
    const int64_t blocks = ceil_div(p_.bias_M, kRows), bh = task / blocks;
    const int64_t i0 = task % blocks * kRows, rows = min64(kRows, p_.bias_M - i0);
    const int64_t first = (bh * p_.bias_M + i0) * p_.bias_N;
    const int64_t from = args_.plan.grad_bias, count = rows * p_.bias_N;
    const Matrix to = matrix_at(p_.grad_bias, bh / p_.bias_H, bh % p_.bias_H, i0, rows, p_.bias_N);
    if (p_.B * p_.H == 0) return unpack_zeros(to);
    if (!has_long_sums(p_))
      return unpack_dense(sum_copies(args_.workspace(from) + first, count), to);
    round_sums(sum_copies(args_.sums(from) + first, count), count, rounded_);
    unpack_dense(rounded_, to);
  }

 private:
  static constexpr int64_t kRows = 64;

  // Adds the other copies to the first. `first`: its floats or doubles.
  template <typename T>
  T* sum_copies(T* first, int64_t count) const {
    const int64_t size = p_.bias_B * p_.bias_H * p_.bias_M * p_.bias_N;
    for (int64_t copy = 1; copy < args_.plan.copies.count(); ++copy)
      for (int64_t n = 0; n < count; ++n) first[n] += first[copy * size + n];
    return first;
  }

  const BackwardArgs& args_;
  const BackwardParams& p_;
  Scratch scratch_;
  float* rounded_;  // long sums: of one row, or of kRows rows of one column
};

}  // namespace fastattn::FASTATTN_ISA
