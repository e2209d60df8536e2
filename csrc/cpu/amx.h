// Products on the matrix unit (AMX), which multiplies tiles of bf16 and accumulates in fp32.
//
// Operands of any dtype are split into bf16 parts, x = x1 + x2 + x3 of 8 bits each: fp32 into three
// (exactly), fp16 into two (exactly), bf16 is one. Of the products of parts, those that matter at
// the operand's own precision are added up:
//
//   fp32  a1 b3 + a1 b2 + a2 b2 + a2 b1 + a3 b1 + a1 b1     left out: 2^-25 |a b| at most
//   fp16  a1 b2 + a1 b1 + a2 b1                             left out: 2^-17 |a b| at most
//
// As accurate as fp32 multiply-adds, at a sixth of the unit's rate, which is 16 times theirs. The
// unit flushes denormals: rows of an operand whose largest number lies outside [2^-60, 2^60], or
// that are not finite, are packed as zeros and multiplied apart, in fp32 (*_rows_apart()). Sums are
// flushed too: results and gradients below 1e-33 lose bits, where plain fp32 would at 1e-38.
//
//   tile of the left operand    16 rows x 16 words: row r, word k = elements k, k + 16 of 32
//   tile of the right operand   16 words x 16 columns, the same transposed
//   C, 2 x 2 tiles              stays in tile registers; 4 products for 2 to 4 tile loads
//
// Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
// higher-precision computations", 2019.
#pragma once

#include "cpu/direct.h"

