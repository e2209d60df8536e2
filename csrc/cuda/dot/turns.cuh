// The loop of dQ, and that of dK and dV, over the tiles that pass by. A turn finds the next tile
// that is not empty, and computes the one that the turn before has found:
//
//   for tile n
//     mask of tile n; on to the next n if it is empty
//     copy K (or Q) of tile n begins      in a second place: the last product reads the first
//     gradient_tile() of the tile before  reads V and the stats for the last time
//     copy V (or dO, the stats) of n      dO only behind the product that reads it
//     last product of the tile before
//
// No inner loop looks for a tile: with one, dK and dV would spill. Registers are full of sums, so
// the tiles are in shared memory, and are read where they are used.
#pragma once

#include "cuda/dot/backward.cuh"

namespace fastattn::cuda {

// A tile that passes by; or none, before the first and behind the last one.
struct Turn {
  Place at;
  bool none, full;
};

template <int kDim>
struct __align__(16) PassingMemory {
  GradMemory<kDim> tile;
  uint16_t other[kTile * kDim];  // the second place
  Turn turns[2];
  uint32_t left;  // for_tiles()
};

// Compute capability 8.0 has 164 KiB in an SM. A block takes 1 KiB besides its own.
static_assert(2 * (sizeof(PassingMemory<kMostColumns>) + 1024) <= 164 << 10);

template <int kDim>
struct Turns {
  PassingMemory<kDim>& memory;
  KeepBits bits = 0;
  int odd = 0;

  // Before a barrier: what stays.
  __device__ __forceinline__ void begin(const Place& at) {
    if (thread() == 0) memory.turns[0] = {at, true, false};
  }
  __device__ __forceinline__ const Turn& here() const { return memory.turns[opaque_here(odd)]; }
  __device__ __forceinline__ const Turn& next() const { return memory.turns[opaque_here(odd ^ 1)]; }
  __device__ __forceinline__ TileMask mask() const { return {bits, false, here().full}; }

  // Places of this turn's tile and of the next one.
  __device__ __forceinline__ uint16_t* place(uint16_t* first) const {
    return odd ? memory.other : first;
  }
  __device__ __forceinline__ uint16_t* next_place(uint16_t* first) const {
    return odd ? first : memory.other;
  }

  // Waits for the copies of this turn. Others have then left the places of the turn before.
  __device__ __forceinline__ void wait() const {
    if (here().none) return;
    wait_for_copies();
    __syncthreads();
  }
  // Before a barrier.
  __device__ __forceinline__ void set_next(const Place& at, const TileMask& mask) {
    if (thread() == 0) memory.turns[odd ^ 1] = {at, mask.empty, mask.full};
  }
  __device__ __forceinline__ void go_on(KeepBits of_next) { bits = of_next, odd ^= 1; }
};

}  // namespace fastattn::cuda
