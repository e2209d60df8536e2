"""Lists of the blocks that a dense mask or a float bias leaves to visit, made on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launching import launch
from .masking import (
    Mask,
    heads_of_mask,
    keep_tile,
    keeps_intervals,
    kv_range,
    needs_lists,
    q_range,
    row_range,
    scans_bias,
)
from .strided import ABSENT, VARYING, pair_ptrs, view

PITCH = tl.constexpr(16)


class Lists(NamedTuple):
    """Lists of blocks, partial ones first; None where ranges serve.

    Lines and their length are rounded up to PITCH, because Triton compiles a kernel again for
    multiples of 16.
    """

    ptr: Any  # int32 [lines, length]
    counts_ptr: Any  # int32 [lines, 2]: partial, full
    stride_b: Any  # in lines
    stride_h: Any
    length: Any


NO_LISTS = Lists(None, None, None, None, None)


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
    """(begin, full_begin, full_end, end) of what a row block visits, as positions for block_at."""
    if lists.ptr is not None:
        return list_range(lists, line)
    else:
        return kv_range(mask, b, i0, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def share_of_blocks(chunk, chunks, blocks):
    """The part of key_blocks's positions that one of several chunks takes; it may be empty."""
    begin, full_begin, full_end, end = blocks
    per_chunk = tl.cdiv(end - begin, chunks)
    begin = tl.minimum(begin + chunk * per_chunk, end)
    end = tl.minimum(begin + per_chunk, end)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def query_blocks(mask, lists, line, b, j0, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same of what a key block visits."""
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


# Classes of tiles: 0 is skipped.
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)


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
            ptrs = pair_ptrs(bias, b, h, i, j)
            added = tl.load(ptrs, mask=keep, other=float("-inf")).to(tl.float32)
            keep = keep & (added != float("-inf"))
            plain = keep & (added == 0.0)
        n_kept = tl.max(tl.max(keep.to(tl.int32), 1), 0)
        n_plain = tl.min(tl.min((plain | (i >= M)).to(tl.int32), 1), 0)
        found = n_kept * (PARTIAL + n_plain)
    tl.store(classes_ptr + tile, found.to(tl.int8))


@triton.jit(do_not_specialize=VARYING)
def classify_rows_kernel(
    classes_ptr, mask, H, M, N, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The same without a dense mask: a program writes the classes of a row block.

    A row keeps an interval of keys, so it says of a tile, and not of every key, what it keeps.
    """
    line = tl.program_id(0).to(tl.int64)
    row, head = line % n_rows, line // n_rows
    b = head // H
    i0 = (row * BLOCK_M).to(tl.int32)
    first, _, _, last = kv_range(mask, b, i0, M, N, BLOCK_M, BLOCK_N)
    i = (i0 + tl.arange(0, BLOCK_M))[:, None]
    begin, end = row_range(mask, b, i, M, N)
    for start in tl.range(0, n_cols, CHUNK):
        col = start + tl.arange(0, CHUNK)
        found = tl.zeros((CHUNK,), tl.int32)
        if (start < last) & (start + CHUNK > first):
            j0 = (col * BLOCK_N)[None, :]
            keep = (i < M) & (tl.maximum(begin, j0) < tl.minimum(end, j0 + BLOCK_N))
            plain = (begin <= j0) & (end >= j0 + BLOCK_N)
            n_kept = tl.max(keep.to(tl.int32), 0)
            found = n_kept * (PARTIAL + tl.min((plain | (i >= M)).to(tl.int32), 0))
        tl.store(classes_ptr + line * n_cols + col, found.to(tl.int8), mask=col < n_cols)


@triton.jit(do_not_specialize=VARYING)
def compact_kernel(
    classes_ptr, list_ptr, counts_ptr, n_rows, n_cols, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Writes the list of one row of classes, or of one column: partial blocks, then full ones."""
    if COLUMNS:
        n_lines, length, stride_line, stride_block = n_cols, n_rows, 1, n_cols.to(tl.int64)
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


def block_lists(call, mask: Mask, block_m: int, block_n: int, columns: bool = False) -> Lists:
    """The lists of the row blocks (``columns``: key blocks) of a launch.Call that needs any."""
    if not needs_lists(call, columns):
        return NO_LISTS
    bias = view(call.bias, call.shape) if scans_bias(call) else ABSENT
    B, H = heads_of_mask(call)
    rows, cols = triton.cdiv(call.M, block_m), triton.cdiv(call.N, block_n)
    tiles = B * H * rows * cols
    lines, length = (cols, rows) if columns else (rows, cols)
    pitch, room = (triton.cdiv(n, PITCH.value) * PITCH.value for n in (lines, length))
    classes = torch.empty(tiles, dtype=torch.int8, device=call.q.device)
    blocks = torch.empty(B * H * pitch, room, dtype=torch.int32, device=call.q.device)
    counts = torch.empty(B * H * pitch, 2, dtype=torch.int32, device=call.q.device)
    about = H, call.M, call.N, rows, cols
    if tiles and keeps_intervals(call):
        launch(classify_rows_kernel, B * H * rows)(
            classes, mask, *about, BLOCK_M=block_m, BLOCK_N=block_n, CHUNK=64
        )
    elif tiles:
        launch(classify_kernel, tiles)(
            classes, mask, bias, *about, BLOCK_M=block_m, BLOCK_N=block_n
        )
    if B * H * lines:
        launch(compact_kernel, B * H * lines)(
            classes, blocks, counts, rows, cols, CHUNK=128 if length <= 128 else 1024,
            COLUMNS=columns,
        )  # fmt: skip
    return Lists(blocks, counts, H * pitch if B > 1 else 0, pitch if H > 1 else 0, room)
