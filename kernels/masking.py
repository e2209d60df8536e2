"""The one place in Triton where a mask has a meaning: which keys j a query i keeps.

``row_range`` covers what is an interval of keys per row (causal, window, kv_len); ``keep_tile``
adds the dense mask. A kernel walks through three kinds of tiles: skipped ones are never touched,
full ones run without mask code, partial ones evaluate ``keep_tile``. Which is which comes

- from ``kv_range`` / ``q_range``, arithmetic on the intervals, where there is no dense mask; or
- from lists, one a row block (a key block, for dK and dV), made on the device: ``classify_kernel``
  reads the dense mask once, ``compact_kernel`` turns classes into lists. A float bias that
  broadcasts over B or H is scanned like a mask: tiles of -inf are skipped, tiles of 0 are full.

Either way a kernel gets (begin, full_begin, full_end, end), positions in the sequence of blocks to
visit: full ones in [full_begin, full_end), partial ones in the rest of [begin, end).

A mask *selects* -inf, it never adds it: NaN + -inf is NaN. A new kind of mask is one field, one
clause in row_range and the ranges, or in keep_tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .softmax import HIGHEST, LOG2E
from .tiles import ABSENT, VARYING, head_ptr, view


class Mask(NamedTuple):
    """What a kernel is given of a mask; None is no constraint."""

    band_lo: Any  # keeps i + band_lo <= j <= i + band_hi
    band_hi: Any
    kv_len_ptr: Any
    kv_len_stride_b: Any
    kv_len_stride_m: Any  # None: one length for all rows
    keep_ptr: Any  # bytes [B, H, M, N]; flat, as Triton 3.6 forgets in loops the constants of
    keep_stride_b: Any  # tuples in tuples
    keep_stride_h: Any
    keep_stride_m: Any
    keep_stride_n: Any


class Lists(NamedTuple):
    """Lists of blocks, partial ones first; None where ranges serve.

    Lines and their length are rounded up to PITCH: kernels are compiled for one kind of number.
    """

    ptr: Any  # int32 [lines, length]
    counts_ptr: Any  # int32 [lines, 2]: partial, full
    stride_b: Any  # in lines
    stride_h: Any
    length: Any


NO_LISTS = Lists(None, None, None, None, None)


# ---- what a mask means ----


@triton.jit
def key_count(mask, b, N):
    """Keys from here on are masked for every row of b. Lengths are clamped: they are user data."""
    if mask.kv_len_ptr is None or mask.kv_len_stride_m is not None:
        return N
    else:
        length = tl.load(mask.kv_len_ptr + b.to(tl.int64) * mask.kv_len_stride_b)
        return tl.minimum(tl.maximum(length, 0), N)


@triton.jit
def row_lengths(mask, b, i, M, N):
    """Keys that kv_len allows to the rows i; 0 past the last row."""
    ptrs = mask.kv_len_ptr + b.to(tl.int64) * mask.kv_len_stride_b
    length = tl.load(ptrs + i.to(tl.int64) * mask.kv_len_stride_m, mask=i < M, other=0)
    return tl.minimum(tl.maximum(length, 0), N)


@triton.jit
def row_range(mask, b, i, M, N):
    """Keys begin <= j < end of rows i, in the shape of i; empty where begin >= end."""
    begin = tl.zeros_like(i)
    end = begin + key_count(mask, b, N)
    if mask.kv_len_stride_m is not None:
        end = row_lengths(mask, b, i, M, N)
    if mask.band_lo is not None:
        begin = tl.maximum(begin, i + mask.band_lo)
    if mask.band_hi is not None:
        end = tl.minimum(end, i + (mask.band_hi + 1))
    return begin, end


@triton.jit
def keep_tile(mask, b, h, i, j, begin, end, M):
    """Whether row i keeps key j. i and j broadcast to the tile, begin and end are row_range's."""
    keep = (j < end) & (i < M)
    if mask.band_lo is not None:
        keep = keep & (j >= begin)
    if mask.keep_ptr is not None:
        head = b.to(tl.int64) * mask.keep_stride_b + h.to(tl.int64) * mask.keep_stride_h
        rows = mask.keep_ptr + head + i.to(tl.int64) * mask.keep_stride_m
        dense = tl.load(rows + j.to(tl.int64) * mask.keep_stride_n, mask=keep, other=0)
        keep = keep & (dense != 0)
    return keep


@triton.jit
def in_log2(bias):
    """bias * log2(e). Only -inf masks: the lowest finite numbers, popular as mask values, must not
    overflow to it, nor the largest to +inf.
    """
    bounded = tl.maximum(tl.minimum(bias * LOG2E, HIGHEST), -HIGHEST)
    return tl.where(tl.abs(bias) < float("inf"), bounded, bias)


