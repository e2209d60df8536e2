// Products on the matrix unit (AMX), which multiplies tiles of bf16, or of fp16 where there is
// AMX-FP16, and accumulates in fp32.
//
// Operands of any dtype are split into parts, x = x1 + x2 + ..., as their Form says: 8 bits each of
// bf16, 11 of fp16. Of the products of parts, those that matter at the operand's own precision are
// added up:
//
//   form         of    products of parts                          left out, of |a b| at most
//   kThreeBf16   fp32  a1 b3, a1 b2, a2 b2, a2 b1, a3 b1, a1 b1   2^-25
//   kTwoHalves   fp32  a1 b2, a1 b1, a2 b1                        2^-22
//   kTwoBf16     fp16  the same                                   2^-17
//   kBf16, kHalf       a1 b1
//
// As accurate as fp32 multiply-adds, at a sixth or third of the unit's rate, which is 16 times
// theirs. What is left out of kTwoHalves, and what it drops of each x, 2^-23 |x| at most, is of
// either sign, and less than what 32 or more fp32 additions round off.
//
// fp16 holds numbers from 2^-24 to 2^16. Operands are multiplied by a power of 2, their unit, and
// their rows must then have their largest number in (2, 2^15]: others need kThreeBf16, and so does
// the tile of pairs (i, j) in which one matters (choose_form()). bf16 holds them all, but the unit
// flushes denormals: rows whose largest number lies outside [2^-60, 2^60], or that are not finite,
// are packed as zeros and multiplied apart, in fp32 (*_rows_apart()). Sums are flushed too: results
// and gradients below 1e-33 lose bits, where plain fp32 would at 1e-38. Sums of fp16 parts, being
// in units, overflow from 2^107 (outputs) or 2^114 (scores) on, and weights below 2^-38 of the
// largest in their row are 0.
//
//   tile of the left operand    16 rows x 16 words: row r, word k = elements k, k + 16 of 32 (bf16)
//                               or 2 k, 2 k + 1 (fp16)
//   tile of the right operand   16 words x 16 columns, the same transposed
//   C, one tile or two          stays in tile registers
//
// Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
// higher-precision computations", 2019.
#pragma once

#include "common/mask.h"
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

// How numbers are written as parts.
enum class Form { kBf16, kTwoBf16, kThreeBf16, kHalf, kTwoHalves };

constexpr int parts_of(Form form) {
  return form == Form::kThreeBf16 ? 3 : form == Form::kTwoBf16 || form == Form::kTwoHalves ? 2 : 1;
}
constexpr bool is_fp16(Form form) { return form == Form::kHalf || form == Form::kTwoHalves; }

#ifdef FASTATTN_AMX_FP16
constexpr bool kHasFp16 = true;
#else
constexpr bool kHasFp16 = false;
#endif

// The form that numbers of a dtype have where they fit, and the one that all finite ones fit into.
constexpr Form form_of(DType dtype) {
  if (dtype == DType::kBFloat16) return Form::kBf16;
  if (dtype == DType::kFloat16) return kHasFp16 ? Form::kHalf : Form::kTwoBf16;
  return kHasFp16 ? Form::kTwoHalves : Form::kThreeBf16;
}
constexpr Form wide_form_of(DType dtype) {
  return dtype == DType::kFloat32 ? Form::kThreeBf16 : form_of(dtype);
}

template <Form kForm>
using FormConstant = std::integral_constant<Form, kForm>;
template <typename F>
FASTATTN_SIMD void with_form(Form form, F f) {
  if (form == Form::kBf16) return f(FormConstant<Form::kBf16>{});
  if constexpr (kHasFp16) {
    if (form == Form::kHalf) return f(FormConstant<Form::kHalf>{});
    if (form == Form::kTwoHalves) return f(FormConstant<Form::kTwoHalves>{});
  } else {
    if (form == Form::kTwoBf16) return f(FormConstant<Form::kTwoBf16>{});
  }
  f(FormConstant<Form::kThreeBf16>{});
}

// What queries, keys and values are multiplied by.
constexpr float input_unit(DType dtype) {
  return form_of(dtype) == Form::kTwoHalves ? 0x1p7f : 1.f;
}
constexpr float kSmallestHalf = 0x1p1f, kLargestHalf = 0x1p15f;  // of a row, in units

