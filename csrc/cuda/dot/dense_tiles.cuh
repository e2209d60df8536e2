// What a dense mask keeps of each tile of 64 queries x 64 keys, found once by a kernel that reads
// the mask before those of wgmma_block.cuh and wgmma_grads.cuh. Their blocks leave out tiles of
// which nothing is kept. Their consumers mask a tile with one word a thread, and only where pairs
// are missing. Heads that share a mask share all of this
// (docs/decisions/0035-tiles-of-dense-masks.md).
#pragma once

#include "cuda/base/launcher.cuh"
#include "cuda/tile/half_tile.cuh"

namespace fastattn::cuda {

// A bit says that some pair is kept, the next one that some is not. Parts make a whole by `or`.
enum Kept : uint8_t { kKeepsAll = 1, kKeepsNone = 2, kKeepsSome = 3 };

// By tile: what is kept, and the bits of each thread of a warpgroup, for either layout.
struct DenseTiles {
  Kept* kept;                      // nullptr: no dense mask
  KeepBits *of_queries, *of_keys;  // [tiles][kThreads]; for QueryRows, and for KeyRows
  uint32_t stride_b, stride_h, stride_m, stride_n;  // 0 where the mask is the same
  int tiles_m, tiles_n;                             // of all queries and keys

  FASTATTN_FN uint32_t at(const DenseTiles& x, int b, int h, int m, int n) {
    return b * x.stride_b + h * x.stride_h + m * x.stride_m + n * x.stride_n;
  }
};

FASTATTN_FN int tiles_in(int64_t size) { return static_cast<int>(ceil_div(size, kTile)); }

// Whether 32 bits number the words of all tiles. A mask of as many tiles has 128 GiB, or is tiny.
bool has_dense_tiles(const AttentionParams& p);
constexpr int64_t kMostNumbers = (int64_t{1} << 32) - 1;

// Bytes of these tables, those of keys included if `both`. They begin at a multiple of 4.
int64_t dense_tile_bytes(const AttentionParams& p, bool both);
DenseTiles make_dense_tiles(const AttentionParams& p, bool both, void* memory, Launcher& launcher);

// What is kept of the tiles [m0, m1) x [n0, n1) of a head, as far as there are such.
FASTATTN_DEVICE Kept kept_of(const DenseTiles& tiles, int b, int h, int m0, int m1, int n0,
                             int n1) {
  if (tiles.kept == nullptr) return kKeepsAll;
  int kept = 0;
  for (int m = m0; m < min(m1, tiles.tiles_m); ++m)
    for (int n = n0; n < min(n1, tiles.tiles_n); ++n)
      kept |= tiles.kept[DenseTiles::at(tiles, b, h, m, n)];
  return static_cast<Kept>(kept);
}

// This thread's bits of the tile at `at`, which begins at a multiple of 8 keys.
template <typename Layout>
FASTATTN_DEVICE KeepBits dense_bits(const DenseTiles& tiles, const Place& at) {
  const KeepBits* const words = Layout::kLinesAreKeys ? tiles.of_keys : tiles.of_queries;
  const int m = static_cast<int>(at.i0 / kTile), n = static_cast<int>(at.j0 / kTile);
  const auto word = [&](int which) {
    // Kept over their loop, the number would make dK and dV spill; asked for anew, heads of 256.
    const int self = (Layout::kLinesAreKeys ? opaque_here(thread()) : thread()) % kThreads;
    return words[DenseTiles::at(tiles, at.b, at.h, m, which) * kThreads + self];
  };
  if constexpr (8 * Layout::kTiles == kTile) return word(n);
  const int first = static_cast<int>(at.j0 % kTile) / 8 * 4;  // a thread has 4 bits of 8 keys
  const bool goes_on = first > 0 && n + 1 < tiles.tiles_n;
  return static_cast<KeepBits>((uint64_t{goes_on ? word(n + 1) : 0} << 32 | word(n)) >> first);
}

}  // namespace fastattn::cuda
