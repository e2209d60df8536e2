"""Mistakes in the CUDA kernels of the additive and the gaussian score."""

from mistakes import of_file, of_halves, of_one_pass, of_parts

ADDITIVE = [
    of_halves(
        "values that garbage takes out of every row", "= kept(bits, i % kRows, j % kCols)", "= 0",
        "additive/forward.cu",
    ),
    of_halves(
        "garbage that reaches masked rows", "= kept(bits, i % kRows, j % kCols)", "= 1",
        "additive/forward.cu",
    ),
    of_halves(
        "products of a tile that others still copy",
        "  wait_for_copies();\n  __syncthreads();\n  const bool bad", "  wait_for_copies();\n"
        "  const bool bad", "additive/forward.cu",
    ),
    of_halves(
        "a wrong lane of transposed weights", "16 * k + lane % 8 + lane / 16 * 8",
        "16 * k + lane % 8 + lane / 8 % 2 * 8", "additive/gradients.cu", "tile/half_tile.cuh",
    ),
    of_halves(
        "sums that a lane reads too early", "  __syncwarp();\n  row = ", "  row = ",
        "additive/gradients.cu",
    ),
    of_one_pass(
        "a group adds to passing sums that are not there yet",
        "      if (turn > 0) __syncthreads();\n", "",
    ),
    of_one_pass("the first group adds to the tile before", "pass_on(turn == 0,", "pass_on(false,"),
    of_one_pass("sums of rows that others have", "last_row0(key0) + n", "key0 + n"),
    of_one_pass("a slice from the wrong tile on", "first + (slice", "(slice"),
    of_parts("parts of one slice", "add_parts(parts, a.plan.slices_n,", "add_parts(parts, 1,"),
    of_parts("dk of one head for all that share the keys", "parts + g * of_head", "parts"),
    of_parts("weights of one head for all", "at.h = static_cast<int>(hkv * group + g);", ""),
    of_one_pass("dw of one group", "n < kOwnGroups; ++n) sum", "n < 1; ++n) sum"),
    of_one_pass("dims of a neighbour", "lane / 8 % 2 * kOwnDims", "lane / 8 % 2",
                "terms.cuh"),
    of_one_pass("the other dim's reciprocal", "reciprocal * x[1 - d]", "reciprocal * x[d]",
                "terms.cuh"),
    of_file(
        "line: the first tile of a diagonal", "tile/line.cuh", "min64(tiles_m - m, tiles_n - n)",
        "1", "test_softcap", "additive/grad_bias.cu",
    ),
    of_one_pass(
        "sums of values that nobody cleared", "ceil_div(a.p.E, kTile) * kTile)", "0)",
    ),
    of_one_pass(
        "sums of weights that nobody cleared",
        "  for (int64_t stage = 0; stage < panels.stages; ++stage)\n    own_weight_sum(",
        "  for (int64_t stage = 1; stage < panels.stages; ++stage)\n    own_weight_sum(",
    ),
    of_file(
        "one pass: keys of the first sample", "tile/masking.cuh",
        "table[opaque_here(at.b) * ceil_div(p.M, kTile) +", "table[", "test_corner",
        "additive/gradients.cu",
    ),
    of_one_pass(
        "a largest dS that others have not written",
        "  __syncthreads();\n  const float factor = unit", "  const float factor = unit",
        "backward.cuh",
    ),
    of_file(
        "one pass: a distance where dS is 0", "additive/differences.cuh",
        "pair[s] == 0.f ? 0.f : (other", "(other", "test_case and gaussian-garbage",
        "additive/gradients.cu",
    ),
    of_parts("dw of three warps", "for (int n = 1; n < kWarps; ++n) sum += sums",
             "for (int n = 2; n < kWarps; ++n) sum += sums"),
    of_file(
        "additive: a softcap without its slope", "additive/backward.cuh",
        "if (is_curved(a.p) && slopes", "if (slopes == nullptr && slopes", "test_softcap",
        "additive/gradients.cu",
    ),
    of_file(
        "additive: scores of operands that others still stage", "additive/tile.cuh",
        "units + d0 + thread()];\n    __syncthreads();", "units + d0 + thread()];", "test_corner",
        "additive/forward.cu",
    ),
    of_file(
        "additive delta: terms that others have not written", "additive/delta.cu",
        "  out_terms(p, at, terms);\n  __syncthreads();", "  out_terms(p, at, terms);",
        "test_corner",
    ),
    of_file(
        "additive delta: dW of one row of a thread", "additive/delta.cu",
        "sums[pair / 4]", "sums[0]", "test_corner",
    ),
    of_file(
        "additive few queries: weights that others have not written", "additive/few_queries.cu",
        "    __syncthreads();\n    add_few_values(", "    add_few_values(", "few_queries",
    ),
    of_file(
        "additive chunks: keys of the next one", "additive/forward.cu",
        "min64((chunk + 1) * a.plan.chunk_keys, keys.end)", "keys.end", "chunks",
    ),
    of_file(
        "additive chunks: a factor of the last tile", "additive/forward.cu",
        "float factor = 1.f;", "float factor = states.factor[row];", "chunks",
    ),
    of_file(
        "additive few queries: keys of the next chunk", "additive/few_queries.cu",
        "min64((chunk + 1) * a.plan.chunk_keys, keys.end)", "keys.end", "few_queries",
    ),
    of_file(
        "additive few queries: garbage of masked keys", "additive/few_queries.cu",
        "masked && is_no_weight(w) ? sums[n] : fmaf", "fmaf", "unused_keys",
    ),
    of_file(
        "additive few queries: one head for the mean of all", "additive/few_queries.cu",
        "const int64_t row = (b * p.H + h) * p.M + i;",
        "const int64_t row = (b * p.H + head_out * heads) * p.M + i;", "few_queries",
    ),
    of_file(
        "additive bias: a row that others have not stored", "additive/grad_bias.cu",
        "  store_fragment<false>(tile, memory);\n  __syncthreads();",
        "  store_fragment<false>(tile, memory);", "many_parts",
    ),
    of_file(
        "additive bias: the slices before this one again", "additive/grad_bias.cu",
        "begin = tile.slice * sharers / a.plan.slices * tile.count", "begin = 0", "many_parts",
    ),
    of_file(
        "additive keys: those of one thread are near", "additive/prepare.cu",
        "  near = __syncthreads_and(near);\n", "", "test_case or out_of_range",
    ),
    of_file(
        "additive keys: a stage over one that others still read", "additive/prepare.cu",
        "    __syncthreads();\n    stage_transposed(p.k", "    stage_transposed(p.k",
        "fast_loop or ends_of_tiles",
    ),
    of_file(
        "additive queries: the centre of another head", "additive/prepare.cu",
        "(b * p.Hkv + at.hkv) * a.at.dims", "b * p.Hkv * a.at.dims", "test_case or out_of_range",
    ),
    of_file(
        "additive keys: a stage that others still copy", "additive/prepare.cu",
        "staged);\n    __syncthreads();\n    // The clamp", "staged);\n    // The clamp",
        "fast_loop",
    ),
    of_file(
        "additive weights: halves of numbers that units are not", "additive/prepare.cu",
        "fmaf(-units[d], w, kUnit)", "0.f", "alike",
    ),
    of_file(
        "additive weights: what rounding took from halves", "additive/prepare.cu",
        "halves[0] += rest;", "halves[0] += 0.f;", "alike",
    ),
    of_file(
        "additive weights: units of other threads, unwritten", "additive/prepare.cu",
        "  __syncthreads();\n  // Where weights", "  // Where weights", "alike",
    ),
]  # fmt: skip