// What weights are multiplied by: with so many octaves below 1, most of them keep all their bits.
// More than 8 times that would be too much. Dropout's factor is made 1 at most.
constexpr int weight_octaves(Form form) { return kHasFp16 && form != Form::kBf16 ? 13 : 0; }
FASTATTN_SIMD float dropout_unit(const AttentionParams& p) {
  float unit = 1.f;
  for (float most = 1.f; p.dropout.enabled && most < p.dropout.scale; most *= 2.f) unit *= 0.5f;
  return is_fp16(form_of(p.q.dtype)) ? unit : 1.f;
}

// Memory for one operand made of numbers of a dtype: `edges` x `depths` groups of one tile a part.
class Operand {
 public:
  Operand() = default;
  Operand(Scratch& scratch, int64_t edge, int64_t depth, DType dtype)
      : depths_(round_up(depth, kTileDepth) / kTileDepth),
        words_(scratch.ints(round_up(edge, kEdge) / kEdge * depths_ *
                            parts_of(wide_form_of(dtype)) * kTileWords)) {
    use(form_of(dtype));
  }

  // The form of what is in it, or will be next.
  Form form() const { return form_; }
  void use(Form form) { form_ = form, parts_ = parts_of(form); }

  FASTATTN_MEMBER int32_t* tiles(int64_t edge, int64_t depth) const {
    return words_ + (edge * depths_ + depth) * parts_ * kTileWords;
  }

 private:
  int64_t depths_ = 0, parts_ = 0;
  Form form_ = Form::kBf16;
  int32_t* words_ = nullptr;
};

// Distance between the two elements of a word, and between the first ones of words.
constexpr int64_t word_step(Form form) { return is_fp16(form) ? 1 : kEdge; }
constexpr int64_t words_apart(Form form) { return is_fp16(form) ? 2 : 1; }

// The parts of a vector of numbers.
template <Form kForm>
struct Parts {
  static constexpr int kParts = parts_of(kForm);
  using Part = std::conditional_t<is_fp16(kForm), VecHalf, Vec>;
  Part part[kParts];
};

// x as parts. The last one of several may have more bits set than its share: words_of() cuts them.
template <Form kForm>
FASTATTN_SIMD Parts<kForm> split(Vec x) {
  constexpr int kParts = parts_of(kForm);
  Parts<kForm> out;
  if constexpr (is_fp16(kForm)) {
    out.part[0] = float_to_fp16(x);
    if constexpr (kParts == 2) out.part[1] = float_to_fp16(x - fp16_to_float(out.part[0]));
  } else {
#pragma GCC unroll 3
    for (int p = 0; p + 1 < kParts; ++p) {
      // The first is rounded, so that the others have either sign and errors do not add up.
      out.part[p] = from_bits((bits_of(x) + (p == 0 ? 0x8000 : 0)) & ~0xffff);
      x -= out.part[p];
    }
    out.part[kParts - 1] = x;
  }
  return out;
}

// The upper halves of words side by side, in two operations.
FASTATTN_SIMD VecI upper_halves(Vec low, Vec high) {
  constexpr int kSelect = 0xf8;  // a | (b & c)
  return (VecI)_mm512_ternarylogic_epi32((__m512i)((VecU)low >> 16), (__m512i)high,
                                         _mm512_set1_epi32(~0xffff), kSelect);
}

// Words of the numbers `low` and `high` side by side; a single bf16 part is rounded to nearest.
template <Form kForm, typename Part>
FASTATTN_SIMD VecI words_of(Part low, Part high) {
  if constexpr (is_fp16(kForm)) {
    return (VecI)(widen(low) | widen(high) << 16);
  } else if constexpr (kForm == Form::kBf16) {
    // Four operations; the hardware's conversion would cost twice as much. NaN must come from bf16
    // or be the canonical one: rounding up the lowest bits of some others would change their sign.
    return upper_halves((Vec)((VecU)low + 0x8000u), (Vec)((VecU)high + 0x8000u));
  } else {
    return upper_halves(low, high);
  }
}