namespace fastattn::FASTATTN_ISA {

constexpr int64_t kEdge = 16;        // rows or columns of a tile
constexpr int64_t kTileDepth = 32;   // elements of a row of it
constexpr int64_t kTileWords = 256;  // pairs of elements in it
constexpr int64_t kTileLine = 64;    // bytes of a row of it

// Whether the matrix unit gains more than bringing operands into its layout costs.
FASTATTN_SIMD bool packing_pays(const AttentionParams& p) {
  constexpr int64_t kPairs = 16 * 64;  // measured at d64, M and N being powers of two
  return p.M > kDirectRows && p.M * p.N > kPairs;
}

// The unit is ready for use by this thread while one of these lives.
class MatrixUnit {
 public:
  MatrixUnit() {
    Configuration all{};
    all.palette = 1;
    for (int t = 0; t < 8; ++t) all.row_bytes[t] = kTileLine, all.rows[t] = kEdge;
    asm volatile("" ::"r"(&all) : "memory");  // GCC 12 believes that 8 bytes of it are read
    _tile_loadconfig(&all);
  }
  ~MatrixUnit() { _tile_release(); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

 private:
  struct Configuration {  // as the hardware reads it
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Configuration) == 64, "fixed by the instruction set");
};

// Vector instructions make denormals 0 on this thread while one of these lives.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_MM_GET_FLUSH_ZERO_MODE()) {
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  }
  ~FlushDenormals() { _MM_SET_FLUSH_ZERO_MODE(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};

// ---- operands ----

// Over which of its dims a matrix will be summed, and on which side of the product it stands.
enum class Depth { kCols, kRows };
enum class Side { kLeft, kRight };

constexpr int64_t parts_of(DType dtype) {
  return dtype == DType::kFloat32 ? 3 : dtype == DType::kFloat16 ? 2 : 1;
}
template <typename F>
FASTATTN_SIMD void with_parts(int64_t parts, F f) {
  if (parts == 3) return f(std::integral_constant<int, 3>{});
  if (parts == 2) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

// Memory for one operand: `edges` x `depths` groups of one tile a part.
class Operand {
 public:
  Operand() = default;
  Operand(Scratch& scratch, int64_t edge, int64_t depth, int64_t parts)
      : depths_(round_up(depth, kTileDepth) / kTileDepth),
        parts_(parts),
        words_(scratch.ints(round_up(edge, kEdge) / kEdge * depths_ * parts * kTileWords)) {}

  int64_t parts() const { return parts_; }
  FASTATTN_MEMBER int32_t* tiles(int64_t edge, int64_t depth) const {
    return words_ + (edge * depths_ + depth) * parts_ * kTileWords;
  }

 private:
  int64_t depths_ = 0, parts_ = 0;
  int32_t* words_ = nullptr;
};

// x as kParts numbers of 8 bits. The last part of several may have more bits set: pair() cuts them.
template <int kParts>
FASTATTN_SIMD void split(Vec x, Vec (&part)[kParts]) {
#pragma GCC unroll 3
  for (int p = 0; p + 1 < kParts; ++p) {
    // The first is rounded, so that the others have either sign and errors do not add up.
    part[p] = from_bits((bits_of(x) + (p == 0 ? 0x8000 : 0)) & ~0xffff);
    x -= part[p];
  }
  part[kParts - 1] = x;
}

// The upper halves of words side by side, in two operations.
FASTATTN_SIMD VecI upper_halves(Vec low, Vec high) {
  constexpr int kSelect = 0xf8;  // a | (b & c)
  return (VecI)_mm512_ternarylogic_epi32((__m512i)((VecU)low >> 16), (__m512i)high,
                                         _mm512_set1_epi32(~0xffff), kSelect);
}

// The bf16 numbers `low` and `high` side by side in words; a single part is rounded to nearest.
template <int kParts>
FASTATTN_SIMD VecI pair(Vec low, Vec high) {
  if constexpr (kParts == 1) {
    // Four operations; the hardware's conversion would cost twice as much. NaN must come from bf16
    // or be the canonical one: rounding up the lowest bits of some others would change their sign.
    return upper_halves((Vec)((VecU)low + 0x8000u), (Vec)((VecU)high + 0x8000u));
  } else {
    return upper_halves(low, high);
  }
}

// One row of the tiles of all parts: pairs of parts, or of `low` and `high` split into parts.
template <int kParts>
FASTATTN_SIMD void write_parts(const Vec (&lows)[kParts], const Vec (&highs)[kParts],
                               int32_t* tiles) {
#pragma GCC unroll 3
  for (int p = 0; p < kParts; ++p) {
    const VecI words = pair<kParts>(lows[p], highs[p]);
    std::memcpy(tiles + p * kTileWords, &words, sizeof(words));
  }
}
template <int kParts>
FASTATTN_SIMD void write_pair(Vec low, Vec high, int32_t* tiles) {
  Vec lows[kParts], highs[kParts];
  split(low, lows);
  split(high, highs);
  write_parts<kParts>(lows, highs, tiles);
}

// kWidth elements of a row of which `count` exist, the others being 0.
template <DType kType>
FASTATTN_SIMD Vec load_first(const void* base, int64_t offset, int64_t count) {
  if (__builtin_expect(count >= kWidth, 1)) return load_as<kType>(base, offset);
  if (count <= 0) return Vec{};
  const auto lanes = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (kType == DType::kFloat32) {
    return (Vec)_mm512_maskz_loadu_ps(lanes, static_cast<const float*>(base) + offset);
  } else {
    const auto half =
        (VecHalf)_mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(base) + offset);
    return kType == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
  }
}

FASTATTN_SIMD void transpose_words(int32_t* words) {
  Vec rows[kWidth];
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r) rows[r] = (Vec)load_lanes<VecI>(words + r * kEdge);
  transpose(rows);
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r) {
    const VecI row = bits_of(rows[r]);
    std::memcpy(words + r * kEdge, &row, sizeof(row));
  }
}

// The larger sizes of two vectors, as bits: those of NaN are above all others.
FASTATTN_SIMD VecI largest(VecI top, Vec x) {
  const VecI size = bits_of(x) & 0x7fffffff;
  return top > size ? top : size;
}
// Whether numbers, the largest of which are in `top`, are above `high`, or neither 0 nor above
// `low`.
FASTATTN_SIMD bool stands_apart(VecI top, float low, float high) {
  const auto above = [&](float x) __attribute__((always_inline)) {
    return _mm512_cmpgt_epi32_mask((__m512i)top, (__m512i)bits_of(splat(x)));
  };
  return above(high) != 0 || (above(0.f) != 0 && above(low) == 0);
}

