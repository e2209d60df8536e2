"""The one place in Triton where a mask has a meaning: which keys j a query i keeps.

``row_range`` covers the masks that keep an interval of keys a row (causal, window, kv_begin,
kv_len). ``keep_tile`` adds the dense mask. A kernel skips some tiles, runs full tiles without mask
code, and calls ``keep_tile`` in partial tiles. The kind of a tile comes

- from ``kv_range`` / ``q_range``, arithmetic on the intervals, where there is no dense mask; or
- from lists, one for each row block (for dK and dV: key block), made on the device.
  ``classify_kernel`` reads the dense mask once, ``compact_kernel`` turns classes into lists. A
  float bias that broadcasts over B or H is scanned like a mask: tiles of -inf are skipped, tiles of
  0 are full.

Either way a kernel gets (begin, full_begin, full_end, end), positions in the sequence of blocks to
visit. Full blocks are in [full_begin, full_end), partial ones in the rest of [begin, end).

A mask *selects* -inf and never adds it, because NaN + -inf is NaN. A new kind of mask is one field.
If it is an interval, it has clauses in ``row_range``, in the ranges and in ``varies_within_tiles``.
If not, it has clauses in ``keep_tile`` and ``keeps_intervals``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.problem.relative import is_line

from .strided import View, pair_ptrs, view


class Mask(NamedTuple):
    """What a kernel is given of a mask; None is no constraint."""

    band_lo: Any  # keeps i + band_lo <= j <= i + band_hi
    band_hi: Any
    kv_len_ptr: Any
    kv_len_stride_b: Any
    kv_len_stride_m: Any  # None: one length for all rows
    kv_begin_ptr: Any
    kv_begin_stride_b: Any
    kv_begin_stride_m: Any  # None: one first key for all rows
    keep_ptr: Any  # bytes [B, H, M, N]; no View, as Triton 3.6 forgets, in loops, the constants
    keep_stride_b: Any  # of tuples in tuples
    keep_stride_h: Any
    keep_stride_m: Any
    keep_stride_n: Any
    cap: Any  # what a softcap multiplies scores by: see tile/curve.py


# ---- what a mask means ----


@triton.jit
def key_count(mask, b, N):
    """Keys from here on are masked for every row of b. Lengths, being user data, are clamped."""
    if mask.kv_len_ptr is None or mask.kv_len_stride_m is not None:
        return N
    else:
        length = tl.load(mask.kv_len_ptr + b.to(tl.int64) * mask.kv_len_stride_b)
        return tl.minimum(tl.maximum(length, 0), N)


@triton.jit
def first_key(mask, b, N):
    """Keys before this are masked for every row of b."""
    if mask.kv_begin_ptr is None or mask.kv_begin_stride_m is not None:
        return 0
    else:
        first = tl.load(mask.kv_begin_ptr + b.to(tl.int64) * mask.kv_begin_stride_b)
        return tl.minimum(tl.maximum(first, 0), N)


@triton.jit
def row_limits(ptr, stride_b, stride_m, b, i, M, N):
    """What kv_begin or kv_len holds for the rows i; 0 past the last row."""
    ptrs = ptr + b.to(tl.int64) * stride_b
    limit = tl.load(ptrs + i.to(tl.int64) * stride_m, mask=i < M, other=0)
    return tl.minimum(tl.maximum(limit, 0), N)


@triton.jit
def limits(mask, b, i, M, N):
    """Keys begin <= j < end that kv_begin and kv_len leave to the rows i, in the shape of i."""
    begin = tl.zeros_like(i) + first_key(mask, b, N)
    end = tl.zeros_like(i) + key_count(mask, b, N)
    if mask.kv_begin_stride_m is not None:
        begin = row_limits(
            mask.kv_begin_ptr, mask.kv_begin_stride_b, mask.kv_begin_stride_m, b, i, M, N
        )
    if mask.kv_len_stride_m is not None:
        end = row_limits(mask.kv_len_ptr, mask.kv_len_stride_b, mask.kv_len_stride_m, b, i, M, N)
    return begin, end


@triton.jit
def row_range(mask, b, i, M, N):
    """Keys begin <= j < end of rows i, in the shape of i; empty where begin >= end."""
    begin, end = limits(mask, b, i, M, N)
    if mask.band_lo is not None:
        begin = tl.maximum(begin, i + mask.band_lo)
    if mask.band_hi is not None:
        end = tl.minimum(end, i + (mask.band_hi + 1))
    return begin, end


@triton.jit
def keep_tile(mask, b, h, i, j, begin, end, M):
    """Whether row i keeps key j. i and j broadcast to the tile, begin and end are row_range's."""
    keep = (j < end) & (i < M)
    if mask.band_lo is not None or mask.kv_begin_ptr is not None:
        keep = keep & (j >= begin)
    if mask.keep_ptr is not None:
        head = b.to(tl.int64) * mask.keep_stride_b + h.to(tl.int64) * mask.keep_stride_h
        rows = mask.keep_ptr + head + i.to(tl.int64) * mask.keep_stride_m
        dense = tl.load(rows + j.to(tl.int64) * mask.keep_stride_n, mask=keep, other=0)
        keep = keep & (dense != 0)
    return keep


