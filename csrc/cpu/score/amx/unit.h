// Products on the matrix unit (AMX). It multiplies tiles of bf16, or of fp16 with AMX-FP16, and
// accumulates in fp32.
//
//   part          a 16-bit summand of a number
//   word          two elements of one part, 32 bits
//   tile          16 x 16 words of one part
//   operand       a matrix as tiles, those of all parts of a place side by side
//   edge, depth   the dim of an operand that the product keeps, and the one it sums over
//   unit          the matrix unit; of an operand, the power of 2 that it is multiplied by
//   outlier row   a row that does not fit the form of its dtype
//
// Operands of any dtype are split into parts, x = x1 + x2 + ..., as their Form says. A bf16 part
// has 8 bits, an fp16 part 11. Only those products of parts are added that matter at the operand's
// own precision:
//
//   form         of    products of parts                          left out, of |a b| at most
//   kThreeBf16   fp32  a1 b3, a1 b2, a2 b2, a2 b1, a3 b1, a1 b1   2^-25
//   kTwoHalves   fp32  a1 b2, a1 b1, a2 b1                        2^-22
//   kTwoBf16     fp16  the same                                   2^-17
//   kBf16, kHalf       a1 b1
//
// This is as accurate as fp32 multiply-adds, at a sixth or third of the unit's rate. The unit is 16
// times as fast as they are. kTwoHalves also drops up to 2^-23 |x| of each x. Both errors have
// either sign, and together are less than 32 or more fp32 additions round off.
//
// fp16 holds numbers from 2^-24 to 2^16. Operands are therefore multiplied by a power of 2, their
// unit. The largest number of each row must then lie in (2, 2^15]. Other rows need kThreeBf16, and
// so does a tile in which a pair (i, j) of such a row matters (choose_form()). bf16 holds all
// sizes, but the unit flushes denormals. A row stands apart if its largest number lies outside
// [2^-60, 2^60] or is not finite. Such rows are packed as zeros and multiplied in fp32
// (*_rows_apart()). Sums are flushed too: results and gradients below 1e-33 lose bits; plain fp32
// loses them at 1e-38. Sums of fp16 parts, in units, overflow from 2^107 (outputs) or 2^114
// (scores) on. Weights below 2^-38 of the largest in their row are 0.
//
//   tile of the left operand    16 rows x 16 words: row r, word k = elements k, k + 16 of 32 (bf16)
//                               or 2 k, 2 k + 1 (fp16)
//   tile of the right operand   16 words x 16 columns, the same transposed
//   C, one tile or two          stays in tile registers
//
// Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
// higher-precision computations", 2019.
#pragma once

#include "cpu/base/matrix_unit.h"
#include "cpu/tile/rows_in_place.h"
#include "problem/mask.h"

namespace fastattn::FASTATTN_ISA {

// While an object lives, vector instructions of this thread flush denormals to 0.
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

}  // namespace fastattn::FASTATTN_ISA
