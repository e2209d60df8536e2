// Operands of the matrix unit: matrices as tiles of parts, and the rows that do not fit into them.
#pragma once

#include "cpu/base/pack.h"
#include "cpu/score/amx/parts.h"
#include "cpu/tile/strips.h"

namespace fastattn::FASTATTN_ISA {

// Memory for one operand: `edges` x `depths` groups, each with one tile a part.
class Operand {
 public:
  Operand() = default;
  Operand(Scratch& scratch, int64_t edge, int64_t depth, DType dtype)
      : depths_(ceil_div(depth, kTileDepth)),
        words_(scratch.ints(ceil_div(edge, kEdge) * depths_ * parts_of(wide_form_of(dtype)) *
                            kTileWords)) {
    use(form_of(dtype));
  }

  // The form of its contents, or of those to come.
  Form form() const { return form_; }
  void use(Form form) { form_ = form, parts_ = parts_of(form); }

  FASTATTN_MEMBER int32_t* tiles(int64_t edge, int64_t depth) const {
    return words_ + edge * edge_words() + depth * parts_ * kTileWords;
  }
  int64_t edge_words() const { return depths_ * parts_ * kTileWords; }

 private:
  int64_t depths_ = 0, parts_ = 0;
  Form form_ = Form::kBf16;
  int32_t* words_ = nullptr;
};

// What a product C = A B may leave out. The rows of a matrix have strips, whose lists name those of
// its columns that are not zeros, or that are needed. The matrix is C (`columns`), A (`depth`) or B
// (`rows`). nullptr: takes all.
struct Lists {
  const Strips *columns = nullptr, *depth = nullptr, *rows = nullptr;
};

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

// The larger absolute values of two vectors, as bits. NaN is larger than every number.
FASTATTN_SIMD VecI largest(VecI top, Vec x) {
  const VecI size = bits_of(x) & 0x7fffffff;
  return top > size ? top : size;
}
// True if the largest number (in `top`) exceeds `high`, or is nonzero and at most `low`.
FASTATTN_SIMD bool stands_apart(VecI top, float low, float high) {
  const auto above = [&](float x) __attribute__((always_inline)) {
    return _mm512_cmpgt_epi32_mask((__m512i)top, (__m512i)bits_of(splat(x)));
  };
  return above(high) != 0 || (above(0.f) != 0 && above(low) == 0);
}

// Bounds on the largest number of a row: 0 or in (low, high].
struct Window {
  float low, high;
  bool has(VecI top) const { return !stands_apart(top, low, high); }
};
constexpr Window kAnyBf16 = {0x1p-60f, 0x1p60f};

// Whether all numbers of a bf16 matrix are 0 or within a window. Then every row fits. A row of 64
// numbers takes 10 instructions here, and 60 where each row is compared by itself.
static bool all_within(const Matrix& from, Window window) {
  using Halves = uint16_t __attribute__((vector_size(64)));
  constexpr int64_t kHalves = sizeof(Halves) / 2;
  if (from.cols % kHalves != 0) return false;
  const auto bits = [](float x) { return static_cast<uint16_t>(bits_of(splat(x))[0] >> 16); };
  const int64_t ahead = prefetch_distance<DType::kBFloat16>(from);
  Halves most{}, least = ~Halves{};
  for (int64_t r = 0; r < from.rows; ++r) {
    prefetch_rows<DType::kBFloat16>(from, r + ahead, r + ahead + 1);
    const auto* const row =
        static_cast<const uint16_t*>(from.data) + from.offset + r * from.stride_r;
    for (int64_t c = 0; c < from.cols; c += kHalves) {
      const Halves size = load_lanes<Halves>(row + c) & 0x7fff, below = size - 1;  // 0: the largest
      most = most > size ? most : size;
      least = least < below ? least : below;
    }
  }
  return !any_lane((VecI)(most > bits(window.high)) | (VecI)(least < bits(window.low)));
}

// The rows of a matrix that do not fit into form_of(its dtype). Some fit into its wide_form_of().
// The others stand apart: no form holds them, and they are multiplied in fp32.
class OutlierRows {
 public:
  OutlierRows() = default;
  OutlierRows(Scratch& scratch, int64_t rows) : kind_(scratch.ints(rows)) {}

