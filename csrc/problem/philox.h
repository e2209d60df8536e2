// Dropout bits: Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011; 7 is the fewest rounds that pass BigCrush), a pure function of (seed, b, h, i, j),
// the same in every backend:
//
//   counter = (j / 4, i, h, b)      key = (low, high half of seed)      bits = output word j % 4
//
// with the indices that a weight of a block has in the whole problem. Backward draws the same bits
// again, so nothing of size M x N is stored. cpu/tile/dropout.h has the vector form, and
// fastattn/problem/record.py the definition in PyTorch. Tests compare them bit for bit.
#pragma once

#include "problem/host_device.h"
#include "problem/params.h"

namespace fastattn {

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMul0 = 0xD2511F53u, kPhiloxMul1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;

struct PhiloxBlock {
  uint32_t word[4];
};

FASTATTN_FN PhiloxBlock philox4x32(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2,
                                   uint32_t c3) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t prod0 = static_cast<uint64_t>(kPhiloxMul0) * c0;
    const uint64_t prod1 = static_cast<uint64_t>(kPhiloxMul1) * c2;
    c0 = static_cast<uint32_t>(prod1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(prod1);
    c2 = static_cast<uint32_t>(prod0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(prod0);
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  return {{c0, c1, c2, c3}};
}

// The counters of the weight (b, h, i, j).
FASTATTN_FN Counters counters_of(const DropoutParams& dropout, int64_t b, int64_t h, int64_t i,
                                 int64_t j) {
  const Counters& first = dropout.first;
  return {first.j4 + static_cast<uint32_t>(j / 4), first.i + static_cast<uint32_t>(i),
          first.h + static_cast<uint32_t>(h), first.b + static_cast<uint32_t>(b)};
}

}  // namespace fastattn
