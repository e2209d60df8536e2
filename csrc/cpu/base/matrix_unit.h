// The instructions of the matrix unit (AMX): eight tile registers of 16 rows of 64 bytes.
//
// They are written as assembly: a register of an intrinsic must be a literal. Compilers know the
// product of fp16 tiles only from GCC 13 and Clang 16 on, and assemblers from binutils 2.40 on.
// FASTATTN_IN_SOFTWARE takes their meaning in C++ instead, from tests/cpu/software/matrix_unit.h.
//
// Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2, TDPBF16PS, TDPFP16PS.
#pragma once

#include <cstdint>

#include "cpu/base/simd.h"

namespace fastattn::FASTATTN_ISA {

constexpr int64_t kEdge = 16;        // rows or columns of a tile
constexpr int64_t kTileDepth = 32;   // elements in a row of a tile
constexpr int64_t kTileWords = 256;  // pairs of elements in a tile
constexpr int64_t kTileLine = 64;    // bytes in a row of a tile

// As the hardware reads it.
struct UnitConfiguration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(UnitConfiguration) == 64, "fixed by the instruction set");

#ifdef __AMX_BF16__
constexpr bool kHasTiles = true;

#ifdef FASTATTN_IN_SOFTWARE
}  // namespace fastattn::FASTATTN_ISA
#include <matrix_unit.h>
namespace fastattn::FASTATTN_ISA {
#else
FASTATTN_SIMD void configure_unit(const UnitConfiguration& all) {
  asm volatile("ldtilecfg %0" ::"m"(all));
}
FASTATTN_SIMD void release_unit() { asm volatile("tilerelease"); }

template <int kTile>
FASTATTN_SIMD void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// Rows of 64 bytes, `stride` bytes apart. The compiler does not know that memory is read.
template <int kTile>
FASTATTN_SIMD void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile));
}
template <int kTile>
FASTATTN_SIMD void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
// C += A B, of words of two bf16 or fp16 numbers: TDPBF16PS or TDPFP16PS.
template <bool kFp16, int kC, int kA, int kB>
FASTATTN_SIMD void multiply_tile_registers() {
  constexpr int kPrefix = kFp16 ? 3 : 2;  // of VEX: F2 or F3
  asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"((~kB & 15) << 3 | kPrefix),
               "i"(0xc0 | kC << 3 | kA));
}
#endif

// While an object lives, this thread can use the unit.
class MatrixUnit {
 public:
  MatrixUnit() {
    UnitConfiguration all{};
    all.palette = 1;
    for (int t = 0; t < 8; ++t) all.row_bytes[t] = kTileLine, all.rows[t] = kEdge;
    configure_unit(all);
  }
  ~MatrixUnit() { release_unit(); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};
#else
// With AVX512-BF16 alone, pairs.h multiplies the same words, where inputs are bf16.
constexpr bool kHasTiles = false;
struct MatrixUnit {};
#endif

}  // namespace fastattn::FASTATTN_ISA
