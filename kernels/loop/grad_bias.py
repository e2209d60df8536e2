"""The gradient of the bias: dS, summed over the dims that the bias broadcasts over."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..host.launch import Call, spec
from ..score.score import load_side
from ..tile.masking import key_count, kv_range, row_range
from ..tile.strided import VARYING, Dims
from .gradient import load_rows, load_value_side, tile_gradient
from .sweep import Pass, Tile


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_dbias_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t,
    partial_ptr, mask, drop, H, group, M, N, spec, B, bias_B, bias_H, chunks, n_rows, n_cols,
    SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """dS of one tile, summed over a chunk of the (b, h) that share a bias, in order.

    Writes fp32 [chunks, bias_B, bias_H, rows, cols]. Where the bias broadcasts over rows, or keys,
    there is one sum a row block, or key block. The caller adds up what is left.
    """
    dims = Dims(H, group, M, N)
    tile = tl.program_id(0).to(tl.int64)
    col, row, outer = tile % n_cols, tile // n_cols % n_rows, tile // n_cols // n_rows
    head, chunk = outer % (bias_B * bias_H), outer // (bias_B * bias_H)
    sharing_b, sharing_h = B // bias_B, H // bias_H
    per_chunk = tl.cdiv(sharing_b * sharing_h, chunks)
    i0 = (row * spec.BLOCK_M).to(tl.int32)
    j0 = (col * spec.BLOCK_N).to(tl.int32)
    offs_m, offs_n = i0 + tl.arange(0, spec.BLOCK_M), j0 + tl.arange(0, spec.BLOCK_N)
    i, j = offs_m[:, None], offs_n[None, :]
    EXACT: tl.constexpr = Pass(spec.BLOCK_N, MASKED=True, BIASED=True, EXACT=True, LOGITS=True)
    acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_N), tl.float32)
    stop = tl.minimum((chunk + 1) * per_chunk, sharing_b * sharing_h)
    for n in tl.range(chunk * per_chunk, stop):
        b = (head // bias_H * sharing_b + n // sharing_h).to(tl.int32)
        h = (head % bias_H * sharing_h + n % sharing_h).to(tl.int32)
        begin, full_begin, full_end, end = kv_range(mask, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
        if (col >= begin) & (col < end):
            keys = key_count(mask, b, N)
            hkv = h // group
            x = load_side(q, terms, b, h, offs_m, M, spec, True)
            y = load_side(k, terms, b, hkv, offs_n, keys, spec, True)
            dx = load_value_side(grad_out, b, h, offs_m, M, spec, True)
            dy = load_value_side(v, b, hkv, offs_n, keys, spec, True)
            rows = load_rows(t, b, h, H, i, M)
            row_begin, row_end = row_range(mask, b, i, M, N)
            w, ds, keep = tile_gradient(
                x, y, dx, dy, rows, q, k, v, terms, bias, grad_out, grad_weights, t,
                mask, drop, dims, spec, b, h, Tile(i0, j0, i, j, row_begin, row_end),
                EXACT, False,
            )  # fmt: skip
            acc += ds
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
        tl.store(ptrs, acc, mask=(i < M) & (j < N))


# The least number of programs for the gradient of a small bias: two for each of 132
# multiprocessors. The number is fixed, as the order of sums must not depend on the device.
DBIAS_PROGRAMS = 264


def launch_dbias(call: Call, t, mask, drop):
    shape, options = spec(call, "tile")
    B, H, M, N = call.shape
    bias_B, bias_H, bias_M, bias_N = call.bias.shape
    sum_rows, sum_cols = bias_M == 1 != M, bias_N == 1 != N
    rows, cols = triton.cdiv(M, shape.BLOCK_M.value), triton.cdiv(N, shape.BLOCK_N.value)
    tiles = bias_B * bias_H * rows * cols
    chunks = min(triton.cdiv(DBIAS_PROGRAMS, tiles), (B // bias_B) * (H // bias_H))
    partial = call.q.new_empty(
        chunks, bias_B, bias_H, rows if sum_rows else M, cols if sum_cols else N,
        dtype=torch.float32,
    )  # fmt: skip
    sdpa_bwd_dbias_kernel[(chunks * tiles,)](
        *t, partial, mask, drop, *call.dims, shape, B, bias_B, bias_H, chunks, rows, cols,
        SUM_ROWS=sum_rows, SUM_COLS=sum_cols, **options,
    )  # fmt: skip
    dims = [0, *([3] if sum_rows else []), *([4] if sum_cols else [])]
    return partial.sum(dims).view(call.bias.shape).to(call.bias.dtype)