@triton.jit
def mask_scores(
    s, scale, bias, mask, b, h, i, j, begin, end, M, N,
    MASKED: tl.constexpr, BIASED: tl.constexpr, FOLD_SCALE: tl.constexpr,
):  # fmt: skip
    """(s, keep): scores with bias and -inf where masked; times scale here unless folded later.

    Either way one rounding, spelled out: what a compiler contracts it may contract elsewhere
    otherwise, and an ulp of a huge bias is everything.
    """
    if MASKED:
        keep = keep_tile(mask, b, h, i, j, begin, end, M)
    else:
        keep = (i < M) & (j < N)
    if BIASED:
        rows = head_ptr(bias, b, h) + i.to(tl.int64) * bias.stride_r
        ptrs = rows + j.to(tl.int64) * bias.stride_c
        added = tl.load(ptrs, mask=keep, other=float("-inf")).to(tl.float32)
        keep = keep & (added != float("-inf"))
        s = tl.fma(s, scale, in_log2(added))
    elif not FOLD_SCALE:
        s = tl.fma(s, scale, 0.0)
    if MASKED or BIASED:
        s = tl.where(keep, s, float("-inf"))
    return s, keep


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
    begin = tl.zeros_like(i0)
    full_begin = begin
    end = begin + key_count(mask, b, N)
    full_end = end
    if mask.kv_len_stride_m is not None:
        i = i0 + tl.arange(0, BLOCK_M)
        lengths = row_lengths(mask, b, i, M, N)
        end = tl.max(lengths, 0)
        full_end = tl.min(tl.where(i < M, lengths, N), 0)
    if mask.band_lo is not None:
        begin = i0 + mask.band_lo
        full_begin = i1 + mask.band_lo
    if mask.band_hi is not None:
        end = tl.minimum(end, i1 + mask.band_hi + 1)
        full_end = tl.minimum(full_end, i0 + mask.band_hi + 1)
    return block_range(begin, full_begin, full_end, end, BLOCK_N)


