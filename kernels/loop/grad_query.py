"""dQ: a program owns a block of rows and sweeps the keys that some of them keep."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.launch import Call, spec
from ..score.score import load_side, pull_back
from ..tile.block_lists import block_lists, key_blocks, list_line, share_of_blocks
from ..tile.launching import launch
from ..tile.masking import key_count, row_range
from ..tile.strided import (
    EXACT_SLICE,
    VARYING,
    Dims,
    Spec,
    any_not_finite,
    head_ptr,
    place,
    row_numbers,
    store_tile,
    view,
)
from .forward import chunks_of, slots_of
from .garbage import launches, mended, row_of
from .gradient import add_product, load_rows, load_value_side, tile_gradient
from .sweep import Pass, Tile, full_span, partial_span, step_start, whole_span


@triton.jit
def sweep_keys(
    dq, side_q, do, rows, q, k, v, terms, bias, grad_out, grad_weights, t,
    mask, lists, drop, dims, spec, b, h, i0, span, PASS,
):  # fmt: skip
    """dQ of a row block from a sweep over key blocks."""
    M, N = dims.M, dims.N
    i = (i0 + tl.arange(0, spec.BLOCK_M))[:, None]
    row_begin, row_end = row_range(mask, b, i, M, N)
    keys = key_count(mask, b, N)
    stages: tl.constexpr = 1 if PASS.EXACT else spec.STAGES
    # Invariants of an exact sweep spill.
    for n in tl.range(0, span.count * PASS.SLICES, num_stages=stages, disable_licm=PASS.EXACT):
        j0 = step_start(lists, span, n, PASS)
        offs_n = j0 + tl.arange(0, PASS.SIZE)
        side_k = load_side(k, terms, b, h // dims.group, offs_n, keys, spec, PASS.MASKED)
        side_v = load_value_side(v, b, h // dims.group, offs_n, keys, spec, PASS.MASKED)
        tile = Tile(i0, j0, i, offs_n[None, :], row_begin, row_end)
        w, ds, keep = tile_gradient(
            side_q, side_k, do, side_v, rows, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, drop, dims, spec, b, h, tile, PASS, False,
        )  # fmt: skip
        if terms.w_ptr is not None:
            pull_back(ds, side_q, side_k, q, k, terms, b, h, keys, dims, spec, False)
        else:
            dq = add_product(
                dq, ds, keep, side_k, k, b, h // dims.group, offs_n, keys, spec, PASS,
                spec.D, spec.BLOCK_D,
            )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_dq_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t, grad_q, mask, lists, drop, scale,
    H, group, M, N, spec, marks_ptr, chunks, GARBAGE: tl.constexpr,
):  # fmt: skip
    """With chunks, grad_q is the part of the first chunk: see new_parts."""
    dims = Dims(H, group, M, N)
    n_blocks = tl.cdiv(M, spec.BLOCK_M)
    if chunks is not None:
        n_blocks *= chunks
    block, b, h = place(n_blocks, H, spec.REVERSE)
    grad_ptr = head_ptr(grad_q, b, h)
    if chunks is not None:
        chunk = block % chunks
        block = block // chunks
        grad_ptr += chunk * spec.D
    i0 = block * spec.BLOCK_M
    offs_m = i0 + tl.arange(0, spec.BLOCK_M)
    offs_d = tl.arange(0, spec.BLOCK_D)
    n_rows = mended(marks_ptr, M, GARBAGE)
    side_q = load_side(q, terms, b, h, offs_m, n_rows, spec, True)
    do = load_value_side(grad_out, b, h, offs_m, n_rows, spec, True)
    rows = load_rows(t, b, h, H, offs_m[:, None], M)
    line = list_line(lists, b, h, block)
    blocks = key_blocks(mask, lists, line, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
    if chunks is not None:
        blocks = share_of_blocks(chunk, chunks, blocks)

    PARTIAL: tl.constexpr = Pass(spec.BLOCK_N, MASKED=True, BIASED=bias.ptr is not None)
    FULL: tl.constexpr = Pass(spec.BLOCK_N, MASKED=False, BIASED=spec.BIAS_IN_FULL)
    dq = tl.zeros((spec.BLOCK_M, spec.BLOCK_D), tl.float32)
    if GARBAGE != "mend":
        dq = sweep_keys(
            dq, side_q, do, rows, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec, b, h, i0,
            partial_span(line, blocks), PARTIAL,
        )  # fmt: skip
        dq = sweep_keys(
            dq, side_q, do, rows, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec, b, h, i0,
            full_span(line, blocks), FULL,
        )  # fmt: skip
    if GARBAGE == "mark":
        tl.store(marks_ptr + tl.program_id(0), any_not_finite(dq, offs_m, M, spec.FLAT).to(tl.int8))
    elif GARBAGE != "none" and terms.w_ptr is None:
        again = n_rows > 0 if GARBAGE == "mend" else any_not_finite(dq, offs_m, M, spec.FLAT)
        if again:  # as forward does
            EXACT: tl.constexpr = Pass(
                EXACT_SLICE, True, bias.ptr is not None, True, spec.BLOCK_N // EXACT_SLICE
            )
            dq = tl.zeros((spec.BLOCK_M, spec.BLOCK_D), tl.float32)
            dq = sweep_keys(
                dq, side_q, do, rows, q, k, v, terms, bias, grad_out, grad_weights, t,
                mask, lists, drop, dims, spec, b, h, i0,
                whole_span(line, blocks), EXACT,
            )  # fmt: skip
    if terms.w_ptr is None:
        store_tile(grad_ptr, grad_q, offs_m, offs_d, n_rows, spec.D, dq * scale)


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_merge_kernel(parts_ptr, grad_q, chunks, H, group, M, N, spec, CHUNKS: tl.constexpr):
    """dQ of one row: the sum over its chunks, of which there are at most CHUNKS."""
    row, b, h = place(M, H, False)
    c, offs_d = tl.arange(0, CHUNKS), tl.arange(0, spec.BLOCK_D)
    part = row_numbers(b, h, H, row, M) * chunks + c
    ptrs = parts_ptr + part[:, None] * spec.D + offs_d[None, :]
    inside = (c < chunks)[:, None] & (offs_d < spec.D)[None, :]
    dq = tl.sum(tl.load(ptrs, mask=inside, other=0.0), 0)[None, :]
    offs_m = row + tl.arange(0, 1)
    store_tile(head_ptr(grad_q, b, h), grad_q, offs_m, offs_d, M, spec.D, dq)


def launch_dq(call: Call, t, mask, drop, grad_q) -> None:
    shape, options = spec(call, row_of("dq", call))
    block_m, block_n = shape.BLOCK_M.value, shape.BLOCK_N.value
    lists = block_lists(call, mask, block_m, block_n)
    # Other scores add to memory that chunks would share.
    chunks = chunks_of(call.M, call.N) if call.w is None else 1
    parts = new_parts(call) if chunks > 1 else None
    to = grad_q if parts is None else parts[:, :, :, 0]
    programs = triton.cdiv(call.M, block_m) * chunks * call.B * call.H
    for variant, marks, garbage in launches(call, shape, programs, call.w is None):
        launch(sdpa_bwd_dq_kernel, programs)(
            *t, view(to), mask, lists, drop, call.scale, *call.dims, variant,
            marks, chunks if chunks > 1 else None, GARBAGE=garbage, **options,
        )  # fmt: skip
    if parts is not None:
        launch_merge_parts(call, parts, grad_q, shape)


def new_parts(call: Call) -> Tensor:
    """Room for dQ of the chunks of every row, fp32 [B, H, M, chunks, D]."""
    chunks = chunks_of(call.M, call.N)
    return call.q.new_empty(call.B, call.H, call.M, chunks, call.D, dtype=torch.float32)


def launch_merge_parts(call: Call, parts: Tensor, grad: Tensor, shape: Spec) -> None:
    """Adds up the chunks of every row."""
    B, H, M, chunks, _ = parts.shape
    launch(sdpa_bwd_merge_kernel, B * H * M)(
        parts, view(grad), chunks, *call.dims._replace(M=M), shape, CHUNKS=slots_of(chunks)
    )
