// Products of operands on the matrix unit, accumulated in fp32.
#pragma once

#include "cpu/score/amx/operand.h"

namespace fastattn::FASTATTN_ISA {

// The order of the products of parts, small ones first. Each step changes one operand only.
template <int kParts>
struct Steps;
template <>
struct Steps<1> {
  static constexpr int kCount = 1, kLeft[] = {0}, kRight[] = {0};
};
template <>
struct Steps<2> {
  static constexpr int kCount = 3, kLeft[] = {0, 0, 1}, kRight[] = {1, 0, 0};
};
template <>
struct Steps<3> {
  static constexpr int kCount = 6, kLeft[] = {0, 0, 1, 1, 2, 0}, kRight[] = {2, 1, 1, 0, 0, 0};
};

// The use of tile registers: C 0 and 1, left operand 4 and 5, right operand 6 and 7. Two tiles of
// C, side by side or one below the other, share an operand. Four tiles of C need fewer loads, but
// took 5 to 15% longer.
template <Form kForm, int kRows, int kCols>
struct TileBlock {
  static_assert(kRows * kCols <= 2);
  static constexpr bool kTwo = kRows * kCols == 2;

  FASTATTN_MEMBER static void clear() {
    zero_tile<0>();
    if constexpr (kTwo) zero_tile<1>();
  }
  FASTATTN_MEMBER static void load(const float* c, int64_t ld) {
    load_tile<0>(c, ld * 4);
    if constexpr (kTwo) load_tile<1>(c + second(ld), ld * 4);
  }
  FASTATTN_MEMBER static void store(float* c, int64_t ld) {
    store_tile<0>(c, ld * 4);
    if constexpr (kTwo) store_tile<1>(c + second(ld), ld * 4);
  }
  FASTATTN_MEMBER static void left(const int32_t* first, const int32_t* second) {
    load_tile<4>(first, kTileLine);
    if constexpr (kRows == 2) load_tile<5>(second, kTileLine);
  }
  FASTATTN_MEMBER static void right(const int32_t* first, const int32_t* second) {
    load_tile<6>(first, kTileLine);
    if constexpr (kCols == 2) load_tile<7>(second, kTileLine);
  }
  FASTATTN_MEMBER static void multiply() {
    multiply_tile_registers<is_fp16(kForm), 0, 4, 6>();
    if constexpr (kTwo) multiply_tile_registers<is_fp16(kForm), 1, 3 + kRows, 5 + kCols>();
  }

 private:
  FASTATTN_MEMBER static int64_t second(int64_t ld) { return kRows == 2 ? kEdge * ld : kEdge; }
};

template <Form kForm, int kRows, int kCols>
FASTATTN_SIMD void multiply_block(const Operand& a, const Operand& b, int64_t m, int64_t n,
                                  int64_t depths, bool add, float* to, int64_t ld) {
  using Block = TileBlock<kForm, kRows, kCols>;
  using Order = Steps<parts_of(kForm)>;
  add ? Block::load(to, ld) : Block::clear();
  for (int64_t k = 0; k < depths; ++k) {
    const int32_t *const a0 = a.tiles(m, k), *const a1 = a.tiles(m + kRows - 1, k);
    const int32_t *const b0 = b.tiles(n, k), *const b1 = b.tiles(n + kCols - 1, k);
#pragma GCC unroll 6
    for (int step = 0; step < Order::kCount; ++step) {
      const int l = Order::kLeft[step], r = Order::kRight[step];
      if (step == 0 || l != Order::kLeft[step - 1])
        Block::left(a0 + l * kTileWords, a1 + l * kTileWords);
      if (step == 0 || r != Order::kRight[step - 1])
        Block::right(b0 + r * kTileWords, b1 + r * kTileWords);
      Block::multiply();
    }
  }
  Block::store(to, ld);
}

// Products of blocks that vectors add to C, each amid the products of the next block.
class AddLater {
 public:
  explicit AddLater(int64_t ld) : ld_(ld) {}
  // Where the next product goes: [rows, cols] of what take() is given.
  float* next() { return products_[turn_ % 2]; }
  FASTATTN_MEMBER void take(float* c, int64_t rows, int64_t cols) {
    add_last();
    last_ = next(), c_ = c, rows_ = rows, cols_ = cols;
    ++turn_;
  }
  FASTATTN_MEMBER void add_last() const {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t n = 0; n < cols_; n += kWidth)
        store(c_ + r * ld_ + n, load(c_ + r * ld_ + n) + load(last_ + r * cols_ + n));
  }

 private:
  int64_t ld_, turn_ = 0, rows_ = 0, cols_ = 0;
  float *c_ = nullptr, *last_ = nullptr;
  alignas(64) float products_[2][2 * kTileWords];
};

