"""The gradient of the bias: dS, summed over the dims that the bias broadcasts over.

That of a line (fastattn/problem/relative.py) is dS, summed over diagonals.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastattn.problem.relative import is_line

from ..host.launch import Call, spec
from ..score.score import load_side
from ..tile.launching import launch
from ..tile.masking import key_count, kv_range, row_range
from ..tile.strided import VARYING, Dims
from .gradient import load_value_side, tile_gradient
from .sweep import Pass, Tile


@triton.jit
def add_tile(
    acc, q, k, v, terms, bias, grad_out, grad_weights, t, mask, drop, dims, spec, b, h, row, col
):  # fmt: skip
    """acc + dS of the tile (row, col), of which masks may leave nothing."""
    M, N = dims.M, dims.N
    i0 = (row * spec.BLOCK_M).to(tl.int32)
    j0 = (col * spec.BLOCK_N).to(tl.int32)
    offs_m, offs_n = i0 + tl.arange(0, spec.BLOCK_M), j0 + tl.arange(0, spec.BLOCK_N)
    i, j = offs_m[:, None], offs_n[None, :]
    EXACT: tl.constexpr = Pass(spec.BLOCK_N, MASKED=True, BIASED=True, EXACT=True, LOGITS=True)
    begin, full_begin, full_end, end = kv_range(mask, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
    if (col >= begin) & (col < end):
        keys = key_count(mask, b, N)
        hkv = h // dims.group
        x = load_side(q, terms, b, h, offs_m, M, spec, True)
        y = load_side(k, terms, b, hkv, offs_n, keys, spec, True)
        dx = load_value_side(grad_out, b, h, offs_m, M, spec, True)
        dy = load_value_side(v, b, hkv, offs_n, keys, spec, True)
        row_begin, row_end = row_range(mask, b, i, M, N)
        w, ds, keep = tile_gradient(
            x, y, dx, dy, None, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, drop, dims, spec, b, h, Tile(i0, j0, i, j, row_begin, row_end),
            EXACT, False,
        )  # fmt: skip
        acc += ds
    return acc


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_dbias_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t,
    partial_ptr, mask, drop, H, group, M, N, spec, B, bias_B, bias_H, chunks, n_rows, n_cols,
    SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """dS of one tile, summed over a chunk of the (b, h) that share a bias, in order.

    Writes [chunks, bias_B, bias_H, rows, cols]. Where the bias broadcasts over rows, or keys, there
    is one sum a row block, or key block. The caller adds up what is left.
    """
    dims = Dims(H, group, M, N)
    tile = tl.program_id(0).to(tl.int64)
    col, row, outer = tile % n_cols, tile // n_cols % n_rows, tile // n_cols // n_rows
    head, chunk = outer % (bias_B * bias_H), outer // (bias_B * bias_H)
    sharing_b, sharing_h = B // bias_B, H // bias_H
    per_chunk = tl.cdiv(sharing_b * sharing_h, chunks)
    offs_m = (row * spec.BLOCK_M).to(tl.int32) + tl.arange(0, spec.BLOCK_M)
    offs_n = (col * spec.BLOCK_N).to(tl.int32) + tl.arange(0, spec.BLOCK_N)
    i, j = offs_m[:, None], offs_n[None, :]
    acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_N), tl.float32)
    stop = tl.minimum((chunk + 1) * per_chunk, sharing_b * sharing_h)
    for n in tl.range(chunk * per_chunk, stop):
        b = (head // bias_H * sharing_b + n // sharing_h).to(tl.int32)
        h = (head % bias_H * sharing_h + n % sharing_h).to(tl.int32)
        acc = add_tile(
            acc, q, k, v, terms, bias, grad_out, grad_weights, t, mask, drop, dims, spec, b, h,
            row, col,
        )  # fmt: skip
    if SUM_ROWS and SUM_COLS:
        tl.store(partial_ptr + tile, tl.sum(tl.sum(acc, 1), 0))
    elif SUM_ROWS:
        ptrs = partial_ptr + (outer * n_rows + row) * N + offs_n
        tl.store(ptrs, tl.sum(acc, 0), mask=offs_n < N)
    elif SUM_COLS:
        ptrs = partial_ptr + (outer * M + offs_m) * n_cols + col
        tl.store(ptrs, tl.sum(acc, 1), mask=offs_m < M)
    else:
        ptrs = partial_ptr + (outer * M + i) * N + j
        tl.store(ptrs, acc.to(partial_ptr.dtype.element_ty), mask=(i < M) & (j < N))


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_dline_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t,
    partial_ptr, mask, drop, H, group, M, N, spec, n_rows, n_cols,
):  # fmt: skip
    """dS of the square tiles of one diagonal, in order, summed over the diagonals of pairs.

    Writes fp32 [B, H, n_rows + n_cols - 1, 2 BLOCK]; a pair that is (i, j) within its tile is at
    j - i + BLOCK - 1. Neighbours overlap, and the caller adds them up.
    """
    dims = Dims(H, group, M, N)
    BLOCK: tl.constexpr = spec.BLOCK_M
    number = tl.program_id(0)
    head, diagonal = number // (n_rows + n_cols - 1), number % (n_rows + n_cols - 1)
    b, h = head // H, head % H
    ahead = diagonal - (n_rows - 1)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for n in tl.range(tl.maximum(0, -ahead), tl.minimum(n_rows, n_cols - ahead)):
        row = n + tl.zeros((), tl.int32)
        acc = add_tile(
            acc, q, k, v, terms, bias, grad_out, grad_weights, t, mask, drop, dims, spec, b, h,
            row, row + ahead,
        )  # fmt: skip
    places = tl.arange(0, 2 * BLOCK)
    col = places[None, :] + tl.arange(0, BLOCK)[:, None] - (BLOCK - 1)
    inside = (col >= 0) & (col < BLOCK)
    along = tl.gather(acc, tl.where(inside, col, 0), 1)
    sums = tl.sum(tl.where(inside, along, 0.0), 0)
    tl.store(partial_ptr + number.to(tl.int64) * (2 * BLOCK) + places, sums)


# The least number of programs for the gradient of a small bias: two for each of 132
# multiprocessors. The number is fixed, as the order of sums must not depend on the device.
DBIAS_PROGRAMS = 264


def launch_dbias(call: Call, t, mask, drop):
    shape, options = spec(call, "tile")
    if is_line(call.bias, call.M, call.N):
        return _launch_dline(call, t, mask, drop, shape, options)
    B, H, M, N = call.shape
    bias_B, bias_H, bias_M, bias_N = call.bias.shape
    sum_rows, sum_cols = bias_M == 1 != M, bias_N == 1 != N
    rows, cols = triton.cdiv(M, shape.BLOCK_M.value), triton.cdiv(N, shape.BLOCK_N.value)
    tiles = bias_B * bias_H * rows * cols
    chunks = min(triton.cdiv(DBIAS_PROGRAMS, tiles), (B // bias_B) * (H // bias_H))
    whole = chunks == 1 and not sum_rows and not sum_cols  # nothing is left to add up
    partial = call.q.new_empty(
        chunks, bias_B, bias_H, rows if sum_rows else M, cols if sum_cols else N,
        dtype=call.bias.dtype if whole else torch.float32,
    )  # fmt: skip
    launch(sdpa_bwd_dbias_kernel, chunks * tiles)(
        *t, partial, mask, drop, *call.dims, shape, B, bias_B, bias_H, chunks, rows, cols,
        SUM_ROWS=sum_rows, SUM_COLS=sum_cols, **options,
    )  # fmt: skip
    if whole:
        return partial.view(call.bias.shape)
    dims = [0, *([3] if sum_rows else []), *([4] if sum_cols else [])]
    return partial.sum(dims).view(call.bias.shape).to(call.bias.dtype)


def _launch_dline(call: Call, t, mask, drop, shape, options):
    B, H, M, N = call.shape
    block = min(shape.BLOCK_M.value, shape.BLOCK_N.value)
    square = shape._replace(BLOCK_M=tl.constexpr(block), BLOCK_N=tl.constexpr(block))
    rows, cols = triton.cdiv(M, block), triton.cdiv(N, block)
    partial = call.q.new_empty(B, H, rows + cols - 1, 2, block, dtype=torch.float32)
    launch(sdpa_bwd_dline_kernel, B * H * (rows + cols - 1))(
        *t, partial, mask, drop, *call.dims, square, rows, cols, **options
    )
    low, high = (x.flatten(-2) for x in partial.unbind(-2))
    line = F.pad(low, (0, block)) + F.pad(high, (block, 0))
    line = line[..., rows * block - M :][..., None, : M + N - 1]
    return line.sum_to_size(call.bias.shape).to(call.bias.dtype)