// 32 elements of a row, in two vectors, as the words of one row of a left tile: of each part.
template <Form kForm>
FASTATTN_SIMD void write_row(const Parts<kForm>& low, const Parts<kForm>& high, int32_t* tiles) {
  constexpr int kParts = parts_of(kForm);
#pragma GCC unroll 3
  for (int p = 0; p < kParts; ++p) {
    if constexpr (is_fp16(kForm)) {
      std::memcpy(tiles + p * kTileWords, &low.part[p], sizeof(low.part[p]));
      std::memcpy(tiles + p * kTileWords + kEdge / 2, &high.part[p], sizeof(high.part[p]));
    } else {
      const VecI words = words_of<kForm>(low.part[p], high.part[p]);
      std::memcpy(tiles + p * kTileWords, &words, sizeof(words));
    }
  }
}
// Likewise 16 columns of two rows, word_step() apart.
template <Form kForm>
FASTATTN_SIMD void write_column_words(const Parts<kForm>& low, const Parts<kForm>& high,
                                      int32_t* tiles) {
  constexpr int kParts = parts_of(kForm);
#pragma GCC unroll 3
  for (int p = 0; p < kParts; ++p) {
    const VecI words = words_of<kForm>(low.part[p], high.part[p]);
    std::memcpy(tiles + p * kTileWords, &words, sizeof(words));
  }
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

// What the largest number of a row must be: 0 or in (low, high].
struct Window {
  float low, high;
  bool has(VecI top) const { return !stands_apart(top, low, high); }
};
constexpr Window kAnyBf16 = {0x1p-60f, 0x1p60f};

// Which rows of a matrix do not fit into operands of form_of(its dtype): some need wide_form_of()
// it, others stand apart from operands of any form.
class Misfits {
 public:
  Misfits() = default;
  Misfits(Scratch& scratch, int64_t rows) : kind_(scratch.ints(rows)) {}

  bool any() const { return any_ != 0; }
  bool any_apart() const { return (any_ & kApart) != 0; }
  FASTATTN_MEMBER bool has(int64_t r) const { return any() && kind_[r] != 0; }
  FASTATTN_MEMBER bool is_apart(int64_t r) const { return any_apart() && kind_[r] == kApart; }
  FASTATTN_MEMBER bool is_left_out(int64_t r, Form form) const {
    return any_ != 0 && (kind_[r] & (form == Form::kTwoHalves ? kWide | kApart : kApart)) != 0;
  }
  void clear() { any_ = 0; }

  // Looks at rows of contiguous columns. `narrow`: what fits; `wide`: what fits into the wide form.
  template <DType kType>
  void scan(const Matrix& from, Window narrow, Window wide) {
    any_ = 0;
    for (int64_t r = 0; r < from.rows; ++r) {
      VecI top{};
      for (int64_t c = 0; c < from.cols; c += kWidth)
        top = largest(
            top, load_first<kType>(from.data, from.offset + r * from.stride_r + c, from.cols - c));
      kind_[r] = narrow.has(top) ? 0 : wide.has(top) ? kWide : kApart;
      any_ |= kind_[r];
    }
  }

 private:
  static constexpr int32_t kWide = 1, kApart = 2;
  int32_t* kind_ = nullptr;
  int32_t any_ = 0;
};

// Splits `factor` times a matrix of contiguous columns into tiles, those out to whole tiles of
// padding being 0. Rows that do not fit become 0.
template <DType kType, Form kForm, Depth kDepth, bool kTransposed>
static void write_tiles(const Matrix& from, float factor, const Misfits& misfits,
                        const Operand& to) {
  constexpr int64_t kRows = kDepth == Depth::kRows ? kTileDepth : kEdge;
  constexpr int64_t kCols = kDepth == Depth::kRows ? kEdge : kTileDepth;
  constexpr int64_t kStep = word_step(kForm), kNext = words_apart(kForm);
  const auto part = [&](int64_t r, int64_t c) __attribute__((always_inline)) {
    if (r >= from.rows || misfits.is_left_out(r, kForm)) return split<kForm>(Vec{});
    return split<kForm>(
        factor * load_first<kType>(from.data, from.offset + r * from.stride_r + c, from.cols - c));
  };
  for (int64_t r0 = 0; r0 < from.rows; r0 += kRows)
    for (int64_t c0 = 0; c0 < from.cols; c0 += kCols) {
      int32_t* const tiles = kDepth == Depth::kRows ? to.tiles(c0 / kCols, r0 / kRows)
                                                    : to.tiles(r0 / kRows, c0 / kCols);
      for (int64_t n = 0; n < kEdge; ++n) {
        int32_t* const row = tiles + n * kEdge;
        if constexpr (kDepth == Depth::kRows) {
          write_column_words<kForm>(part(r0 + n * kNext, c0), part(r0 + n * kNext + kStep, c0),
                                    row);
        } else {
          write_row<kForm>(part(r0 + n, c0), part(r0 + n, c0 + kEdge), row);
        }
      }
      if constexpr (kTransposed)
        for (int p = 0; p < parts_of(kForm); ++p) transpose_words(tiles + p * kTileWords);
    }
}

template <Depth kDepth, Side kSide>
static void pack_tiles(const Matrix& from, float factor, const Misfits& misfits,
                       const Operand& to) {
  constexpr bool kTransposed = (kDepth == Depth::kCols) != (kSide == Side::kLeft);
  with_form(to.form(), [&](auto form) {
    // Scores' gradients are fp32 whatever the form.
    if (from.dtype == DType::kFloat32)
      write_tiles<DType::kFloat32, form, kDepth, kTransposed>(from, factor, misfits, to);
    if constexpr (form == form_of(DType::kFloat16))
      if (from.dtype == DType::kFloat16)
        write_tiles<DType::kFloat16, form, kDepth, kTransposed>(from, factor, misfits, to);
    if constexpr (form == Form::kBf16)
      if (from.dtype == DType::kBFloat16)
        write_tiles<DType::kBFloat16, form, kDepth, kTransposed>(from, factor, misfits, to);
  });
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

// C += A B, of tile registers: TDPBF16PS or TDPFP16PS. As bytes, because the latter is known to
// compilers from GCC 13 and Clang 16 on, and to assemblers from binutils 2.40 on.
template <Form kForm, int kC, int kA, int kB>
FASTATTN_SIMD void multiply_registers() {
  constexpr int kPrefix = is_fp16(kForm) ? 3 : 2;  // of VEX: F2 or F3
  asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"((~kB & 15) << 3 | kPrefix),
               "i"(0xc0 | kC << 3 | kA));
}

// Which tile registers are what; their names must be literals. C 0 and 1, left operand 4 and 5,
// right operand 6 and 7. Two tiles of C side by side, or one below the other, share an operand.
// Four would need fewer loads, but took 5 to 15% longer.
template <Form kForm, int kRows, int kCols>
struct TileBlock {
  static_assert(kRows * kCols <= 2);
  static constexpr bool kTwo = kRows * kCols == 2;

  FASTATTN_MEMBER static void clear() {
    _tile_zero(0);
    if constexpr (kTwo) _tile_zero(1);
  }
  FASTATTN_MEMBER static void load(const float* c, int64_t ld) {
    _tile_loadd(0, c, ld * 4);
    if constexpr (kTwo) _tile_loadd(1, c + second(ld), ld * 4);
  }
  FASTATTN_MEMBER static void store(float* c, int64_t ld) {
    _tile_stored(0, c, ld * 4);
    if constexpr (kTwo) _tile_stored(1, c + second(ld), ld * 4);
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
    multiply_registers<kForm, 0, 4, 6>();
    if constexpr (kTwo) multiply_registers<kForm, 1, 3 + kRows, 5 + kCols>();
  }

 private:
  FASTATTN_MEMBER static int64_t second(int64_t ld) { return kRows == 2 ? kEdge * ld : kEdge; }
};

template <Form kForm, int kRows, int kCols>
FASTATTN_SIMD void multiply_block(const Operand& a, const Operand& b, int64_t m, int64_t n,
                                  int64_t depths, bool add, float* c, int64_t ld) {
  using Block = TileBlock<kForm, kRows, kCols>;
  using Order = Steps<parts_of(kForm)>;
  float* const to = c + m * kEdge * ld + n * kEdge;
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

// Several parts. A group of one operand's rows or columns stays in the L1 cache while the other
// operand goes by, once for each group.
template <Form kForm>
static void multiply_blocks(const Operand& a, const Operand& b, int64_t ms, int64_t ns,
                            int64_t depths, bool add, float* c, int64_t ld) {
  constexpr int64_t kGroupBytes = 24 * 1024;  // half of it
  const int64_t pair_bytes = max64(1, depths) * parts_of(kForm) * kTileWords * 8;
  const int64_t most = max64(1, kGroupBytes / pair_bytes) * 2;
  const auto groups = [&](int64_t count) { return round_up(count, most) / most; };
  // Whether the group is one of columns.
  const bool columns = ms * groups(ns) + ns <= ns * groups(ms) + ms;
  const int64_t count = columns ? ns : ms, others = columns ? ms : ns;
  // In pairs, and groups of about the same size.
  const int64_t size = round_up(round_up(count, groups(count)) / groups(count), 2);
  const auto block = [&](int64_t i, int64_t other) __attribute__((always_inline)) {
    const int64_t m = columns ? other : i, n = columns ? i : other;
    if (i + 1 == count) return multiply_block<kForm, 1, 1>(a, b, m, n, depths, add, c, ld);
    columns ? multiply_block<kForm, 1, 2>(a, b, m, n, depths, add, c, ld)
            : multiply_block<kForm, 2, 1>(a, b, m, n, depths, add, c, ld);
  };
  for (int64_t begin = 0; begin < count; begin += size)
    for (int64_t other = 0; other < others; ++other)
      for (int64_t i = begin; i < min64(count, begin + size); i += 2) block(i, other);
}

// One part, up to four tiles of depth at a time: a row of A's tiles stays in registers 4 to 7, C is
// finished tile by tile, in register 0 or 1. A tile is stored amid the products of the next: a
// store waits for the products before it, and right behind them, what comes next would wait, too.
// Measured: half the time.
template <Form kForm, int kDepths, int kC>
FASTATTN_SIMD void multiply_chain(const int32_t* b, bool add, float* c, float* previous,
                                  int64_t ld) {
  // clang-format off
  const auto step = [&](auto depth) __attribute__((always_inline)) {
    if constexpr (depth < kDepths) {
      if constexpr (depth % 2 == 0) _tile_loadd(2, b + depth * kTileWords, kTileLine);
      else _tile_loadd(3, b + depth * kTileWords, kTileLine);
      multiply_registers<kForm, kC, 4 + depth, 2 + depth % 2>();
    }
  };
  if constexpr (kC == 0) {
    if (add) _tile_loadd(0, c, ld * 4); else _tile_zero(0);
  } else {
    if (add) _tile_loadd(1, c, ld * 4); else _tile_zero(1);
  }
  step(std::integral_constant<int, 0>{});
  step(std::integral_constant<int, 1>{});
  if (previous != nullptr) {
    if constexpr (kC == 0) _tile_stored(1, previous, ld * 4); else _tile_stored(0, previous, ld * 4);
  }
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 3>{});
  // clang-format on
}
template <Form kForm, int kDepths>
static void multiply_chains(const Operand& a, const Operand& b, int64_t ms, int64_t ns, int64_t k,
                            bool add, float* c, int64_t ld) {
  float* previous = nullptr;
  bool odd = false;
  for (int64_t m = 0; m < ms; ++m) {
    const int32_t* const left = a.tiles(m, k);
    _tile_loadd(4, left, kTileLine);
    if constexpr (kDepths > 1) _tile_loadd(5, left + kTileWords, kTileLine);
    if constexpr (kDepths > 2) _tile_loadd(6, left + 2 * kTileWords, kTileLine);
    if constexpr (kDepths > 3) _tile_loadd(7, left + 3 * kTileWords, kTileLine);
    for (int64_t n = 0; n < ns; ++n, odd = !odd) {
      float* const to = c + m * kEdge * ld + n * kEdge;
      odd ? multiply_chain<kForm, kDepths, 1>(b.tiles(n, k), add, to, previous, ld)
          : multiply_chain<kForm, kDepths, 0>(b.tiles(n, k), add, to, previous, ld);
      previous = to;
    }
  }
  if (previous == nullptr) return;
  if (odd)
    _tile_stored(0, previous, ld * 4);
  else
    _tile_stored(1, previous, ld * 4);
}

// C[rows x cols] = A B, or C + A B; all three padded to whole tiles. A and B have one form.
static void multiply_tiles(const Operand& a, const Operand& b, int64_t rows, int64_t cols,
                           int64_t depth, bool add, float* c, int64_t ld) {
  const int64_t ms = round_up(rows, kEdge) / kEdge, ns = round_up(cols, kEdge) / kEdge;
  const int64_t depths = round_up(depth, kTileDepth) / kTileDepth;
  if (ms == 0 || ns == 0) return;
  asm volatile("" ::: "memory");  // compilers do not know that tile loads read memory
  with_form(a.form(), [&](auto form) __attribute__((always_inline)) {
    constexpr Form kForm = form;
    // Sums of nothing are 0.
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