@triton.jit
def q_range(mask, b, j0, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row blocks that keep keys of [j0, j0 + BLOCK_N): the transpose of kv_range.

    Not for lengths that vary over rows, which are no interval of rows: those come in lists.
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
    # A block that ends past the last row is full all the same: those rows have weight 0.
    full_end = tl.where(full_end == M, full_end + BLOCK_M - 1, full_end)
    return block_range(begin, full_begin, full_end, end, BLOCK_M)


@triton.jit
def list_line(lists, b, h, block):
    """The number of the list of a block of (b, h)."""
    if lists.ptr is None:
        return block
    else:
        return b.to(tl.int64) * lists.stride_b + h.to(tl.int64) * lists.stride_h + block


@triton.jit
def list_range(lists, line):
    """(begin, full_begin, full_end, end) as positions in a list."""
    n_partial = tl.load(lists.counts_ptr + 2 * line)
    end = n_partial + tl.load(lists.counts_ptr + 2 * line + 1)
    return tl.zeros_like(end), n_partial, end, end


@triton.jit
def key_blocks(mask, lists, line, b, i0, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What a row block visits: (begin, full_begin, full_end, end) as positions for block_at."""
    if lists.ptr is not None:
        return list_range(lists, line)
    else:
        return kv_range(mask, b, i0, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def share_of_blocks(chunk, chunks, begin, full_begin, full_end, end):
    """The part of key_blocks's positions that one of several chunks takes; it may be empty."""
    per_chunk = tl.cdiv(end - begin, chunks)
    begin = tl.minimum(begin + chunk * per_chunk, end)
    end = tl.minimum(begin + per_chunk, end)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def query_blocks(mask, lists, line, b, j0, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What a key block visits, as key_blocks."""
    if lists.ptr is not None:
        return list_range(lists, line)
    else:
        return q_range(mask, b, j0, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def block_at(lists, line, position):
    """The block at a position."""
    if lists.ptr is None:
        return position
    else:
        return tl.load(lists.ptr + line * lists.length + position)


# ---- lists, made on the device ----

SKIPPED = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)
PITCH = tl.constexpr(16)


@triton.jit(do_not_specialize=VARYING)
def classify_kernel(
    classes_ptr, mask, bias, H, M, N, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Classes of the tiles of a mask: bytes [B or 1, H or 1, row blocks, key blocks]."""
    tile = tl.program_id(0).to(tl.int64)
    col, row, head = tile % n_cols, tile // n_cols % n_rows, tile // n_cols // n_rows
    b, h = head // H, head % H
    i0, j0 = (row * BLOCK_M).to(tl.int32), (col * BLOCK_N).to(tl.int32)
    begin, _, _, end = kv_range(mask, b, i0, M, N, BLOCK_M, BLOCK_N)
    found = tl.zeros_like(i0)
    if (col >= begin) & (col < end):
        i = (i0 + tl.arange(0, BLOCK_M))[:, None]
        j = (j0 + tl.arange(0, BLOCK_N))[None, :]
        row_begin, row_end = row_range(mask, b, i, M, N)
        keep = keep_tile(mask, b, h, i, j, row_begin, row_end, M)
        plain = keep
        if bias.ptr is not None:
            rows = head_ptr(bias, b, h) + i.to(tl.int64) * bias.stride_r
            ptrs = rows + j.to(tl.int64) * bias.stride_c
            added = tl.load(ptrs, mask=keep, other=float("-inf")).to(tl.float32)
            keep = keep & (added != float("-inf"))
            plain = keep & (added == 0.0)
        n_kept = tl.max(tl.max(keep.to(tl.int32), 1), 0)
        n_plain = tl.min(tl.min((plain | (i >= M)).to(tl.int32), 1), 0)
        found = n_kept * (PARTIAL + n_plain)
    tl.store(classes_ptr + tile, found.to(tl.int8))


@triton.jit(do_not_specialize=VARYING)
def compact_kernel(
    classes_ptr, list_ptr, counts_ptr, n_rows, n_cols, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Writes the list of one row of classes, or of one column: partial blocks, then full ones."""
    if COLUMNS:
        n_lines, length, stride_line, stride_block = n_cols, n_rows, 1, n_cols
    else:
        n_lines, length, stride_line, stride_block = n_rows, n_cols, n_cols, 1
    program = tl.program_id(0).to(tl.int64)
    head, number = program // n_lines, program % n_lines
    classes = classes_ptr + head * n_lines * length + number * stride_line
    line = head * (tl.cdiv(n_lines, PITCH) * PITCH) + number
    offs = tl.arange(0, CHUNK)
    n_partial = tl.zeros((), tl.int32)
    n_full = tl.zeros((), tl.int32)
    for start in tl.range(0, length, CHUNK):
        block = start + offs
        found = tl.load(classes + block * stride_block, mask=block < length, other=0)
        n_partial += tl.sum((found == PARTIAL).to(tl.int32), 0)
        n_full += tl.sum((found == FULL).to(tl.int32), 0)
    tl.store(counts_ptr + 2 * line, n_partial)
    tl.store(counts_ptr + 2 * line + 1, n_full)
    to = list_ptr + line * (tl.cdiv(length, PITCH) * PITCH)
    at_partial = tl.zeros((), tl.int32)
    at_full = n_partial
    for start in tl.range(0, length, CHUNK):
        block = start + offs
        found = tl.load(classes + block * stride_block, mask=block < length, other=0)
        partial = (found == PARTIAL).to(tl.int32)
        full = (found == FULL).to(tl.int32)
        tl.store(to + at_partial + tl.cumsum(partial, 0) - 1, block, mask=partial != 0)
        tl.store(to + at_full + tl.cumsum(full, 0) - 1, block, mask=full != 0)
        at_partial += tl.sum(partial, 0)
        at_full += tl.sum(full, 0)


# ---- host side ----


def mask_args(call) -> Mask:
    """The Mask of a launch.Call."""
    length, limit = call.kv_len, call.M + call.N
    lo, hi = (None if x is None else max(-limit, min(x, limit)) for x in call.band)
    stride_b = stride_m = None
    if length is not None:
        stride_b, stride_m = length.stride()
        stride_m = stride_m if length.shape[1] != 1 else None
    keep = None if call.keep is None else call.keep.view(torch.uint8)
    return Mask(lo, hi, length, stride_b, stride_m, *view(keep, call.shape))


def scans_bias(call) -> bool:
    """Whether the bias is looked at for tiles of -inf and 0 before it is used.

    Where it broadcasts over heads or batch, as masks do, that costs a fraction of what reading it
    in every head does; where it does not, it would double the reading.
    """
    return call.bias is not None and call.bias.numel() < call.B * call.H * call.M * call.N


def block_lists(call, mask: Mask, block_m: int, block_n: int, columns: bool = False) -> Lists:
    """The lists of the row blocks (``columns``: key blocks) of a launch.Call that needs any."""
    scan = scans_bias(call)
    rows_vary = columns and mask.kv_len_stride_m is not None
    if call.keep is None and not scan and not rows_vary:
        return NO_LISTS
    bias = view(call.bias, call.shape) if scan else ABSENT
    dense = [x for x in (call.keep, call.bias if scan else None, call.kv_len) if x is not None]
    B = call.B if any(x.shape[0] != 1 for x in dense) else 1
    H = call.H if any(x.dim() == 4 and x.shape[1] != 1 for x in dense) else 1
    rows, cols = triton.cdiv(call.M, block_m), triton.cdiv(call.N, block_n)
    tiles = B * H * rows * cols
    lines, length = (cols, rows) if columns else (rows, cols)
    pitch, room = (triton.cdiv(n, PITCH.value) * PITCH.value for n in (lines, length))
    classes = torch.empty(tiles, dtype=torch.int8, device=call.q.device)
    blocks = torch.empty(B * H * pitch, room, dtype=torch.int32, device=call.q.device)
    counts = torch.empty(B * H * pitch, 2, dtype=torch.int32, device=call.q.device)
    if tiles:
        classify_kernel[(tiles,)](
            classes, mask, bias, H, call.M, call.N, rows, cols, BLOCK_M=block_m, BLOCK_N=block_n
        )
    if B * H * lines:
        compact_kernel[(B * H * lines,)](
            classes, blocks, counts, rows, cols, CHUNK=128 if length <= 128 else 1024,
            COLUMNS=columns,
        )  # fmt: skip
    return Lists(blocks, counts, H * pitch if B > 1 else 0, pitch if H > 1 else 0, room)
