// The matrix unit's instructions in C++, as Intel's manual gives their meaning: csrc/cpu/base/
// matrix_unit.h includes this file where FASTATTN_IN_SOFTWARE is defined.
//
// A mistake ends the process: a register of a thread that did not configure the unit, or one that
// was not written since.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace fastattn::FASTATTN_ISA {

struct SoftwareUnit {
  bool configured = false;
  bool written[8] = {};
  VecU rows[8][16];

  void must(bool holds, const char* what) const {
    if (holds) return;
    std::fprintf(stderr, "the matrix unit in software: %s\n", what);
    std::abort();
  }
  const VecU* read(int tile) const {
    must(configured, "not configured");
    must(written[tile], "a register is read that nothing wrote");
    return rows[tile];
  }
  VecU* write(int tile) {
    must(configured, "not configured");
    written[tile] = true;
    return rows[tile];
  }
};
static thread_local SoftwareUnit software_unit;

static inline void configure_unit(const UnitConfiguration& all) {
  software_unit = {};
  software_unit.must(all.palette == 1 && all.start_row == 0, "palette 1 from row 0");
  for (int tile = 0; tile < 8; ++tile)
    software_unit.must(all.rows[tile] == 16 && all.row_bytes[tile] == 64, "tiles of full size");
  software_unit.configured = true;
}
static inline void release_unit() { software_unit = {}; }

template <int kTile>
static inline void zero_tile() {
  VecU* const tile = software_unit.write(kTile);
  for (int r = 0; r < 16; ++r) tile[r] = VecU{};
}
template <int kTile>
static inline void load_tile(const void* from, int64_t stride) {
  VecU* const tile = software_unit.write(kTile);
  for (int r = 0; r < 16; ++r)
    tile[r] = load_lanes<VecU>(static_cast<const char*>(from) + r * stride);
}
template <int kTile>
static inline void store_tile(void* to, int64_t stride) {
  const VecU* const tile = software_unit.read(kTile);
  for (int r = 0; r < 16; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, &tile[r], sizeof(VecU));
}

// The first or the second 16-bit number of each word.
template <bool kFp16, bool kSecond>
static inline Vec numbers_of(VecU words) {
  const VecU high = kSecond ? words : words << 16;
  if constexpr (!kFp16) return (Vec)(high & 0xffff0000u);
  const auto halves = __builtin_convertvector(high >> 16, VecHalf);
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
}

// C += A B. Even and odd numbers have sums of their own, which are added at the end.
template <bool kFp16>
__attribute__((noinline)) static void multiply_rows(const VecU* a, const VecU* b, VecU* c) {
  Vec even[16], odd[16];
  for (int k = 0; k < 16; ++k)
    even[k] = numbers_of<kFp16, false>(b[k]), odd[k] = numbers_of<kFp16, true>(b[k]);
  for (int m = 0; m < 16; ++m) {
    Vec sums[2] = {};
    for (int k = 0; k < 16; ++k) {
      const VecU left = splat_u(a[m][k]);
      sums[0] = multiply_add(numbers_of<kFp16, false>(left), even[k], sums[0]);
      sums[1] = multiply_add(numbers_of<kFp16, true>(left), odd[k], sums[1]);
    }
    c[m] = (VecU)((Vec)c[m] + (sums[0] + sums[1]));
  }
}

// Denormals are flushed, except those of fp16, whatever the modes of the thread are.
template <bool kFp16, int kC, int kA, int kB>
static inline void multiply_tile_registers() {
  constexpr unsigned kFlushes = 0x9fc0;  // in both directions, rounds to nearest, never traps
  const VecU *const a = software_unit.read(kA), *const b = software_unit.read(kB);
  software_unit.read(kC);
  const unsigned modes = _mm_getcsr();
  _mm_setcsr(kFlushes);
  multiply_rows<kFp16>(a, b, software_unit.write(kC));
  _mm_setcsr(modes);
}

}  // namespace fastattn::FASTATTN_ISA