  bool any() const { return any_ != 0; }
  bool any_apart() const { return (any_ & kApart) != 0; }
  FASTATTN_MEMBER bool has(int64_t r) const { return any() && kind_[r] != 0; }
  FASTATTN_MEMBER bool is_apart(int64_t r) const { return any_apart() && kind_[r] == kApart; }
  FASTATTN_MEMBER bool is_left_out(int64_t r, Form form) const {
    return any_ != 0 && (kind_[r] & (form == Form::kTwoHalves ? kWide | kApart : kApart)) != 0;
  }
  void clear() { any_ = 0; }

  // Scans rows of contiguous columns. `narrow`: what fits; `wide`: what fits into the wide form.
  template <DType kType>
  void scan(const Matrix& from, Window narrow, Window wide) {
    any_ = 0;
    if (kType == DType::kBFloat16 && all_within(from, narrow)) return;
    const int64_t ahead = prefetch_distance<kType>(from);
    for (int64_t r = 0; r < from.rows; ++r) {
      prefetch_rows<kType>(from, r + ahead, r + ahead + 1);
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

// Splits `factor` times a matrix of contiguous columns into tiles, with padding of 0 up to whole
// tiles. Rows that do not fit become 0.
template <DType kType, Form kForm, Depth kDepth, bool kTransposed>
static void write_tiles(const Matrix& from, float factor, const OutlierRows& outliers,
                        const Operand& to) {
  constexpr int64_t kRows = kDepth == Depth::kRows ? kTileDepth : kEdge;
  constexpr int64_t kCols = kDepth == Depth::kRows ? kEdge : kTileDepth;
  constexpr int64_t kStep = word_step(kForm), kNext = words_apart(kForm);
  constexpr bool kExact = kType == DType::kBFloat16 && kForm == Form::kBf16;
  const auto write = [&](int64_t r0, int64_t c0, auto whole) __attribute__((always_inline)) {
    const auto part = [&](int64_t r, int64_t c) __attribute__((always_inline)) {
      const int64_t at = from.offset + r * from.stride_r + c;
      if (whole) return split<kForm>(factor * load_as<kType>(from.data, at));
      if (r >= from.rows || outliers.is_left_out(r, kForm)) return split<kForm>(Vec{});
      return split<kForm>(factor * load_first<kType>(from.data, at, from.cols - c));
    };
    int32_t* const tiles = kDepth == Depth::kRows ? to.tiles(c0 / kCols, r0 / kRows)
                                                  : to.tiles(r0 / kRows, c0 / kCols);
    for (int64_t n = 0; n < kEdge; ++n) {
      int32_t* const row = tiles + n * kEdge;
      if constexpr (kDepth == Depth::kRows) {
        write_column_words<kForm, kExact>(part(r0 + n * kNext, c0),
                                          part(r0 + n * kNext + kStep, c0), row);
      } else {
        write_row<kForm, kExact>(part(r0 + n, c0), part(r0 + n, c0 + kEdge), row);
      }
    }
    if constexpr (kTransposed)
      for (int p = 0; p < parts_of(kForm); ++p) transpose_words(tiles + p * kTileWords);
  };
  for (int64_t r0 = 0; r0 < from.rows; r0 += kRows)
    for (int64_t c0 = 0; c0 < from.cols; c0 += kCols)
      if (!outliers.any() && r0 + kRows <= from.rows && c0 + kCols <= from.cols)
        write(r0, c0, std::true_type{});
      else
        write(r0, c0, std::false_type{});
}

template <Depth kDepth, Side kSide>
static void pack_tiles(const Matrix& from, float factor, const OutlierRows& outliers,
                       const Operand& to) {
  constexpr bool kTransposed = (kDepth == Depth::kCols) != (kSide == Side::kLeft);
  with_form(to.form(), [&](auto form) {
    // Gradients of scores are fp32 in every form.
    if (from.dtype == DType::kFloat32)
      write_tiles<DType::kFloat32, form, kDepth, kTransposed>(from, factor, outliers, to);
    if constexpr (form == form_of(DType::kFloat16))
      if (from.dtype == DType::kFloat16)
        write_tiles<DType::kFloat16, form, kDepth, kTransposed>(from, factor, outliers, to);
    if constexpr (form == Form::kBf16)
      if (from.dtype == DType::kBFloat16)
        write_tiles<DType::kBFloat16, form, kDepth, kTransposed>(from, factor, outliers, to);
  });
}

}  // namespace fastattn::FASTATTN_ISA
