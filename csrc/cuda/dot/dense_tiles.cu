#include "cuda/dot/dense_tiles.cuh"

namespace fastattn::cuda {
namespace {

// Rows of a tile's bytes in shared memory. Eight of them begin in different banks.
constexpr int kPitch = kTile + 16;
using TileBytes = uint8_t[kTile][kPitch];

// The bytes of a tile; 0 outside of rows x cols.
FASTATTN_DEVICE void load_bytes(const DenseMask& dense, int rows, int cols, TileBytes& to) {
  const uint8_t* const from = dense.data + dense.offset;
  const bool aligned = dense.stride_n == 1 && dense.stride_m % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(from) % 16 == 0;
  for (int n = thread(); n < kTile * kTile / 16; n += kThreads) {
    const int row = n / (kTile / 16), first = n % (kTile / 16) * 16;
    const uint8_t* const chunk = from + row * dense.stride_m + first * dense.stride_n;
    if (aligned && row < rows && first + 16 <= cols) {
      *reinterpret_cast<uint4*>(&to[row][first]) = *reinterpret_cast<const uint4*>(chunk);
      continue;
    }
#pragma unroll 4
    for (int m = 0; m < 16; ++m)
      to[row][first + m] = row < rows && first + m < cols ? chunk[m * dense.stride_n] : 0;
  }
}

template <typename Layout>
FASTATTN_DEVICE KeepBits bits_of(const TileBytes& bytes) {
  KeepBits bits = 0;
#pragma unroll
  for (int x = 0; x < Layout::kQueries; ++x)
#pragma unroll
    for (int y = 0; y < Layout::kKeys; ++y) {
      const int row = Layout::query0() + Layout::query(x), col = Layout::key0() + Layout::key(y);
      bits |= KeepBits{bytes[row][col] != 0} << Layout::pair(x, y);
    }
  return bits;
}

// Numbers of tiles along the axes of the mask.
FASTATTN_FN DenseSizes grid_of(const AttentionParams& p) {
  const DenseSizes sizes = dense_sizes(p);
  return {sizes.b, sizes.h, tiles_in(sizes.m), tiles_in(sizes.n)};
}
int64_t tiles_of(const AttentionParams& p) {
  const DenseSizes grid = grid_of(p);
  return has_dense(p.mask) ? grid.b * grid.h * grid.m * grid.n : 0;
}

// A block takes a tile.
__global__ void __launch_bounds__(kThreads)
    dense_tiles_kernel(const __grid_constant__ AttentionParams p, DenseTiles to) {
  TileBytes& bytes = *static_cast<TileBytes*>(shared_memory());
  const DenseSizes grid = grid_of(p);
  uint32_t number = blockIdx.x;
  const int64_t j0 = take_digit(&number, grid.n) * kTile, i0 = take_digit(&number, grid.m) * kTile;
  const int64_t h = take_digit(&number, grid.h);
  const int rows = extent(p.M, i0), cols = extent(p.N, j0);  // the first of all, if all are alike
  load_bytes(dense_from(p.mask, number, h, i0, j0), rows, cols, bytes);
  __syncthreads();
  const KeepBits bits = bits_of<QueryRows>(bytes), inside = bits_within<QueryRows>(rows, cols);
  const int64_t word = int64_t{blockIdx.x} * kThreads + thread();
  to.of_queries[word] = bits;
  if (to.of_keys != nullptr) to.of_keys[word] = bits_of<KeyRows>(bytes);
  const bool some = __syncthreads_or(bits != 0), missing = __syncthreads_or(bits != inside);
  if (thread() == 0) to.kept[blockIdx.x] = !some ? kKeepsNone : missing ? kKeepsSome : kKeepsAll;
}

}  // namespace

bool has_dense_tiles(const AttentionParams& p) { return tiles_of(p) <= kMostNumbers / kThreads; }

int64_t dense_tile_bytes(const AttentionParams& p, bool both) {
  return tiles_of(p) * ((both ? 2 : 1) * kThreads * int64_t{sizeof(KeepBits)} + 1);
}

DenseTiles make_dense_tiles(const AttentionParams& p, bool both, void* memory, Launcher& launcher) {
  const int64_t tiles = tiles_of(p), words = tiles * kThreads;
  if (tiles == 0) return {};
  const DenseSizes grid = grid_of(p);
  const auto stride = [](int64_t size, int64_t inner) {
    return size == 1 ? 0 : static_cast<uint32_t>(inner);
  };
  KeepBits* const bits = static_cast<KeepBits*>(memory);
  const DenseTiles made = {reinterpret_cast<Kept*>(bits + (both ? 2 : 1) * words),
                           bits,
                           both ? bits + words : nullptr,
                           stride(grid.b, grid.h * grid.m * grid.n),
                           stride(grid.h, grid.m * grid.n),
                           stride(grid.m, grid.n),
                           stride(grid.n, 1),
                           tiles_in(p.M),
                           tiles_in(p.N)};
  launcher.run(dense_tiles_kernel, tiles, kThreads, sizeof(TileBytes), p, made);
  return made;
}

}  // namespace fastattn::cuda
