"""Mistakes in the dot product's CUDA kernels, and in what all kernels share."""

from mistakes import Mistake, of_copies, of_file, of_grads, of_large_heads, of_warpgroups

LOAD = "if (aligned && r < rows && c + kChunk <= cols) {"
DOT = [
    Mistake(
        "off by one: a tile load without its last row", "tile/half_tile.cuh",
        "chunk[i] = r < rows &&", "chunk[i] = r < rows - 1 &&", "AssertionError",
    ),
    Mistake(
        "off by one: a tile load of a row too many", "tile/half_tile.cuh",
        LOAD, LOAD.replace("r < rows", "r <= rows"), "heap-buffer-overflow", "sanitized",
    ),
    Mistake(
        "chunks of a row: words of another lane", "dot/step.cuh",
        "late ? word[n] : word[n + step];", "late ? word[n + step] : word[n];", "AssertionError",
    ),
    Mistake(
        "a missing barrier", "dot/forward.cu",
        "    wait_for_copies();\n    __syncthreads();\n    at.j0 += kTile;",
        "    wait_for_copies();\n    at.j0 += kTile;", "AssertionError",
    ),
    of_copies(
        "a V that comes while others read the last one",
        "    __syncthreads();  // others may still read V, and the bad rows of K\n", "",
        "backward.cu", "divergence",  # of threads that read other bad rows
    ),
    of_copies(
        "stats that come while others read the last ones",
        "    __syncthreads();  // others may still read the stats, and the bad rows of Q and dO\n",
        "", "backward.cu",
    ),
    of_copies(
        "a dO that comes while others read the last one",
        "    __syncthreads();  // others may still read dO, and bad_rows\n", "", "backward.cu",
    ),
    of_copies(
        "one place for this tile and the next", "odd ? first : memory.other", "place(first)",
    ),
    of_copies("no wait", "    wait_for_copies();\n    __syncthreads();", "    __syncthreads();"),
    of_copies(
        "a tile that others still copy", "    wait_for_copies();\n    __syncthreads();",
        "    wait_for_copies();",
    ),
    of_copies("the mask of the next tile", "false, here().full", "false, next().full"),
    of_copies("the bits of the last tile", "bits = of_next, ", ""),
    of_copies(
        "one head of those that share keys", "n >= heads * tiles", "n >= tiles", "backward.cu",
    ),
    Mistake(
        "a wrong lane of a matrix operand", "tile/half_tile.cuh",
        "8 * n + lane % 8 + lane / 16 * 8", "8 * n + lane % 8 + lane / 8 % 2 * 8", "AssertionError",
    ),
    Mistake(
        "a ratio of a softcap that is wrong near 1", "tile/curve.cuh",
        "fmaf(-2.f, reciprocal, 1.f)", "1.f", "AssertionError",
    ),
    Mistake(
        "a softcap without its slope", "dot/backward.cuh", "*= slope",
        "*= slope == 0.f ? 0.f : 1.f", "AssertionError", source="dot/backward.cu",
    ),
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
        "    first(tile_at(n), n < masked);\n",
        "    release(&memory.q_empty[group]);\n    first(tile_at(n), n < masked);\n", "Error",
    ),
    of_warpgroups(
        "the next queries in the wrong phase", "q_full[group], turn % 2)", "q_full[group], 0)",
        "Error",
    ),
    of_warpgroups(
        "keys of the queries before", "    memory.keys[group] = keys;\n",
        "    if (turn == 0) memory.keys[group] = keys;\n", "Error", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "sums of the queries before", "o[n / 4][n % 4] = 0.f;", "o[n / 4][n % 4] *= 1.f;",
        "AssertionError",
    ),
    of_warpgroups(
        "pairs: no tile from the other end", "? n / 2 : list - 1 - n / 2;", "? n / 2 : n / 2;",
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
        "gradients: tiles of the operands before", "    memory.tiles = tiles;\n",
        "    if (turn == 0) memory.tiles = tiles;\n", "Error", "backward_wgmma.cu",
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
        "      if (kOfKeys) load_stats(a.p, here, memory.rows[to.number]);\n"
        "      arrive_with_stats(full);",
        "      arrive_with_stats(full);\n"
        "      if (kOfKeys) load_stats(a.p, here, memory.rows[to.number]);",
        "AssertionError", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: products of what does not stay yet",
        "    wait_for_phase(&memory.own_full, turn % 2);\n", "", "Error",
    ),
    of_grads(
        "gradients: products of what has not come",
        "    wait_for_phase(&memory.full[stage.number], stage.parity);\n", "", "Error",
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
        "gradients: a masked tile without a wait",
        "    wait_for_products<0>();\n    hold(s);\n", "    hold(s);\n", "AssertionError",
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
        "gradients: dW is not added to dP", "    start_tile(true);\n",
        "    start_tile(false);\n", "AssertionError",
    ),
    of_grads(
        "gradients: tiles with dropout count as full",
        "masks_every_tile(p) || p.grad_weights.data != nullptr", "p.grad_weights.data != nullptr",
        "AssertionError",
    ),
    of_grads(
        "gradients: tiles with dW count as full", "masks_every_tile(p) || p.grad_weights.data",
        "masks_every_tile(p) || p.out.data == nullptr && p.grad_weights.data", "AssertionError",
    ),
    of_grads(
        "gradients: one head of those that share keys", "at.h += which.head, ", "",
        "AssertionError",
    ),
    of_warpgroups(
        "a mask of keys with holes counts as whole", "found.count == found.end - found.begin",
        "true", "AssertionError", "wgmma_tiles.cuh",
    ),
    of_warpgroups(
        "a mask of keys: the first of the lanes' ends", "__reduce_max_sync(kAllLanes, x.end)",
        "__reduce_min_sync(kAllLanes, x.end)", "AssertionError", "wgmma_tiles.cuh",
    ),
    of_file(
        "gradients: a block visits keys that a mask of keys drops", "dot/wgmma_grads.cuh",
        "dropped ? none : visited_rows", "false ? none : visited_rows", "mask_of_keys",
        "dot/backward_wgmma.cu",
    ),
    of_grads(
        "gradients: the producer keeps its registers",
        "    give_registers<GradGroups::kProducerRegisters>();\n", "", "deadlock",
        "backward_wgmma.cu",
    ),
    of_file(
        "merge: factors that others have not written yet", "tile/merge.cu",
        "  __syncthreads();\n\n  float l = 0.f;", "  float l = 0.f;", "test_corner and few",
    ),
    of_file(
        "merge: sums of chunks without their factors", "tile/merge.cu",
        "l += factors[n] * parts", "l += parts", "test_corner and few",
    ),
    of_file(
        "spans: rows of one lane", "tile/spans.cu",
        "  keys = union_of_lanes(keys);\n", "", "test_corner or documents",
    ),
    of_file(
        "spans: without the last tile of keys", "tile/spans.cuh", "keys.end > j0;",
        "keys.end > j0 + kTile;", "test_corner or documents", "tile/spans.cu",
    ),
    of_file(
        "line: parts of one block", "tile/line.cu",
        "    if (block > 0) sum += part[kTile - kLinePart];\n", "", "test_corner",
    ),
    of_file(
        "line: rows past the last one", "tile/line.cu",
        "place = n + ceil_div(p.M, kTile) * kTile - p.M", "place = n", "test_corner",
    ),
    of_file(
        "shared bias: without the last part", "tile/bias_parts.cu",
        "part < a.parts; part", "part < a.parts - 1; part", "shared_bias or many_tiles",
    ),
    of_file(
        "shared bias: parts of one lane", "tile/bias_parts.cu",
        "lanes_sum(sum, a.lanes)", "lanes_sum(sum, 1)", "shared_bias or many_tiles",
    ),
    of_file(
        "bias: the rest of uneven slices", "dot/backward.cu",
        "own.end = (own.slice + 1) * count / slices", "own.end = own.begin + count / slices",
        "shared_bias or many_tiles",
    ),
    of_file(
        "bias: a tile over operands that others still read", "dot/backward.cu",
        "  __syncthreads();\n#pragma unroll\n  for (int t = 0; t < QueryRows::kTiles; ++t)\n"
        "#pragma unroll\n    for (int v = 0; v < 4; ++v) tile[",
        "#pragma unroll\n  for (int t = 0; t < QueryRows::kTiles; ++t)\n"
        "#pragma unroll\n    for (int v = 0; v < 4; ++v) tile[", "test_corner",
    ),
    of_file(
        "bias: rows folded before others have added theirs", "dot/backward.cu",
        "tile[r * kTile + thread()];\n  __syncthreads();", "tile[r * kTile + thread()];",
        "shared_bias or many_tiles",
    ),
    of_file(
        "few queries: keys of the next chunk", "dot/forward.cu",
        "    keys.end = min64(keys.end, (chunk + 1) * a.chunk_keys);\n", "",
        "test_corner and few",
    ),
    of_file(
        "delta: dW of the other row of a lane", "dot/backward.cu", "sum[pair % 4 / 2]", "sum[0]",
        "test_corner",
    ),
    of_file(
        "masks: keys before the first of a row", "tile/masking.cuh",
        "(Layout::before(part.end) & ~Layout::before(part.begin))", "Layout::before(part.end)",
        "test_corner", "dot/forward.cu",
    ),
    of_file(
        "masks: a key behind the last of a row", "tile/half_tile.cuh",
        "min(n % 8, 2)", "min(n % 8 + 1, 2)", "test_corner", "dot/forward.cu",
    ),
    of_file(
        "masks: a query behind the last of a key", "tile/masking.cuh",
        "part_of_tile(rows.begin, rows.end, at.i0", "part_of_tile(rows.begin, rows.end + 1, at.i0",
        "test_corner", "dot/backward.cu",
    ),
    Mistake(
        "garbage: one tile of marked neighbours", "dot/step.cuh", "left &= left - 1", "left = 0",
        "AssertionError", test="test_cuda_wgmma.py", tests="garbage_in_keys",
    ),
    of_file(
        "delta: the columns of another lane", "dot/backward.cu",
        "const int first = lane() % kQuad * kChunk;", "const int first = lane() % 2 * kChunk;",
        "test_corner",
    ),
    of_warpgroups(
        "a tile that the last rows need is passed by", "band_end(p.mask, at.i0 + at.rows - 1)",
        "band_end(p.mask, at.i0 - 1)", "AssertionError",
    ),
    of_warpgroups(
        "the first tile without its mask", "first(tile_at(n), n < masked);",
        "first(tile_at(n), false);", "AssertionError",
    ),
    of_warpgroups(
        "a tile that is passed by keeps its place",
        "    release(&memory.v_empty[of_scores.number]);\n", "", "deadlock",
    ),
    of_file(
        "gradients: rows of the first of two tiles of keys", "dot/wgmma_grads.cuh",
        "min64(tiles, ceil_div(j1, kTile))", "at.j0 / kTile + 1", "documents",
        "dot/backward_wgmma.cu",
    ),
    of_grads(
        "gradients: the masked tiles of a head once more", "(late < 0 ? 0 : masked))}", "0)}",
        "AssertionError",
    ),
    of_file(
        "a tile that the first keys cut counts as full", "dot/wgmma_tiles.cuh",
        "ceil_div(all.begin, kSize))", "all.begin / kSize)", "window or kv-begin",
        "dot/forward_wgmma.cu",
    ),
    of_warpgroups(
        "tensor maps: strides in numbers", "static_cast<cuuint64_t>(strides[n]) * 2",
        "static_cast<cuuint64_t>(strides[n])", "Error", "../base/tensor_map.h",
    ),
]  # fmt: skip
