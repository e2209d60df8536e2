"""What the loops over tiles share: the tiles to visit, what is known of each, and logits.

A program goes over its blocks in up to three sweeps. key_blocks and query_blocks
(tile/block_lists.py) give the blocks as positions. A Span says which positions a sweep visits. A
Pass says what is known of the tiles when a kernel is compiled.

    partial   [begin, full_begin) and [full_end, end)   the mask cuts through these tiles
    full      [full_begin, full_end)                    no mask code runs; a bias may
    exact     [begin, end)                              once more, if the result is not finite:
                                                        masked garbage then reaches nothing

Where a new feature goes:

    a function of a score before bias and mask   curve_scores; its slope: curve_gradient
    a step after bias and mask                   mask_scores
    numbers that are loaded for each pair        load_pairs
    a bound of a row's keys                      row_range; a Tile carries its two numbers
    a score                                      score.load_side and score.scores
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..score.score import scores
from ..tile.block_lists import block_at
from ..tile.curve import curve_scores
from ..tile.masking import load_pairs, mask_scores


class Pass(NamedTuple):
    """What is known of a sweep's tiles at compile time; every field is a constexpr.

    Write ``PARTIAL: tl.constexpr = Pass(...)``: Triton 3.6 turns the constants of a tuple into
    tensors in a plain assignment, and where a function returns them.
    """

    SIZE: Any  # rows, or keys, that a step takes
    MASKED: Any  # some pairs are masked
    BIASED: Any  # the bias is not 0 throughout
    EXACT: Any = tl.constexpr(False)  # masked pairs contribute 0, even if NaN surrounds them
    SLICES: Any = tl.constexpr(1)  # steps in a block
    LOGITS: Any = tl.constexpr(False)  # dS is the gradient of logits, not of scores


class Span(NamedTuple):
    """Which blocks a sweep visits: ``count`` positions from ``first``, jumping at split."""

    line: Any  # of the lists; see list_line
    first: Any
    count: Any
    split: Any  # from here on, positions are larger by ``jump``
    jump: Any


class Tile(NamedTuple):
    """Where a tile lies. i, j, begin and end are shaped to broadcast to the tile."""

    i0: Any  # the first row
    j0: Any  # the first key
    i: Any
    j: Any
    begin: Any  # row i keeps keys of [begin, end), as row_range says
    end: Any


@triton.jit
def partial_span(line, blocks):
    """The blocks before the full ones and behind them."""
    begin, full_begin, full_end, end = blocks
    n_full = full_end - full_begin
    return Span(line, begin, end - begin - n_full, full_begin - begin, n_full)


@triton.jit
def full_span(line, blocks):
    """The full blocks."""
    begin, full_begin, full_end, end = blocks
    return Span(line, full_begin, full_end - full_begin, 0, 0)


@triton.jit
def whole_span(line, blocks):
    """All blocks."""
    begin, full_begin, full_end, end = blocks
    return Span(line, begin, end - begin, end, 0)


@triton.jit
def step_start(lists, span, n, PASS):
    """The first row, or key, of step n of a sweep."""
    step = n + tl.zeros((), tl.int32)
    position = span.first + step // PASS.SLICES
    if PASS.MASKED:
        position += tl.where(step // PASS.SLICES >= span.split, span.jump, 0)
    return (block_at(lists, span.line, position) * PASS.SLICES + step % PASS.SLICES) * PASS.SIZE


@triton.jit
def logits(
    x, y, q, k, terms, bias, mask, scale, keys, dims, spec, b, h, tile, PASS,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(logits s, keep, slopes for softmax_gradient) of a tile."""
    if TRANSPOSED:  # without sums of rows, and without registers for both
        s = scores(x, y, q, k, terms, b, h, keys, dims, spec, TRANSPOSED)
        pairs = pairs_of(bias, mask, dims, b, h, tile, PASS)
    else:
        pairs = pairs_of(bias, mask, dims, b, h, tile, PASS)
        s = scores(x, y, q, k, terms, b, h, keys, dims, spec, TRANSPOSED)
    return logits_of(s, pairs, mask, scale, spec, PASS)


@triton.jit
def pairs_of(bias, mask, dims, b, h, tile, PASS):
    """load_pairs of a tile."""
    return load_pairs(
        bias, mask, b, h, tile.i, tile.j, tile.begin, tile.end, dims.M, dims.N,
        PASS.MASKED, PASS.BIASED,
    )  # fmt: skip


@triton.jit
def logits_of(s, pairs, mask, scale, spec, PASS):
    """(logits s, keep, slopes for softmax_gradient) of a tile of scores."""
    curved, slope = curve_scores(s, mask)
    s = mask_scores(curved, scale, pairs, PASS.MASKED, PASS.BIASED, spec.FOLD_SCALE)
    return s, pairs[0], slope
