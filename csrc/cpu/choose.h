// Decides which path a problem takes (base/path.h). No other file of the CPU kernels does.
//
// Each constant names the machine it was measured on. Zen 3: AMD, AVX2, 512 KiB of L2 cache a core.
// Xeon: Intel with AMX, 2 MiB. A constant without a machine has no known measurement: it follows
// from sizes of tiles or of memory, or from a number of tasks.
//
// FASTATTN_CPU_PATH, read once, helps to find the short way that makes a row wrong. "tiles" turns
// all short ways off. The name of one forces that one wherever it can run, and turns off the
// others. Commas join several. "rows_in_place" forces keys alone: values are read in place for few
// queries only, because the sums of many would lose digits.
#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include "cpu/base/path.h"
#include "cpu/loop/plan.h"
#include "problem/heads_as_rows.h"

namespace fastattn::cpu {

// ---- the short ways ----

// Bits of a set.
enum ShortWay : unsigned {
  kHeadsAsRows = 1,
  kHeadsTogether = 2,
  kSplitKeys = 4,
  kRowsInPlace = 8,
  kOneQuery = 16,
  kMatrixUnit = 32,
  kOneThread = 64,
};

struct ShortWays {
  unsigned allowed = ~0u;
  bool forced = false;  // if true, allowed ways run even where they are not faster

