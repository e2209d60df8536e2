// The path of a problem through the CPU kernels. cpu/choose.h decides it once a call, and all code
// below receives it. A path changes results only by the order of sums.
#pragma once

#include <cstdint>

namespace fastattn {

// The score and values that the loops run with.
enum class Way {
  kTiles,        // keys and values are packed, a tile at a time
  kRowsInPlace,  // few queries: keys are read where they lie
  kOneQuery,     // the additive score with one query a key head
  kMatrixUnit,
};

// Whether a task takes several query heads that share keys.
enum class Together { kNever, kIfFaster, kAlways };

// Queries x keys that a worker takes at a time.
struct TileSize {
  int64_t m, n;
};

struct Path {
  Way way;
  TileSize unit;       // of the matrix unit; other scores have tiles of one size
  bool heads_as_rows;  // query heads that share keys have become rows of one head
  Together heads_together;
  bool values_in_place;        // forward: values are read where they lie
  bool values_by_row;          // forward: each row sums its values in short chains
  int64_t chunk_keys, chunks;  // keys of a head that a task takes
  double parallel_work;        // a sweep with more work uses other threads
};

}  // namespace fastattn
