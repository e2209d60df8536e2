"""Mistakes in the dot product's kernels of warpgroups."""

from mistakes import (
    Mistake,
    of_dense,
    of_file,
    of_grads,
    of_large_heads,
    of_limits,
    of_warpgroups,
)

WARPGROUPS = [
    of_warpgroups(
        "a descriptor: the distance between groups of rows",
        "kAlongRows = {0, 8 * kRowBytes}", "kAlongRows = {0, 4 * kRowBytes}", "AssertionError",
    ),
    of_warpgroups(
        "a descriptor: the distance between panels",
        "= {kKeys * kRowBytes,", "= {kTile * kRowBytes,", "AssertionError",
    ),
    of_warpgroups(
        "a descriptor: panels of a tile of 80 keys", "n / 4 * rows * kRowBytes",
        "n / 4 * 128 * kRowBytes", "AssertionError",
    ),
    of_warpgroups(
        "masks of a tile of 80 keys: its other half",
        "at.j0 = j0 + n * 8 * Half::kTiles", "at.j0 = j0 + n * kTile", "AssertionError",
    ),
    of_warpgroups(
        "copies of a tile of 80 keys: the next tile", "tile * kKeys, at.hkv", "tile * 128, at.hkv",
        "AssertionError", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "a kernel with a softcap that caps nothing",
        "if constexpr (kCurved) curve_scores(p, s);", "", "AssertionError",
    ),
    of_warpgroups(
        "a softcap that no masked tile has",
        "if constexpr (kCurved) curve_scores", "if constexpr (kCurved && !kMasked) curve_scores",
        "AssertionError",
    ),
    of_large_heads(
        "a large head: the other columns of the values", "a.p.v = from_column(v, first)",
        "a.p.v = v",
    ),
    of_large_heads(
        "a large head: the other columns of the result", "a.p.out = from_column(out, first)",
        "a.p.out = out",
    ),
    of_warpgroups(
        "no fence after the barriers are initialised", "  publish_barriers();\n", "",
        "a barrier that only its own thread can see", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "half the bytes expected", "arrive_and_expect(full, sizeof(to))",
        "arrive_and_expect(full, sizeof(to) / 2)", "RuntimeError", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "the producer does not wait for a free stage",
        "    wait_for_phase(&memory.k_empty[to.number], to.parity ^ 1);\n", "",
        "more arrivals at a barrier", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "the producer waits for the wrong phase", "v_empty[to.number], to.parity ^ 1",
        "v_empty[to.number], to.parity", "deadlock", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "queries that come while others read the last ones",
        "    wait_for_phase(&memory.q_empty[group], turn % 2 ^ 1);\n", "",
        "Error", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "queries are left before their last scores",
        "    first(n < masked);\n",
        "    release(&memory.q_empty[group]);\n    first(n < masked);\n", "Error",
    ),
    of_warpgroups(
        "the next queries in the wrong phase", "q_full[group], turn % 2)", "q_full[group], 0)",
        "Error",
    ),
    of_warpgroups(
        "tiles of the queries before", "      memory.counts[group] = counts;\n",
        "      if (turn == 0) memory.counts[group] = counts;\n", "Error", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "sums of the queries before", "    clear(o);\n", "", "AssertionError",
    ),
    of_warpgroups(
        "a round's last block skips one", "if (n / each % blocks != 0) n +=", "n +=",
        "AssertionError", "wgmma_tiles.cuh",
    ),
    of_warpgroups(
        "pairs: no tile from the other end", "? place / 2 : list - 1 - place / 2",
        "? place / 2 : place / 2",
        "AssertionError", "wgmma_tiles.cuh",
    ),
    of_warpgroups(
        "scores are read while they are made", "    wait_for_products<kBeside ? 1 : 0>();\n", "",
        "Error",
    ),
    of_warpgroups(
        "products of keys that have not come",
        "    wait_for_phase(&memory.k_full[of_scores.number], of_scores.parity);\n    start_scores",
        "    start_scores", "Error",
    ),
    of_warpgroups(
        "no fence before a group", "hold(o);\n  fence_products();\n", "hold(o);\n",
        "a product without a fence",
    ),
    of_warpgroups(
        "weights are written while a product reads them",
        "      wait_for_products<0>();\n      take_values();\n    }\n",
        "      pack_weights<kType>(s, w);\n      wait_for_products<0>();\n      take_values();\n"
        "    }\n", "AssertionError",
    ),
    of_warpgroups(
        "the producer keeps its registers", "    give_registers<Of::kProducerRegisters>();\n", "",
        "deadlock", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "values are given back while a product reads them",
        "      wait_for_products<0>();\n      take_values();\n    }\n",
        "      take_values();\n      wait_for_products<0>();\n    }\n", "AssertionError",
    ),
    of_grads(
        "gradients, a descriptor: the distance between panels",
        "kDownColumns<kTile>)", "kDownColumns<2 * kTile>)", "AssertionError",
    ),
    of_grads(
        "gradients, a descriptor: the wrong operand passes by",
        "stage.number * kStage + kPassing), of_weights", "stage.number * kStage), of_weights",
        "AssertionError",
    ),
    of_grads(
        "gradients: no fence after the barriers are initialised", "  publish_barriers();\n", "",
        "a barrier that only its own thread can see", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: half the bytes expected", "arrive_and_expect(full, sizeof(memory.passing[0]))",
        "arrive_and_expect(full, sizeof(memory.passing[0]) / 2)", "RuntimeError",
        "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: operands that come while others read the last ones",
        "    wait_for_phase(&memory.own_empty, turn % 2 ^ 1);\n", "", "Error",
        "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: the next operands in the wrong phase", "own_full, turn % 2)", "own_full, 0)",
        "Error",
    ),
    of_grads(
        "gradients: tiles of the operands before", "      memory.counts = counts;\n",
        "      if (turn == 0) memory.counts = counts;\n", "Error", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: sums of the operands before", "    clear(of_scores), clear(of_weights);\n",
        "", "AssertionError",
    ),
    of_grads(
        "gradients: the stage of the operands before", "    last = stage.number;\n    clear(",
        "    clear(", "Error",
    ),
    of_grads(
        "gradients: dS of the operands before", "dw[n / 4][n % 4] = 0;", "dw[n / 4][n % 4] |= 0;",
        "AssertionError",
    ),
    of_grads(
        "gradients: the last stage is not given back", "      leave(last, true);\n", "", "deadlock",
    ),
    of_grads(
        "gradients: the producer does not wait for a free stage",
        "    wait_for_phase(&memory.empty[to.number], to.parity ^ 1);\n", "",
        "Error", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: the producer waits for the wrong phase", "empty[to.number], to.parity ^ 1",
        "empty[to.number], to.parity", "deadlock", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: stats that arrive before they are loaded",
        "    load_stats(a.p, at, memory.rows[stage]);\n"
        "    arrive_with_stats(&memory.full[stage]);\n",
        "    arrive_with_stats(&memory.full[stage]);\n"
        "    load_stats(a.p, at, memory.rows[stage]);\n",
        "AssertionError", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: products of what does not stay yet",
        "    wait_for_phase(&memory.own_full, turn % 2);\n", "", "Error",
    ),
    of_grads(
        "gradients: products of what has not come",
        "    wait_for_phase(&memory.full[stage.number], stage.parity);\n    start_product",
        "    start_product", "Error",
    ),
    of_grads(
        "gradients: scores are read while they are made",
        "wait_for_products<kAhead ? 2 : 1>();", "wait_for_products<3>();", "AssertionError",
    ),
    of_grads(
        "gradients: dP is read while it is made", "wait_for_products<kOfKeys ? 1 : 0>();",
        "wait_for_products<kOfKeys ? 2 : 1>();", "AssertionError",
    ),
    of_grads(
        "gradients: the lines of the tile before",
        "if (masked > 0) find_lines", "if (masked > 0 && turn == 0) find_lines", "AssertionError",
    ),
    of_grads(
        "gradients: dropped weights in dV", "kMasked && a.p.dropout.enabled", "false",
        "AssertionError",
    ),
    of_grads(
        "gradients: a tile is left while its own products read it",
        "    if constexpr (kOfKeys || !kAhead) wait_for_products<0>();\n"
        "    if constexpr (kOfKeys) hold(w), hold(of_weights);\n"
        "    if constexpr (!kAhead) leave(stage.number, true);\n",
        "    if constexpr (!kAhead) leave(stage.number, true);\n"
        "    if constexpr (kOfKeys || !kAhead) wait_for_products<0>();\n"
        "    if constexpr (kOfKeys) hold(w), hold(of_weights);\n", "AssertionError",
    ),
    of_grads(
        "gradients: the tile before is left while products read it",
        "    wait_for_products<kOfKeys ? 1 : 0>();\n    take_grads(is_first);\n",
        "    take_grads(is_first);\n    wait_for_products<kOfKeys ? 1 : 0>();\n", "AssertionError",
    ),
    of_grads(
        "gradients: the first tile leaves one that never was", "leave(last, !is_first)",
        "leave(last, true)",
        "Error",
    ),
    of_grads(
        "gradients: the tile before, of the stage of this one", "start_of_scores(last);\n    start",
        "start_of_scores(stage.number);\n    start", "AssertionError",
    ),
    of_grads(
        "gradients: without the last tile",
        "      start_of_scores(last);\n      wait_for_products<0>();\n", "", "AssertionError",
    ),
    of_grads(
        "gradients: own rows in registers, of the first warp", "warp_row0() + lane() % 16",
        "lane() % 16", "AssertionError",
    ),
    of_grads(
        "gradients: no tile is ever left", "    if (taken) release(&memory.empty[number]);\n", "",
        "deadlock",
    ),
    of_grads(
        "gradients: dW is not added to dP", "    start_tile(has_grad);\n",
        "    start_tile(false);\n", "AssertionError",
    ),
    of_grads(
        "gradients: tiles with dropout count as full",
        "masks_every_tile(a.p) || a.p.grad_weights.data != nullptr",
        "a.p.grad_weights.data != nullptr",
        "AssertionError",
    ),
    of_grads(
        "gradients: tiles with dW count as full", "masks_every_tile(a.p) || a.p.grad_weights.data",
        "masks_every_tile(a.p) || a.p.out.data == nullptr && a.p.grad_weights.data",
        "AssertionError",
    ),
    of_grads(
        "gradients: one head of those that share keys", "at.h += which.head, ", "",
        "AssertionError",
    ),
    of_dense(
        "a tile that lacks some pairs counts as whole", "missing ? kKeepsSome",
        "false ? kKeepsSome",
    ),
    of_dense("bits of keys by queries", "bits_of<KeyRows>", "bits_of<QueryRows>"),
    of_dense(
        "tables of heads one over the other", "stride(grid.h, grid.m * grid.n)",
        "stride(grid.h, grid.m)",
    ),
    of_dense(
        "the second half of a tile of 80 keys", "first > 0 && n + 1", "false && n + 1",
        "dense_tiles.cuh", "forward_wgmma.cu",
    ),
    of_dense(
        "the last of a block's rows speaks for all", "kept |= tiles.kept", "kept = tiles.kept",
        "dense_tiles.cuh", "forward_wgmma.cu",
    ),
    of_dense(
        "whole tiles before masked ones", "next_whole += x.masked +", "next_whole +=",
        "wgmma_tiles.cuh", "forward_wgmma.cu",
    ),
    of_dense(
        "places of every lane alike", "__popc(all_masked & before)", "__popc(all_masked & 0)",
        "wgmma_tiles.cuh", "forward_wgmma.cu",
    ),
    of_dense(
        "the first 32 tiles of a warp alone", "first < end; first += 32",
        "first < min(end, begin + 32); first += 32", "wgmma_tiles.cuh", "forward_wgmma.cu",
    ),
    of_dense(
        "places that others have not written yet",
        "  if (lane() == 0) found.of_warp[warp()] = mine;\n  __syncthreads();\n",
        "  if (lane() == 0) found.of_warp[warp()] = mine;\n", "wgmma_tiles.cuh",
        "forward_wgmma.cu",
    ),
    of_dense(
        "gradients: the mask of the first of the heads", "kept_of(a.dense, here.b, here.h,",
        "kept_of(a.dense, here.b, at.h,", "backward_wgmma.cu", "backward_wgmma.cu",
    ),
    of_warpgroups(
        "a tile's number before its stage is free",
        "      wait_for_phase(&memory.k_empty[to.number], to.parity ^ 1);\n"
        "      memory.tile[to.number] = tile;\n",
        "      memory.tile[to.number] = tile;\n"
        "      wait_for_phase(&memory.k_empty[to.number], to.parity ^ 1);\n",
        "AssertionError", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "the lines of the tile before",
        "if (masked > 0) find_lines", "if (masked > 0 && turn == 0) find_lines", "AssertionError",
    ),
    of_warpgroups(
        "a tile's number when its stage is left",
        "    const int64_t j0 = first_key();\n    if (masked) find_kept(j0);\n"
        "    wait_for_products<0>();\n    take_scores();\n",
        "    wait_for_products<0>();\n    take_scores();\n"
        "    const int64_t j0 = first_key();\n    if (masked) find_kept(j0);\n", "AssertionError",
    ),
    of_grads(
        "gradients: a tile's number before its stage is free",
        "      wait_for_phase(&memory.empty[to.number], to.parity ^ 1);\n",
        "      if (lane() == 0) memory.tiles[to.number] = tile;\n"
        "      wait_for_phase(&memory.empty[to.number], to.parity ^ 1);\n", "AssertionError",
        "backward_wgmma.cu",
    ),
    of_warpgroups(
        "more registers than a block was launched with",
        "- kConsumers * kConsumerRegisters;", "- kConsumers * kConsumerRegisters + 8;", "deadlock",
    ),
    of_grads(
        "gradients: the producer keeps its registers",
        "    give_registers<Of::kProducerRegisters>();\n", "", "deadlock", "backward_wgmma.cu",
    ),
    Mistake(
        "garbage: one tile of marked neighbours", "dot/step.cuh", "left &= left - 1", "left = 0",
        "AssertionError", test="test_cuda_wgmma.py", tests="garbage_in_keys",
    ),
    of_warpgroups(
        "a tile that the last rows need is passed by", "band_end(p.mask, at.i0 + at.rows - 1)",
        "band_end(p.mask, at.i0 - 1)", "AssertionError",
    ),
    of_warpgroups(
        "the first tile without its mask", "first(n < masked);", "first(false);",
        "AssertionError",
    ),
    of_warpgroups(
        "a tile that is passed by keeps its place",
        "    release(&memory.v_empty[of_scores.number]);\n", "", "deadlock",
    ),
    of_file(
        "gradients: rows of the first of two tiles of keys", "dot/wgmma_grads.cuh",
        "min(kConsumers, tiles_in(p.N) - n)", "1", "documents", "dot/backward_wgmma.cu",
    ),
    of_file(
        "a tile that the first keys cut counts as full", "dot/wgmma_tiles.cuh",
        "(all.begin + kSize - 1) / kSize)", "all.begin / kSize)", "window or kv-begin",
        "dot/forward_wgmma.cu",
    ),
    of_warpgroups(
        "a lane that has not seen a tile that is passed by",
        "    __syncwarp();  // its lanes have seen both phases\n", "", "deadlock",
    ),
    of_grads(
        "gradients: a lane that has not seen a free stage",
        "<kOfKeys, 1>(a, memory, [&](uint32_t stage, const PassingTile& tile, const Place& at) {\n",
        "<kOfKeys, 32>(a, memory, [&](uint32_t stage, const PassingTile& tile, const Place& at) {\n"
        "    if (lane() > 0) return;\n",
        "deadlock", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: stats that a lane has not written yet",
        "  __syncwarp();\n  if (lane() == 0) arrive(full);", "  if (lane() == 0) arrive(full);",
        "Error", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: stats that come while a lane reads the last ones",
        "    __syncwarp();  // its lanes have read the stats\n", "", "AssertionError",
    ),
    of_warpgroups(
        "tensor maps: strides in numbers", "static_cast<cuuint64_t>(strides[n]) * 2",
        "static_cast<cuuint64_t>(strides[n])", "Error", "../base/tensor_map.h",
    ),
    of_limits(
        "tiles of which some rows keep all", "tile/spans.cuh",
        "{max(x.all.begin, other.all.begin), min(x.all.end, other.all.end)}",
        "{min(x.all.begin, other.all.begin), max(x.all.end, other.all.end)}", "tile/spans.cu",
    ),
    of_limits(
        "what lies between whole tiles counts as whole", "tile/spans.cu",
        "is_one ? all : Span{0, 0}", "all", "tile/spans.cu",
    ),
    of_limits(
        "rows without keys say nothing", "tile/spans.cu",
        "if (inside) join(", "if (here.end > 0) join(", "tile/spans.cu",
    ),
    of_limits(
        "a tile of few queries counts as whole", "tile/spans.cu",
        "here.end * kTile > a.p.M || ", "", "tile/spans.cu",
    ),
    of_limits(
        "other kernels: tiles of which some keys are kept", "tile/masking.cuh",
        "holds(keys_of_tile(p, at, table).all,", "meets(keys_of_tile(p, at, table).all,",
        "dot/backward.cu",
    ),
    of_limits(
        "tiles with dropout count as full", "dot/wgmma_tiles.cuh",
        "masked(p) ? Span{0, 0} : keys.all", "keys.all", "dot/forward_wgmma.cu",
    ),
    of_limits(
        "gradients: tiles with dropout count as full", "dot/wgmma_grads.cuh",
        "masked ? Span{0, 0} : tiles.all", "tiles.all", "dot/backward_wgmma.cu",
    ),
    of_limits(
        "gradients: the keys of another stage", "dot/wgmma_grads.cuh",
        "passing_lines[opaque_here(stage.number)]", "passing_lines[opaque_here(last)]",
        "dot/backward_wgmma.cu",
    ),
    of_limits(
        "gradients: keys that arrive before they are loaded", "dot/backward_wgmma.cu",
        "    wait_for_copies();\n    arrive_with_stats(&memory.full[stage]);\n",
        "    arrive_with_stats(&memory.full[stage]);\n", "dot/backward_wgmma.cu",
    ),
    of_limits(
        "gradients: nobody waits for the keys", "dot/backward_wgmma.cu",
        "kOfKeys ? 2 + (a.spans.rows != nullptr) : 1", "kOfKeys ? 2 : 1",
        "dot/backward_wgmma.cu", "Error",
    ),
]  # fmt: skip
