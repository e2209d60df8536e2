"""The row term of the softmax gradient: delta_i = dO_i . O_i + sum_j W_ij dW_ij - dlse_i.

The gradient of a sink is a sum of these: -sum_i e^(sink - lse_i) delta_i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.launch import Call, Saved, spec
from ..score.score import load_side
from ..tile.dropout import survives
from ..tile.launching import launch
from ..tile.masking import key_count, kv_range, row_range
from ..tile.softmax import fold_factor, load_stats, sink_weight, unit_of, weights_of
from ..tile.strided import (
    VARYING,
    Dims,
    head_ptr,
    load_tile,
    pair_ptrs,
    place,
    row_ptrs,
    view,
)
from .forward import sink_view
from .sweep import Pass, Tile, logits


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_delta_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t, out, grad_lse_ptr, mask, drop,
    H, group, M, N, spec,
):  # fmt: skip
    dims = Dims(H, group, M, N)
    block, b, h = place(tl.cdiv(M, spec.BLOCK_M), H, False)
    i0 = block * spec.BLOCK_M
    offs_m = i0 + tl.arange(0, spec.BLOCK_M)
    offs_e = tl.arange(0, spec.BLOCK_E)
    o = load_tile(head_ptr(out, b, h), out, offs_m, offs_e, M, spec.E, True, True)
    do = load_tile(head_ptr(grad_out, b, h), grad_out, offs_m, offs_e, M, spec.E, True, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse_ptr is not None:
        ptrs = row_ptrs(grad_lse_ptr, b, h, H, offs_m, M)
        delta -= tl.load(ptrs, mask=offs_m < M, other=0.0).to(tl.float32)
    if grad_weights.ptr is not None:
        delta += sum_weights(q, k, terms, bias, grad_weights, t, mask, drop, dims, spec, b, h, i0)
    tl.store(row_ptrs(t.delta_ptr, b, h, H, offs_m, M), delta, mask=offs_m < M)
    if t.log2_ptr is not None:
        _, factor = load_stats(t.stats_ptr, b, h, H, offs_m, M)
        ptrs = row_ptrs(t.log2_ptr, b, h, H, offs_m, M)
        tl.store(ptrs, fold_factor(factor), mask=offs_m < M)


@triton.jit
def sum_weights(q, k, terms, bias, grad_weights, t, mask, drop, dims, spec, b, h, i0):
    """sum_j W_ij dW_ij of a row block."""
    M, N = dims.M, dims.N
    offs_m = i0 + tl.arange(0, spec.BLOCK_M)
    i = offs_m[:, None]
    side_q = load_side(q, terms, b, h, offs_m, M, spec, True)
    keys = key_count(mask, b, N)
    shift, factor = load_stats(t.stats_ptr, b, h, dims.H, i, M)
    row_begin, row_end = row_range(mask, b, i, M, N)
    begin, full_begin, full_end, end = kv_range(mask, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
    PARTIAL: tl.constexpr = Pass(spec.BLOCK_N, MASKED=True, BIASED=bias.ptr is not None)
    weighted = tl.zeros((spec.BLOCK_M,), tl.float32)
    for block in tl.range(begin, end):
        j0 = block * spec.BLOCK_N
        offs_n = j0 + tl.arange(0, spec.BLOCK_N)
        j = offs_n[None, :]
        side_k = load_side(k, terms, b, h // dims.group, offs_n, keys, spec, True)
        s, keep, _ = logits(
            side_q, side_k, q, k, terms, bias, mask, t.scale, keys, dims, spec, b, h,
            Tile(i0, j0, i, j, row_begin, row_end), PARTIAL, False,
        )  # fmt: skip
        w = weights_of(s, shift, factor, unit_of(t.scale, spec), False)
        if drop.seed_ptr is not None:
            kept = survives(drop, b, h, i0, j0, spec.BLOCK_M, spec.BLOCK_N, False)
            w = tl.where(kept, w * drop.scale, 0.0)
        ptrs = pair_ptrs(grad_weights, b, h, i, j)
        gw = tl.load(ptrs, mask=keep, other=0.0).to(tl.float32) * t.grad_weights_scale
        weighted += tl.sum(w * gw, 1)
    return weighted


def launch_delta(call: Call, t, mask, drop, out, grad_lse) -> None:
    shape, options = spec(call, "tile")
    grid = triton.cdiv(call.M, shape.BLOCK_M.value) * call.B * call.H
    launch(sdpa_bwd_delta_kernel, grid)(
        *t, view(out), grad_lse, mask, drop, *call.dims, shape, **options
    )


@triton.jit(do_not_specialize=VARYING)
def sink_grad_kernel(
    sink, stats_ptr, delta_ptr, grad_lse_ptr, grad_ptr, natural, H, M, BLOCK: tl.constexpr
):
    """The sum over the rows of one head. Not run on a GPU."""
    _, b, h = place(1, H, False)
    own = tl.load(head_ptr(sink, b, h))
    total = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        shift, factor = load_stats(stats_ptr, b, h, H, i, M)
        # A row without keys has the output 0, whatever its gradient is.
        delta = tl.zeros((BLOCK,), tl.float32)
        if grad_lse_ptr is not None:
            ptrs = row_ptrs(grad_lse_ptr, b, h, H, i, M)
            delta -= tl.load(ptrs, mask=i < M, other=0.0).to(tl.float32)
        if delta_ptr is not None:
            own_delta = tl.load(row_ptrs(delta_ptr, b, h, H, i, M), mask=i < M, other=0.0)
            delta = tl.where(factor == 0.0, delta, own_delta)
        total -= sink_weight(own, shift, factor, natural) * delta
    tl.store(grad_ptr + tl.program_id(0), tl.sum(total, 0).to(tl.float32))


_ROWS = 256  # that a program takes at a time


def launch_sink_grad(call: Call, saved: Saved, delta: Tensor | None) -> Tensor:
    """The gradients [B, H] of sinks; none without them. No row has keys where there is no delta."""
    if saved.sink is None:
        return call.q.new_empty(0, dtype=torch.float32)
    grad = call.q.new_empty(call.B, call.H, dtype=torch.float32)
    if grad.numel() > 0:
        launch(sink_grad_kernel, call.B * call.H)(
            sink_view(saved.sink, call), saved.stats, delta, saved.grad_lse, grad,
            call.natural, call.H, call.M, BLOCK=_ROWS,
        )  # fmt: skip
    return grad
