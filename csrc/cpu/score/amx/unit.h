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

#include "cpu/tile/rows_in_place.h"
#include "problem/mask.h"

namespace fastattn::FASTATTN_ISA {
constexpr int64_t kEdge = 16;        // rows or columns of a tile
constexpr int64_t kTileDepth = 32;   // elements of a row of it
constexpr int64_t kTileWords = 256;  // pairs of elements in it
constexpr int64_t kTileLine = 64;    // bytes of a row of it

#ifdef __AMX_BF16__
constexpr bool kHasTiles = true;

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
#else
// AVX512-BF16 alone stands in for the unit where inputs are bf16: pairs.h multiplies the same
// words.
constexpr bool kHasTiles = false;
struct MatrixUnit {};
#endif

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

}  // namespace fastattn::FASTATTN_ISA