// Which rows of an operand stand apart from its tiles.
class Apart {
 public:
  Apart() = default;
  Apart(Scratch& scratch, int64_t rows) : is_(scratch.ints(rows)) {}

  bool any() const { return any_; }
  FASTATTN_MEMBER bool has(int64_t r) const { return any_ && is_[r] != 0; }
  void clear() { any_ = false; }

  // Rows of contiguous columns whose largest number is 0 or in (low, high] can be split.
  template <DType kType>
  void scan(const Matrix& from, float low, float high) {
    any_ = false;
    for (int64_t r = 0; r < from.rows; ++r) {
      VecI top{};
      for (int64_t c = 0; c < from.cols; c += kWidth)
        top = largest(
            top, load_first<kType>(from.data, from.offset + r * from.stride_r + c, from.cols - c));
      is_[r] = stands_apart(top, low, high);
      any_ |= is_[r] != 0;
    }
  }

 private:
  int32_t* is_ = nullptr;
  bool any_ = false;
};

constexpr float kSmallest = 0x1p-60f, kLargest = 0x1p60f;

// Splits a matrix of contiguous columns into tiles, those out to whole tiles of padding being 0.
// Rows that stand apart become 0.
template <DType kType, int kParts, Depth kDepth, bool kTransposed>
static void write_tiles(const Matrix& from, float sign, const Apart& apart, const Operand& to) {
  constexpr int64_t kRows = kDepth == Depth::kRows ? kTileDepth : kEdge;
  constexpr int64_t kCols = kDepth == Depth::kRows ? kEdge : kTileDepth;
  const auto element = [&](int64_t r, int64_t c) __attribute__((always_inline)) {
    if (r >= from.rows || apart.has(r)) return Vec{};
    return sign * load_first<kType>(from.data, from.offset + r * from.stride_r + c, from.cols - c);
  };
  for (int64_t r0 = 0; r0 < from.rows; r0 += kRows)
    for (int64_t c0 = 0; c0 < from.cols; c0 += kCols) {
      int32_t* const tiles = kDepth == Depth::kRows ? to.tiles(c0 / kCols, r0 / kRows)
                                                    : to.tiles(r0 / kRows, c0 / kCols);
      for (int64_t r = 0; r < kEdge; ++r) {
        write_pair<kParts>(
            element(r0 + r, c0),
            kDepth == Depth::kRows ? element(r0 + kEdge + r, c0) : element(r0 + r, c0 + kEdge),
            tiles + r * kEdge);
      }
      if constexpr (kTransposed)
        for (int p = 0; p < kParts; ++p) transpose_words(tiles + p * kTileWords);
    }
}

template <Depth kDepth, Side kSide>
static void pack_tiles(const Matrix& from, float sign, const Apart& apart, const Operand& to) {
  constexpr bool kTransposed = (kDepth == Depth::kCols) != (kSide == Side::kLeft);
  if (from.dtype == DType::kFloat32) {
    with_parts(to.parts(), [&](auto parts) {
      write_tiles<DType::kFloat32, parts, kDepth, kTransposed>(from, sign, apart, to);
    });
  } else if (from.dtype == DType::kFloat16) {
    write_tiles<DType::kFloat16, 2, kDepth, kTransposed>(from, sign, apart, to);
  } else {
    write_tiles<DType::kBFloat16, 1, kDepth, kTransposed>(from, sign, apart, to);
  }
}

// ---- products ----

// Which parts are multiplied, small products first: each step changes one operand only.
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

