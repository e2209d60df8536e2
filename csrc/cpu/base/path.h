// The path of a problem through the CPU kernels. cpu/choose.h decides it once a call, and all code
// below receives it. A path changes results only by the order of sums.
#pragma once

#include <cstdint>

namespace fastattn {

// The score and values that the loops run with. The last four are tile sizes of the matrix unit,
// queries x keys.
enum class Way {
  kTiles,        // keys and values are packed, a tile at a time
  kRowsInPlace,  // few queries: keys are read where they lie
  kOneQuery,     // the additive score with one query a key head
  kUnit256x128,
  kUnit64x256,
  kUnit64x128,
  kUnit64x64,
};

constexpr bool is_on_unit(Way way) { return way >= Way::kUnit256x128; }

struct Path {
  Way way;
  bool heads_as_rows;          // query heads that share keys have become rows of one head
  bool heads_together;         // a task takes all query heads that share keys
  bool values_in_place;        // forward: values are read where they lie
  bool values_by_row;          // forward: each row sums its values in short chains
  int64_t chunk_keys, chunks;  // keys of a head that a task takes
  double parallel_work;        // a sweep with more multiply-adds uses other threads
};

}  // namespace fastattn