@triton.jit
def load_pairs(
    bias, mask, b, h, i, j, begin, end, M, N, MASKED: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    """(keep, bias) of the pairs of a tile, for mask_scores; the bias is 0 unless BIASED.

    A kernel with sums of rows calls this before the product Q K^T. Of the layouts of a dense load
    and of a product, Triton 3.7.1 gives such sums the layout of what comes last. Behind the
    product, a load made it compute the softmax twice, and ptxas wait for each product.
    """
    if MASKED:
        keep = keep_tile(mask, b, h, i, j, begin, end, M)
    else:
        keep = (i < M) & (j < N)
    added = 0.0
    if BIASED:
        added = tl.load(pair_ptrs(bias, b, h, i, j), mask=keep, other=float("-inf")).to(tl.float32)
        keep = keep & (added != float("-inf"))
    return keep, added


@triton.jit
def mask_scores(
    s, scale, pairs, MASKED: tl.constexpr, BIASED: tl.constexpr, FOLD_SCALE: tl.constexpr
):  # fmt: skip
    """Logits, -inf where masked: natural, or scores that softmax_step multiplies by scale.

    The product with the bias is one spelled-out fma, with one rounding. A compiler could contract
    it in one kernel and not in another, and an ulp of a huge bias is a large logit.
    """
    keep, added = pairs
    if BIASED:
        s = tl.fma(s, scale, added)
    elif not FOLD_SCALE:
        s = tl.fma(s, scale, 0.0)
    if MASKED or BIASED:
        s = tl.where(keep, s, float("-inf"))
    return s


# ---- which blocks to visit ----


@triton.jit
def block_range(begin, full_begin, full_end, end, BLOCK: tl.constexpr):
    """(begin, full_begin, full_end, end) in blocks, ordered, from intervals of elements."""
    begin_block = tl.maximum(begin, 0) // BLOCK
    end_block = tl.where(begin < end, (tl.maximum(end, 0) + BLOCK - 1) // BLOCK, begin_block)
    end_block = tl.maximum(end_block, begin_block)
    full_begin_block = (tl.maximum(full_begin, 0) + BLOCK - 1) // BLOCK
    full_begin_block = tl.minimum(tl.maximum(full_begin_block, begin_block), end_block)
    full_end_block = tl.minimum(tl.maximum(full_end, 0) // BLOCK, end_block)
    return begin_block, full_begin_block, tl.maximum(full_end_block, full_begin_block), end_block


@triton.jit
def kv_range(mask, b, i0, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Key blocks that the rows [i0, i0 + BLOCK_M) keep: (begin, full_begin, full_end, end)."""
    i1 = tl.minimum(i0 + BLOCK_M, M) - 1
    begin = tl.zeros_like(i0) + first_key(mask, b, N)
    full_begin = begin
    end = tl.zeros_like(i0) + key_count(mask, b, N)
    full_end = end
    if mask.kv_begin_stride_m is not None or mask.kv_len_stride_m is not None:
        i = i0 + tl.arange(0, BLOCK_M)
        begins, ends = limits(mask, b, i, M, N)
        keys = (begins < ends) & (i < M)  # rows without keys do not widen the interval
        begin = tl.min(tl.where(keys, begins, N), 0)
        end = tl.max(tl.where(keys, ends, 0), 0)
        full_begin = tl.max(tl.where(i < M, begins, 0), 0)
        full_end = tl.min(tl.where(i < M, ends, N), 0)
    if mask.band_lo is not None:
        begin = tl.maximum(begin, i0 + mask.band_lo)
        full_begin = tl.maximum(full_begin, i1 + mask.band_lo)
    if mask.band_hi is not None:
        end = tl.minimum(end, i1 + mask.band_hi + 1)
        full_end = tl.minimum(full_end, i0 + mask.band_hi + 1)
    return block_range(begin, full_begin, full_end, end, BLOCK_N)


@triton.jit
def q_range(mask, b, j0, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row blocks that keep keys of [j0, j0 + BLOCK_N): the transpose of kv_range.

    Not for limits that vary over rows, which are no interval of rows: those come in lists. A block
    that ends past the last row is partial. Queries are 0 there, and 0 times an infinite key is NaN.
    """
    j1 = tl.minimum(j0 + BLOCK_N, N) - 1
    begin = tl.zeros_like(j0)
    full_begin = begin
    end = begin + M
    full_end = end
    if mask.band_hi is not None:
        begin = j0 - mask.band_hi
        full_begin = j1 - mask.band_hi
    if mask.band_lo is not None:
        end = tl.minimum(M, j1 - mask.band_lo + 1)
        full_end = tl.minimum(M, j0 - mask.band_lo + 1)
    if mask.kv_len_ptr is not None:
        length = key_count(mask, b, N)
        end = tl.where(j0 < length, end, 0)
        full_end = tl.where(j1 < length, full_end, 0)
    if mask.kv_begin_ptr is not None:
        first = first_key(mask, b, N)
        end = tl.where(j1 >= first, end, 0)
        full_end = tl.where(j0 >= first, full_end, 0)
    return block_range(begin, full_begin, full_end, end, BLOCK_M)


# ---- host side ----


def mask_args(call) -> Mask:
    """The Mask of a launch.Call."""
    far = call.M + call.N
    lo, hi = (None if x is None else max(-far, min(x, far)) for x in call.band)
    keep = None if call.keep is None else call.keep.view(torch.uint8)
    cap = call.scale / call.softcap if call.softcap else None
    if cap is not None:  # infinity in float32 would make NaN of a score of 0
        cap = max(-(2.0**127), min(cap, 2.0**127))
    limits = *_limit(call.kv_len), *_limit(call.kv_begin)
    strides = (None,) * 4 if keep is None else keep.expand(call.shape).stride()
    return Mask(lo, hi, *limits, keep, *strides, cap)


def _limit(x: Tensor | None) -> tuple[Tensor | None, int | None, int | None]:
    """kv_begin or kv_len, [B|1, M|1], and its strides."""
    if x is None:
        return None, None, None
    stride_b, stride_m = x.stride()
    return x, stride_b if x.shape[0] != 1 else 0, stride_m if x.shape[1] != 1 else None


def _by_row(*limits: Tensor | None) -> bool:
    return any(x is not None and x.shape[1] != 1 for x in limits)


def varies_within_tiles(call) -> bool:
    """Whether a loaded key may be masked, for some rows of a tile or for all.

    Keys past a length for all rows are never loaded. Keys before the first one may be.
    """
    limited = _by_row(call.kv_len) or call.kv_begin is not None
    pairs = call.bias is not None or not keeps_intervals(call)
    return pairs or limited or call.band != (None, None)


def keeps_intervals(call) -> bool:
    """Whether row_range says all of which pairs are kept; if not, tiles are looked at."""
    return call.keep is None and not scans_bias(call)


def needs_lists(call, columns: bool) -> bool:
    """Whether ranges of blocks cannot say which of them to visit (``columns``: row blocks)."""
    rows_vary = columns and _by_row(call.kv_len, call.kv_begin)
    return rows_vary or not keeps_intervals(call)


def heads_of_mask(call) -> tuple[int, int]:
    """(B or 1, H or 1): for how many heads the lists of blocks differ."""
    bias = call.bias if scans_bias(call) else None
    present = [x for x in (call.keep, bias, call.kv_len, call.kv_begin) if x is not None]
    B = call.B if any(x.shape[0] != 1 for x in present) else 1
    H = call.H if any(x.dim() == 4 and x.shape[1] != 1 for x in present) else 1
    return B, H


def scans_bias(call) -> bool:
    """Whether a kernel looks for tiles of -inf and 0 in the bias first.

    Where the bias broadcasts over heads or batch, as masks do, that costs a fraction of reading the
    bias in every head. Elsewhere it would double the reading. A line is small.
    """
    if call.bias is None or is_line(call.bias, call.M, call.N):
        return False
    return call.bias.numel() < call.B * call.H * call.M * call.N


def bias_view(call) -> View:
    """The bias as a matrix. Rows of a line overlap: each begins one element before the last one."""
    if not is_line(call.bias, call.M, call.N):
        return view(call.bias, call.shape)
    line = call.bias.expand(call.B, call.H, 1, -1)[..., call.M - 1 :]
    stride_b, stride_h, _, stride_c = line.stride()
    return View(line, stride_b, stride_h, -stride_c, stride_c)