// Tile registers: C 0 to 3, left operand 4 and 5, right operand 6 and 7. Their names must be
// literals.
template <int kRows, int kCols>
struct TileBlock {
  FASTATTN_MEMBER static void clear() {
    _tile_zero(0);
    if constexpr (kCols == 2) _tile_zero(1);
    if constexpr (kRows == 2) _tile_zero(2);
    if constexpr (kRows == 2 && kCols == 2) _tile_zero(3);
  }
  FASTATTN_MEMBER static void load(const float* c, int64_t ld) {
    _tile_loadd(0, c, ld * 4);
    if constexpr (kCols == 2) _tile_loadd(1, c + kEdge, ld * 4);
    if constexpr (kRows == 2) _tile_loadd(2, c + kEdge * ld, ld * 4);
    if constexpr (kRows == 2 && kCols == 2) _tile_loadd(3, c + kEdge * ld + kEdge, ld * 4);
  }
  FASTATTN_MEMBER static void store(float* c, int64_t ld) {
    _tile_stored(0, c, ld * 4);
    if constexpr (kCols == 2) _tile_stored(1, c + kEdge, ld * 4);
    if constexpr (kRows == 2) _tile_stored(2, c + kEdge * ld, ld * 4);
    if constexpr (kRows == 2 && kCols == 2) _tile_stored(3, c + kEdge * ld + kEdge, ld * 4);
  }
  FASTATTN_MEMBER static void left(const int32_t* first, const int32_t* second) {
    _tile_loadd(4, first, kTileLine);
    if constexpr (kRows == 2) _tile_loadd(5, second, kTileLine);
  }
  FASTATTN_MEMBER static void right(const int32_t* first, const int32_t* second) {
    _tile_loadd(6, first, kTileLine);
    if constexpr (kCols == 2) _tile_loadd(7, second, kTileLine);
  }
  FASTATTN_MEMBER static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kCols == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRows == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRows == 2 && kCols == 2) _tile_dpbf16ps(3, 5, 7);
  }
};

template <int kParts, int kRows, int kCols>
FASTATTN_SIMD void multiply_block(const Operand& a, const Operand& b, int64_t m, int64_t n,
                                  int64_t depths, bool add, float* c, int64_t ld) {
  using Block = TileBlock<kRows, kCols>;
  using Parts = Steps<kParts>;
  add ? Block::load(c, ld) : Block::clear();
  for (int64_t k = 0; k < depths; ++k) {
    const int32_t *const a0 = a.tiles(m, k), *const a1 = a.tiles(m + kRows - 1, k);
    const int32_t *const b0 = b.tiles(n, k), *const b1 = b.tiles(n + kCols - 1, k);
#pragma GCC unroll 6
    for (int step = 0; step < Parts::kCount; ++step) {
      const int l = Parts::kLeft[step], r = Parts::kRight[step];
      if (step == 0 || l != Parts::kLeft[step - 1])
        Block::left(a0 + l * kTileWords, a1 + l * kTileWords);
      if (step == 0 || r != Parts::kRight[step - 1])
        Block::right(b0 + r * kTileWords, b1 + r * kTileWords);
      Block::multiply();
    }
  }
  Block::store(c, ld);
}

