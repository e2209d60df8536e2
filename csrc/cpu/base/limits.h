// The loops of cpu/entry/limits.cpp, which show what a machine can do at most.
#pragma once

#include <cstdint>

namespace fastattn {

// What a loop repeats, and what it counts. bench/limits.py has the same order.
enum class Loop {
  kMultiplyAdd,   // fp32 multiply-adds of vectors; FLOP
  kPairs,         // AVX512-BF16 products of pairs; FLOP
  kTiles,         // products of bf16 tiles on the matrix unit; FLOP
  kExp2,          // exponentials of a softmax
  kExp2OfHalf,    // likewise, of weights that become bf16
  kAdditive,      // the score loop of score/additive/tile.h; elements
  kAdditiveGrad,  // its loop of gradients; elements
  kGaussian,      // the score loop of score/gaussian.h; elements
  kRead,          // memory; bytes
};

struct LoopCall {
  Loop loop;
  int64_t rounds;
  const float* memory;  // for kRead; all threads share it
  int64_t floats;
};

}  // namespace fastattn