// For several parts. A group of one operand's rows or columns stays in the L1 cache, while the
// whole other operand is read once for each group. Of fp32, a block's product is a sum of its own:
// each addition to a long one rounds, and the unit makes 384 for 128 keys.
template <Form kForm>
static void multiply_blocks(const Operand& a, const Operand& b, int64_t ms, int64_t ns,
                            int64_t depths, bool add, float* c, int64_t ld) {
  constexpr int64_t kGroupBytes = 24 * 1024;  // half of the cache
  const int64_t pair_bytes = max64(1, depths) * parts_of(kForm) * kTileWords * 8;
  const int64_t most = max64(1, kGroupBytes / pair_bytes) * 2;
  const auto groups = [&](int64_t count) { return ceil_div(count, most); };
  // Whether a group consists of columns.
  const bool columns = ms * groups(ns) + ns <= ns * groups(ms) + ms;
  const int64_t count = columns ? ns : ms, others = columns ? ms : ns;
  // Pairs of tiles, in groups of about the same size.
  const int64_t size = round_up(ceil_div(count, groups(count)), 2);
  const bool apart = add && (kForm == Form::kThreeBf16 || kForm == Form::kTwoHalves);
  AddLater later(ld);
  const auto block = [&](int64_t i, int64_t other) __attribute__((always_inline)) {
    const int64_t m = columns ? other : i, n = columns ? i : other;
    const bool two = i + 1 < count;
    const int64_t cols = two && columns ? 2 * kEdge : kEdge;
    float* const own = c + m * kEdge * ld + n * kEdge;
    float* const to = apart ? later.next() : own;
    const int64_t ld_to = apart ? cols : ld;
    const bool onto = add && !apart;
    if (!two)
      multiply_block<kForm, 1, 1>(a, b, m, n, depths, onto, to, ld_to);
    else
      columns ? multiply_block<kForm, 1, 2>(a, b, m, n, depths, onto, to, ld_to)
              : multiply_block<kForm, 2, 1>(a, b, m, n, depths, onto, to, ld_to);
    if (apart) later.take(own, two && !columns ? 2 * kEdge : kEdge, cols);
  };
  for (int64_t begin = 0; begin < count; begin += size)
    for (int64_t other = 0; other < others; ++other)
      for (int64_t i = begin; i < min64(count, begin + size); i += 2) block(i, other);
  later.add_last();
}

// For one part, up to four tiles of depth at a time. A row of A's tiles stays in registers 4 to 7.
// C is finished tile by tile, in register 0 or 1. A tile is stored amid the products of the next
// one, because a store waits for the products before it. Right behind them, it would delay the next
// loads as well. Measured: half the time. The lines of the next one, `next`, are prefetched: a
// store waits for its line, and others wait behind it. Measured at d64: 5% of both passes.
template <Form kForm, int kDepths, int kC>
FASTATTN_SIMD void multiply_chain(const int32_t* b, bool add, float* c, float* previous,
                                  const float* next, int64_t ld) {
  const auto step = [&](auto depth) __attribute__((always_inline)) {
    if constexpr (depth < kDepths) {
      load_tile<2 + depth % 2>(b + depth * kTileWords, kTileLine);
      multiply_tile_registers<is_fp16(kForm), kC, 4 + depth, 2 + depth % 2>();
    }
  };
#pragma GCC unroll 16
  for (int64_t r = 0; r < kEdge; ++r) __builtin_prefetch(next + r * ld, 1);
  add ? load_tile<kC>(c, ld * 4) : zero_tile<kC>();
  step(std::integral_constant<int, 0>{});
  step(std::integral_constant<int, 1>{});
  if (previous != nullptr) store_tile<1 - kC>(previous, ld * 4);
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 3>{});
}
template <Form kForm, int kDepths>
static void multiply_chains(const Operand& a, const Operand& b, int64_t ms, int64_t ns, int64_t k,
                            bool add, float* c, int64_t ld) {
  float* previous = nullptr;
  bool odd = false;
  for (int64_t m = 0; m < ms; ++m) {
    const int32_t* const left = a.tiles(m, k);
    load_tile<4>(left, kTileLine);
    if constexpr (kDepths > 1) load_tile<5>(left + kTileWords, kTileLine);
    if constexpr (kDepths > 2) load_tile<6>(left + 2 * kTileWords, kTileLine);
    if constexpr (kDepths > 3) load_tile<7>(left + 3 * kTileWords, kTileLine);
    for (int64_t n = 0; n < ns; ++n, odd = !odd) {
      float* const to = c + m * kEdge * ld + n * kEdge;
      const float* const next = n + 1 < ns ? to + kEdge : c + (m + 1) % ms * kEdge * ld;
      odd ? multiply_chain<kForm, kDepths, 1>(b.tiles(n, k), add, to, previous, next, ld)
          : multiply_chain<kForm, kDepths, 0>(b.tiles(n, k), add, to, previous, next, ld);
      previous = to;
    }
  }
  if (previous == nullptr) return;
  odd ? store_tile<0>(previous, ld * 4) : store_tile<1>(previous, ld * 4);
}

// Whether lists are worth finding. On the unit nobody measured products that leave out tiles.
constexpr bool kTilesHaveStrips = false;

// C[rows x cols] = A B, or C + A B; all are padded to whole tiles. A and B have the same form.
static void multiply_tiles(const Operand& a, const Operand& b, int64_t rows, int64_t cols,
                           int64_t depth, bool add, float* c, int64_t ld, Lists = {}) {
  const int64_t ms = ceil_div(rows, kEdge), ns = ceil_div(cols, kEdge);
  const int64_t depths = ceil_div(depth, kTileDepth);
  if (ms == 0 || ns == 0) return;
  asm volatile("" ::: "memory");  // compilers do not know that tile loads read memory
  with_form(a.form(), [&](auto form) __attribute__((always_inline)) {
    constexpr Form kForm = form;
    // A sum over no depth is 0.
    if (parts_of(kForm) > 1 || depths == 0)
      return multiply_blocks<kForm>(a, b, ms, ns, depths, add, c, ld);
    if constexpr (parts_of(kForm) == 1) {
      for (int64_t k = 0; k < depths; k += 4) {
        const bool more = add || k > 0;
        if (depths - k == 1) return multiply_chains<kForm, 1>(a, b, ms, ns, k, more, c, ld);
        if (depths - k == 2) return multiply_chains<kForm, 2>(a, b, ms, ns, k, more, c, ld);
        if (depths - k == 3) return multiply_chains<kForm, 3>(a, b, ms, ns, k, more, c, ld);
        multiply_chains<kForm, 4>(a, b, ms, ns, k, more, c, ld);
      }
    }
  });
}

}  // namespace fastattn::FASTATTN_ISA
