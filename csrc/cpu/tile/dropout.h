// The factors of dropout: the bits of philox.h, a vector at a time.
#pragma once

#include "cpu/base/scratch.h"
#include "cpu/base/shared.h"
#include "problem/philox.h"

namespace fastattn::FASTATTN_ISA {

// Four vectors of words, one counter a lane: word w of lane l belongs to column 4 l + w.
struct PhiloxWords {
  VecU word[4];
};

// philox4x32() of problem/philox.h for the counters (c0 + lane, c1, c2, c3).
FASTATTN_SIMD PhiloxWords philox_lanes(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2,
                                       uint32_t c3) {
  VecU x0 = (VecU)iota() + c0, x1 = splat_u(c1), x2 = splat_u(c2), x3 = splat_u(c3);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const WideProduct p0 = multiply_wide(x0, kPhiloxMul0), p1 = multiply_wide(x2, kPhiloxMul1);
    x0 = p1.high ^ x1 ^ key0;
    x1 = p1.low;
    x2 = p0.high ^ x3 ^ key1;
    x3 = p0.low;
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  return {{x0, x1, x2, x3}};
}

// Where a tile lies.
struct TilePlace {
  int64_t b, h, i0, rows, j0, cols;
};

// to[c] = the factor of the weight in row i and column c of a tile: 0 or 1 / (1 - p). Its j0 is a
// multiple of 4; `to` has room for its columns rounded up to 4 kWidth.
FASTATTN_SHARED void dropout_row(const DropoutParams& dropout, const TilePlace& at, int64_t i,
                                 float* to);

#ifdef FASTATTN_SHARED_CODE
FASTATTN_SHARED void dropout_row(const DropoutParams& dropout, const TilePlace& at, int64_t i,
                                 float* to) {
  for (int64_t c = 0; c < at.cols; c += 4 * kWidth) {
    const Counters first = counters_of(dropout, at.b, at.h, at.i0 + i, at.j0 + c);
    const PhiloxWords bits = philox_lanes(dropout.seed, first.j4, first.i, first.h, first.b);
    Vec word[4];
    for (int w = 0; w < 4; ++w)
      word[w] = bits.word[w] >= dropout.threshold ? splat(dropout.scale) : Vec{};
    interleave4(word);
    for (int w = 0; w < 4; ++w) store(to + c + w * kWidth, word[w]);
  }
}
#endif  // FASTATTN_SHARED_CODE

}  // namespace fastattn::FASTATTN_ISA