// One part, up to four tiles of depth at a time: a row of A's tiles stays in registers 4
// to 7, C is finished tile by tile, so that storing one overlaps with multiplying the next.
// Measured 20 to 40% faster than 2 x 2 tiles.
template <int kDepths, int kTile>
FASTATTN_SIMD void multiply_chain(const int32_t* b, bool add, float* c, int64_t ld) {
  // clang-format off
  if constexpr (kTile == 0) {
    if (add) _tile_loadd(0, c, ld * 4); else _tile_zero(0);
    _tile_loadd(2, b, kTileLine); _tile_dpbf16ps(0, 4, 2);
    if constexpr (kDepths > 1) { _tile_loadd(3, b + kTileWords, kTileLine); _tile_dpbf16ps(0, 5, 3); }
    if constexpr (kDepths > 2) { _tile_loadd(2, b + 2 * kTileWords, kTileLine); _tile_dpbf16ps(0, 6, 2); }
    if constexpr (kDepths > 3) { _tile_loadd(3, b + 3 * kTileWords, kTileLine); _tile_dpbf16ps(0, 7, 3); }
    _tile_stored(0, c, ld * 4);
  } else {
    if (add) _tile_loadd(1, c, ld * 4); else _tile_zero(1);
    _tile_loadd(2, b, kTileLine); _tile_dpbf16ps(1, 4, 2);
    if constexpr (kDepths > 1) { _tile_loadd(3, b + kTileWords, kTileLine); _tile_dpbf16ps(1, 5, 3); }
    if constexpr (kDepths > 2) { _tile_loadd(2, b + 2 * kTileWords, kTileLine); _tile_dpbf16ps(1, 6, 2); }
    if constexpr (kDepths > 3) { _tile_loadd(3, b + 3 * kTileWords, kTileLine); _tile_dpbf16ps(1, 7, 3); }
    _tile_stored(1, c, ld * 4);
  }
  // clang-format on
}
template <int kDepths>
static void multiply_chains(const Operand& a, const Operand& b, int64_t ms, int64_t ns, int64_t k,
                            bool add, float* c, int64_t ld) {
  for (int64_t m = 0; m < ms; ++m) {
    const int32_t* const left = a.tiles(m, k);
    _tile_loadd(4, left, kTileLine);
    if constexpr (kDepths > 1) _tile_loadd(5, left + kTileWords, kTileLine);
    if constexpr (kDepths > 2) _tile_loadd(6, left + 2 * kTileWords, kTileLine);
    if constexpr (kDepths > 3) _tile_loadd(7, left + 3 * kTileWords, kTileLine);
    for (int64_t n = 0; n < ns; n += 2) {
      float* const to = c + m * kEdge * ld + n * kEdge;
      multiply_chain<kDepths, 0>(b.tiles(n, k), add, to, ld);
      if (n + 1 < ns) multiply_chain<kDepths, 1>(b.tiles(n + 1, k), add, to + kEdge, ld);
    }
  }
}

// C[rows x cols] = A B, or C + A B; all three padded to whole tiles.
static void multiply_tiles(const Operand& a, const Operand& b, int64_t rows, int64_t cols,
                           int64_t depth, bool add, float* c, int64_t ld) {
  const int64_t ms = round_up(rows, kEdge) / kEdge, ns = round_up(cols, kEdge) / kEdge;
  const int64_t depths = round_up(depth, kTileDepth) / kTileDepth;
  asm volatile("" ::: "memory");  // compilers do not know that tile loads read memory
  for (int64_t k = 0; a.parts() == 1 && k < depths; k += 4) {
    const bool more = add || k > 0;
    if (depths - k == 1) return multiply_chains<1>(a, b, ms, ns, k, more, c, ld);
    if (depths - k == 2) return multiply_chains<2>(a, b, ms, ns, k, more, c, ld);
    if (depths - k == 3) return multiply_chains<3>(a, b, ms, ns, k, more, c, ld);
    multiply_chains<4>(a, b, ms, ns, k, more, c, ld);
    if (k + 4 == depths) return;
  }
  with_parts(a.parts(), [&](auto parts) __attribute__((always_inline)) {
    constexpr int kParts = parts;
    const auto block = [&](int64_t m, int64_t n) __attribute__((always_inline)) {
      float* const to = c + m * kEdge * ld + n * kEdge;
      if (m + 1 < ms) {
        n + 1 < ns ? multiply_block<kParts, 2, 2>(a, b, m, n, depths, add, to, ld)
                   : multiply_block<kParts, 2, 1>(a, b, m, n, depths, add, to, ld);
      } else {
        n + 1 < ns ? multiply_block<kParts, 1, 2>(a, b, m, n, depths, add, to, ld)
                   : multiply_block<kParts, 1, 1>(a, b, m, n, depths, add, to, ld);
      }
    };
    // The smaller operand stays in the L1 cache.
    const bool by_rows = ms > ns;
    for (int64_t outer = 0; outer < (by_rows ? ms : ns); outer += 2)
      for (int64_t inner = 0; inner < (by_rows ? ns : ms); inner += 2)
        by_rows ? block(outer, inner) : block(inner, outer);
  });
}

}  // namespace fastattn::FASTATTN_ISA
