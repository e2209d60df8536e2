// Numbers as sums of parts that the matrix unit multiplies (unit.h has the table of forms).
#pragma once

#include "cpu/base/exp2.h"
#include "cpu/base/half.h"
#include "cpu/score/amx/unit.h"

namespace fastattn::FASTATTN_ISA {

// The dim of a matrix that is summed over, and the matrix's side of the product.
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

// The form of numbers of a dtype if they fit, and the form that holds all finite ones.
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
FASTATTN_SIMD void with_form([[maybe_unused]] Form form, F f) {
  if constexpr (!kHasTiles) return f(FormConstant<Form::kBf16>{});
  if (form == Form::kBf16) return f(FormConstant<Form::kBf16>{});
  if constexpr (kHasFp16) {
    if (form == Form::kHalf) return f(FormConstant<Form::kHalf>{});
    if (form == Form::kTwoHalves) return f(FormConstant<Form::kTwoHalves>{});
  } else {
    if (form == Form::kTwoBf16) return f(FormConstant<Form::kTwoBf16>{});
  }
  f(FormConstant<Form::kThreeBf16>{});
}

// The factor of queries, keys and values.
constexpr float input_unit(DType dtype) {
  return form_of(dtype) == Form::kTwoHalves ? 0x1p7f : 1.f;
}
constexpr float kSmallestHalf = 0x1p1f, kLargestHalf = 0x1p15f;  // of a row, in units

// The factor of weights: this many octaves keep all bits of most weights below 1. More than 8 times
// this factor would overflow. Dropout's factor is made 1 at most.
constexpr int weight_octaves(Form form) { return kHasFp16 && form != Form::kBf16 ? 13 : 0; }
FASTATTN_SIMD float dropout_unit(const AttentionParams& p) {
  float unit = 1.f;
  for (float most = 1.f; p.dropout.enabled && most < p.dropout.scale; most *= 2.f) unit *= 0.5f;
  return is_fp16(form_of(p.q.dtype)) ? unit : 1.f;
}

// Distance between the two elements of a word, and between the first elements of two words.
constexpr int64_t word_step(Form form) { return is_fp16(form) ? 1 : kEdge; }
constexpr int64_t words_apart(Form form) { return is_fp16(form) ? 2 : 1; }

// The parts of a vector of numbers.
template <Form kForm>
struct Parts {
  static constexpr int kParts = parts_of(kForm);
  using Part = std::conditional_t<is_fp16(kForm), VecHalf, Vec>;
  Part part[kParts];
};

// x as parts. The last of several parts may have extra bits; words_of() cuts them.
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
      // The first part is rounded: the others then have either sign, and errors do not add up.
      out.part[p] = from_bits((bits_of(x) + (p == 0 ? 0x8000 : 0)) & ~0xffff);
      x -= out.part[p];
    }
    out.part[kParts - 1] = x;
  }
  return out;
}

// The upper halves of two words, side by side, in two operations.
FASTATTN_SIMD VecI upper_halves(Vec low, Vec high) {
  constexpr int kSelect = 0xf8;  // a | (b & c)
  return (VecI)_mm512_ternarylogic_epi32((__m512i)((VecU)low >> 16), (__m512i)high,
                                         _mm512_set1_epi32(~0xffff), kSelect);
}

// Words of the numbers `low` and `high` side by side. A single bf16 part is rounded to nearest, if
// it is not exact.
template <Form kForm, bool kExact, typename Part>
FASTATTN_SIMD VecI words_of(Part low, Part high) {
  if constexpr (is_fp16(kForm)) {
    return (VecI)(widen(low) | widen(high) << 16);
  } else if constexpr (kForm == Form::kBf16 && !kExact) {
    // Four operations; the hardware's conversion takes twice as long. NaN must come from bf16 or be
    // canonical: rounding up the lowest bits of other NaN would change their sign.
    return upper_halves((Vec)((VecU)low + 0x8000u), (Vec)((VecU)high + 0x8000u));
  } else {
    return upper_halves(low, high);
  }
}

// Writes 32 elements of a row, in two vectors, as words of one row of a left tile, for each part.
template <Form kForm, bool kExact = false>
FASTATTN_SIMD void write_row(const Parts<kForm>& low, const Parts<kForm>& high, int32_t* tiles) {
  constexpr int kParts = parts_of(kForm);
#pragma GCC unroll 3
  for (int p = 0; p < kParts; ++p) {
    if constexpr (is_fp16(kForm)) {
      std::memcpy(tiles + p * kTileWords, &low.part[p], sizeof(low.part[p]));
      std::memcpy(tiles + p * kTileWords + kEdge / 2, &high.part[p], sizeof(high.part[p]));
    } else {
      const VecI words = words_of<kForm, kExact>(low.part[p], high.part[p]);
      std::memcpy(tiles + p * kTileWords, &words, sizeof(words));
    }
  }
}
// Likewise for 16 columns of two rows that are word_step() apart.
template <Form kForm, bool kExact = false>
FASTATTN_SIMD void write_column_words(const Parts<kForm>& low, const Parts<kForm>& high,
                                      int32_t* tiles) {
  constexpr int kParts = parts_of(kForm);
#pragma GCC unroll 3
  for (int p = 0; p < kParts; ++p) {
    const VecI words = words_of<kForm, kExact>(low.part[p], high.part[p]);
    std::memcpy(tiles + p * kTileWords, &words, sizeof(words));
  }
}

}  // namespace fastattn::FASTATTN_ISA
