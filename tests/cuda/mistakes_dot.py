"""Mistakes in the dot product's CUDA kernels, and in what all kernels share."""

from mistakes import Mistake, of_copies, of_file

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
        "  keys = join_lanes(keys);\n", "", "test_corner or documents",
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
    of_file(
        "sinks: that of the first head", "tile/softmax.cuh", "offset_of(p.sink, b, h, 0, 0)",
        "offset_of(p.sink, b, 0, 0, 0)", "test_sinks", "dot/forward.cu",
    ),
    of_file(
        "sinks: nothing in a row without keys", "tile/softmax.cuh", "return {0.f, sink};",
        "return {0.f, -kInfinity};", "test_sinks", "dot/forward.cu",
    ),
    of_file(
        "sinks: that of the first sample in a merged row", "tile/merge.cu",
        "write_row(p, b, h, number,", "write_row(p, 0, h, number,", "test_sinks",
    ),
    of_file(
        "sinks: the gradient by that of the first sample", "tile/sink.cu",
        "offset_of(p.sink, b, h, 0, 0)", "offset_of(p.sink, 0, h, 0, 0)", "test_sinks",
    ),
    of_file(
        "sinks: the gradient of rows of the next head", "tile/sink.cu",
        "n < first + p.M;", "n <= first + p.M;", "test_sinks",
    ),
    of_file(
        "sinks: the gradient of an output without keys", "../problem/sink.h",
        "(factor == 0.f ? empty : delta)", "delta", "test_sinks", "tile/sink.cu",
    ),
    of_file(
        "sinks: the gradient of a factor without digits", "../problem/sink.h",
        "factor < kLeast ?", "factor < 0.f ?", "test_sinks", "tile/sink.cu",
    ),
    of_file(
        "sinks: a sum that others still write", "tile/sink.cu",
        "others /= 2) {\n    __syncthreads();", "others /= 2) {", "test_sinks",
    ),
    of_file(
        "delta: the columns of another lane", "dot/backward.cu",
        "const int first = lane() % kQuad * kChunk;", "const int first = lane() % 2 * kChunk;",
        "test_corner",
    ),
]  # fmt: skip
