// The path of a problem through the CPU kernels: what cpu/choose.h decides, once a call, and what
// all below is told. None of it changes a result by more than the order of sums.
#pragma once

#include <cstdint>

namespace fastattn {

// Which score and values the loops run with. The last four are tiles of the matrix unit, queries x
// keys.
enum class Way {
  kTiles,        // keys and values are packed, a tile at a time
  kRowsInPlace,  // few queries: keys are read where they lie
  kOneQuery,     // the additive score with one query a key head
  kUnit256x128,
  kUnit64x256,
  kUnit64x128,
  kUnit64x64,
};

struct Path {
  Way way;
  bool heads_as_rows;          // query heads that share keys have become rows of one head
  bool heads_together;         // a task takes all query heads that share keys
  bool values_in_place;        // forward: likewise for values
  int64_t chunk_keys, chunks;  // of the keys of a head, how many a task takes
  double parallel_work;        // multiply-adds from which on a sweep uses other threads
};

}  // namespace fastattn