  bool take(ShortWay way, bool pays) const { return (allowed & way) != 0 && (forced || pays); }
};

// The ways that the environment variable names; all of them for nullptr and unknown names.
FASTATTN_FN ShortWays short_ways(const char* names) {
  constexpr struct {
    std::string_view name;
    unsigned ways;
  } kNames[] = {
      {"tiles", 0},
      {"heads_as_rows", kHeadsAsRows},
      {"heads_together", kHeadsTogether},
      {"split_keys", kSplitKeys},
      {"rows_in_place", kRowsInPlace},
      {"one_query", kOneQuery},
      {"matrix_unit", kMatrixUnit},
      {"one_thread", kOneThread},
  };
  ShortWays named{0, true};
  for (std::string_view rest = names == nullptr ? "" : names;;) {
    const std::string_view name = rest.substr(0, rest.find(','));
    const auto* const known = std::find_if(std::begin(kNames), std::end(kNames),
                                           [&](const auto& x) { return x.name == name; });
    if (known == std::end(kNames)) return {};
    named.allowed |= known->ways;
    if (name.size() == rest.size()) return named;
    rest.remove_prefix(name.size() + 1);
  }
}

// What an instruction set has beside vectors of floats. kBFloat16: products of bf16 (AVX512-BF16).
// kTiles: a matrix unit for tiles of bf16 (AMX). kFp16Tiles: one for tiles of fp16 as well.
enum class Unit { kNone, kBFloat16, kTiles, kFp16Tiles };

// What a decision depends on, beside the problem.
struct Chooser {
  ShortWays ways;
  Unit unit;  // of the instruction set
};

// ---- both passes ----

// Rows in place: with at most this many queries, packing a tile costs more than reading it in
// place. With at least so many dims, that holds for a few more (Zen 4, with AVX-512 and with AVX2;
// Xeon with AVX-512). On Zen 3, 12 queries of 64 dims cost about the same either way.
constexpr int64_t kInPlaceRows = 8, kInPlaceMoreRows = 12, kInPlaceMoreDims = 64;
// Short chains: up to this many queries, each row sums its values so. The gradient of a bias that
// few rows share needs these digits. At 9 to 12 queries a call takes 2 to 4% longer (Zen 4).
constexpr int64_t kShortChainRows = 12;
// Matrix unit: laying out a row or a key costs what so many pairs (i, j) gain, times the products
// of tiles that a number takes (d32 to d128, Xeon: 0004). A tile of fewer queries costs as much.
constexpr int64_t kTilePairs = 10, kTileQueries = 16;
// AVX512-BF16: with at most this many pairs a head, it is left unused. Not measured on Zen 4.
constexpr int64_t kBFloat16Pairs = 16 * 64;
// One thread: waking others takes as long as about this much work, by pass_work() (Zen 3).
constexpr double kParallelWork = 1 << 20;

// Products of tiles for one product of numbers (score/amx/parts.h).
constexpr int64_t tile_products(Unit unit, DType dtype) {
  if (dtype == DType::kFloat32) return unit == Unit::kFp16Tiles ? 3 : 6;
  return dtype == DType::kFloat16 && unit == Unit::kTiles ? 3 : 1;
}
// Whether a unit takes less time than vectors.
FASTATTN_FN bool unit_pays(const AttentionParams& p, Unit unit) {
  if (unit == Unit::kBFloat16) return p.M > kInPlaceRows && p.M * p.N > kBFloat16Pairs;
  const int64_t laid_out = p.H * p.M + p.Hkv * p.N;  // heads that share keys share their layout
  const double least = static_cast<double>(kTilePairs * tile_products(unit, p.q.dtype) * laid_out);
  const int64_t rows = max64(1, ceil_div(p.M, kTileQueries)) * kTileQueries;
  const double share = static_cast<double>(p.M) / static_cast<double>(rows);
  return share * static_cast<double>(p.H) * band_pairs(p.mask, p.M, p.N) > least;
}
FASTATTN_FN bool uses_matrix_unit(const AttentionParams& p, const Chooser& chooser) {
  const bool has_unit =
      chooser.unit == Unit::kBFloat16 ? p.q.dtype == DType::kBFloat16 : chooser.unit != Unit::kNone;
  return has_unit && p.score == ScoreKind::kDot &&
         chooser.ways.take(kMatrixUnit, unit_pays(p, chooser.unit));
}
// Both passes must call this for the keys, so that both sum a score in the same order.
FASTATTN_FN bool is_in_place(const AttentionParams& p, const View& rows, const Chooser& chooser) {
  const bool pays = p.M <= (p.D >= kInPlaceMoreDims ? kInPlaceMoreRows : kInPlaceRows);
  return rows_are_contiguous(rows) && !uses_matrix_unit(p, chooser) &&
         chooser.ways.take(kRowsInPlace, pays);
}
// For the additive score. Each key has one pair, so an exponential a pair is as cheap as one a key.
FASTATTN_FN bool is_one_query(const AttentionParams& p, const Chooser& chooser) {
  return p.M == 1 && p.H == p.Hkv && rows_are_contiguous(p.k) && chooser.ways.take(kOneQuery, true);
}

FASTATTN_FN Way choose_way(const AttentionParams& p, const Chooser& chooser) {
  if (p.score == ScoreKind::kGaussian) return Way::kTiles;
  if (p.score == ScoreKind::kAdditive)
    return is_one_query(p, chooser) ? Way::kOneQuery : Way::kTiles;
  if (uses_matrix_unit(p, chooser)) return Way::kMatrixUnit;
  return is_in_place(p, p.k, chooser) ? Way::kRowsInPlace : Way::kTiles;
}

template <typename Params>
FASTATTN_FN Path start(Params* p, const Chooser& chooser) {
  Path path{};
  path.heads_as_rows = heads_can_be_rows(*p) && chooser.ways.take(kHeadsAsRows, true);
  if (path.heads_as_rows) take_heads_as_rows(p);
  const bool alone = chooser.ways.take(kOneThread, true);
  path.parallel_work = !alone ? 0 : chooser.ways.forced ? __builtin_inf() : kParallelWork;
  return path;
}

// ---- forward ----

// With few queries over many keys (decoding), only the keys can be split among threads. They are
// cut into chunks, and the partial results are merged in order. Chunks depend on M and N only, so a
// row's result does not depend on its batch. At 32 keys a query, partial results take at most 1/32
// of the memory of V.
constexpr int64_t kChunkKeys = 1152;  // whole tiles of 64, 96 or 128 keys
constexpr int64_t kKeysPerQuery = 32;

// The matrix unit sleeps after 0.7 us, and takes 0.27 us to wake (Xeon). Tiles are therefore large,
// unless small ones can be skipped. Their number of rows does not change a row's result.
FASTATTN_FN TileSize forward_unit(const AttentionParams& p, Unit unit) {
  // Always one size: weights are rounded to bf16 below the maximum of the tiles so far.
  if (unit == Unit::kBFloat16) return {64, 128};
  if (dense_varies_by_row(p.mask)) return {64, 64};
  const bool skips = !band_keeps_all(p.mask, p.M, p.N) || p.bias.data != nullptr;
  return {p.M > 64 && !skips ? 256 : 64, 128};
}

// Whether products read V where it lies. A copy serves few queries, and without a mask nobody asks
// whether V is finite. Rows are whole vectors of every instruction set, one behind the other and
// narrow. Wider rows of many keys share sets of the L1 cache, and take 1.2 to 1.7 times as long as
// a copy. Narrow ones take 0.87 to 0.97 of the time (Zen 3; other processors were not measured).
constexpr int64_t kCopiedRows = 64;
constexpr int64_t kNarrowRow = 64;  // floats
FASTATTN_FN bool multiplies_in_place(const AttentionParams& p) {
  return p.M <= kCopiedRows && p.v.dtype == DType::kFloat32 && rows_are_contiguous(p.v) &&
         p.v.stride_r == p.E && p.E <= kNarrowRow && p.E % 16 == 0 && keeps_all(p.mask, p.M, p.N) &&
         p.bias.data == nullptr;
}

// Also turns heads of `p` into rows if the path says so.
FASTATTN_FN Path choose_forward(ForwardParams* p, const Chooser& chooser) {
  Path path = start(p, chooser);
  path.way = choose_way(*p, chooser);
  path.unit = forward_unit(*p, chooser.unit);
  path.values_by_row = p->M <= kShortChainRows;  // on every path, so that no path sums worse
  path.values_in_place =
      path.values_by_row ? is_in_place(*p, p->v, chooser) : multiplies_in_place(*p);
  path.heads_together = !chooser.ways.take(kHeadsTogether, true) ? Together::kNever
                        : chooser.ways.forced                    ? Together::kAlways
                                                                 : Together::kIfFaster;
  path.chunk_keys = max64(1, p->N);
  if (chooser.ways.take(kSplitKeys, true))
    path.chunk_keys = max64(1, kKeysPerQuery * p->M / kChunkKeys) * kChunkKeys;
  path.chunks = max64(1, ceil_div(p->N, path.chunk_keys));
  return path;
}

// ---- backward ----

constexpr int64_t kBackwardTasks = 16;  // enough tasks to keep a few cores busy and even out
// Chunks are multiples of this: 192 keys are whole tiles of 64 or 96. A tile of the additive score
// is computed as its largest numbers require, so its tiles must be those of the forward pass.
FASTATTN_FN int64_t backward_keys(const BackwardParams& p) {
  return p.score == ScoreKind::kAdditive ? 256 : 192;
}
// More than 4 chunks only if their gradients of q fit into this many bytes.
constexpr int64_t kBackwardBytes = 32ll << 20;

// Tiles are as small as blocks of a mask may be. With one part a number (bf16), products are so
// fast that the other costs of a tile matter more. With twice the rows, the sums of dK and dV are
// read and written half as often (Xeon). A band has few whole tiles of so many rows.
FASTATTN_FN TileSize backward_unit(const AttentionParams& p, Unit unit) {
  if (unit == Unit::kBFloat16) return {64, 128};
  const bool one_part = p.q.dtype == DType::kBFloat16;
  if (dense_varies_by_row(p.mask)) return {64, one_part ? 128 : 64};
  return {one_part && p.M > 64 && band_keeps_all(p.mask, p.M, p.N) ? 128 : 64, 256};
}

FASTATTN_FN int64_t backward_chunk_keys(const BackwardParams& p) {
  const BackwardGroups groups = backward_groups(p);
  const int64_t grad_q_bytes = max64(1, 4 * p.B * p.H * p.M * p.D);
  const int64_t most = max64(4, kBackwardBytes / grad_q_bytes);
  const int64_t wanted = ceil_div(kBackwardTasks, max64(1, groups.b * groups.h));
  const int64_t chunks = max64(1, min64(most, wanted));
  return max64(1, ceil_div(p.N, chunks * backward_keys(p))) * backward_keys(p);
}

FASTATTN_FN Path choose_backward(BackwardParams* p, const Chooser& chooser) {
  Path path = start(p, chooser);
  path.way = choose_way(*p, chooser);
  path.unit = backward_unit(*p, chooser.unit);
  const bool split = chooser.ways.take(kSplitKeys, true);
  path.chunk_keys = split ? backward_chunk_keys(*p) : max64(1, p->N);
  path.chunks = max64(1, ceil_div(p->N, path.chunk_keys));
  return path;
}

// ---- in words ----

FASTATTN_FN const char* name_of(Way way) {
  switch (way) {
    case Way::kTiles:
      return "tiles";
    case Way::kRowsInPlace:
      return "rows in place";
    case Way::kOneQuery:
      return "one query";
    case Way::kMatrixUnit:
      return "matrix unit";
  }
  return "";
}

FASTATTN_FN std::string name_of(const Path& path) {
  std::string name = path.heads_as_rows ? "heads as rows, " : "";
  name += name_of(path.way);
  if (path.way == Way::kMatrixUnit)
    name += " " + std::to_string(path.unit.m) + "x" + std::to_string(path.unit.n);
  if (path.chunks > 1) name += ", keys in " + std::to_string(path.chunks) + " chunks";
  return name;
}

}  // namespace fastattn::cpu
