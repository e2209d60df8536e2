"""The gradient of one tile: W and dS from scores, dO V^T and what a row has saved."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..tile.curve import curve_gradient
from ..tile.dropout import survives
from ..tile.masking import key_count
from ..tile.softmax import load_stats, unit_of, weights_of
from ..tile.strided import dot_t, exact_dot, head_ptr, load_tile, pair_ptrs, row_ptrs, stream_dot_t
from .sweep import logits


class Backward(NamedTuple):
    """What the kernels read besides q, k, v, terms, bias, grad_out and grad_weights.

    Those seven travel beside it: in loops, Triton 3.6 forgets the constants of tuples in tuples.
    """

    grad_weights_scale: Any  # 1 / H for a mean over heads
    stats_ptr: Any
    log2_ptr: Any  # fold_factor's, which saves a product in inner loops; None where stats serve
    delta_ptr: Any
    scale: Any  # of scores: see unit_of


class Rows(NamedTuple):
    """What forward saved of some rows, in the shape of their numbers."""

    shift: Any  # see weights_of, as for factor
    factor: Any
    delta: Any


@triton.jit
def load_value_side(x, b, h, offs, n, spec, CHECK: tl.constexpr):
    """Rows of dO, or of v, as tile_gradient takes them; row numbers where products stream."""
    if spec.STREAM:
        return offs
    else:
        offs_e = tl.arange(0, spec.BLOCK_E)
        ptr = head_ptr(x, b, h)
        return load_tile(ptr, x, offs, offs_e, n, spec.E, CHECK, spec.E != spec.BLOCK_E)


@triton.jit
def add_product(
    acc, a, used, side, x, b, h, offs, n, spec, PASS, N_COLS: tl.constexpr, BLOCK: tl.constexpr
):
    """acc + a @ (rows ``offs`` of x), of which ``side`` is the tile, unless products stream.

    One sum over thousands of rows would lose digits of fp32. Triton makes one of a plain addition
    to a product, but not of an fma.
    """
    ptr = head_ptr(x, b, h)
    offs_c = tl.arange(0, BLOCK)
    start = tl.zeros_like(acc) if spec.APART else acc
    if PASS.EXACT:
        product = exact_dot(a, used, ptr, x, offs, n, offs_c, N_COLS, start, PASS.SIZE)
    else:
        tile = side
        if spec.STREAM:
            tile = load_tile(ptr, x, offs, offs_c, n, N_COLS, True, True)
        product = tl.dot(a.to(tile.dtype), tile, start, input_precision=spec.PRECISION)
    return tl.fma(product, 1.0, acc) if spec.APART else product


@triton.jit
def load_rows(t, b, h, H, i, M):
    """What is saved of the rows i, in the shape of i."""
    shift, factor = load_factors(t, b, h, H, i, M)
    return Rows(shift, factor, load_delta(t, b, h, H, i, M))


@triton.jit
def load_factors(t, b, h, H, i, M):
    """(shift, factor) of Rows."""
    shift, factor = load_stats(t.stats_ptr, b, h, H, i, M)
    if t.log2_ptr is not None:
        ptrs = row_ptrs(t.log2_ptr, b, h, H, i, M)
        factor = tl.load(ptrs, mask=i < M, other=float("inf"))
    return shift, factor


@triton.jit
def load_delta(t, b, h, H, i, M):
    """The delta of Rows."""
    return tl.load(row_ptrs(t.delta_ptr, b, h, H, i, M), mask=i < M, other=0.0)


@triton.jit
def row_weights(s, shift, factor, t, spec):
    """Softmax weights of the logits s; see weights_of."""
    return weights_of(s, shift, factor, unit_of(t.scale, spec), t.log2_ptr is not None)


@triton.jit
def tile_gradient(
    x, y, dx, dy, rows, q, k, v, terms, bias, grad_out, grad_weights, t, mask, drop, dims, spec,
    b, h, tile, PASS, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(W without dropout's factor, dS, keep) of a tile. x, y: sides q, k; dx, dy: sides dO, v.

    TRANSPOSED: keys by rows; x, y are then k, q, and dx, dy are v, dO. ``rows``: load_rows of the
    tile, where they stay while others stream by. None: they are loaded where they are used, since
    those of many queries would spill beside two products.
    """
    # The additive score's gradients have no exact sweep: their masked pairs are 0 in every sweep.
    SELECT: tl.constexpr = PASS.EXACT or ((PASS.MASKED or PASS.BIASED) and terms.w_ptr is not None)
    s, keep, slope = logits(
        x, y, q, k, terms, bias, mask, t.scale, key_count(mask, b, dims.N), dims, spec, b, h,
        tile, PASS, TRANSPOSED,
    )  # fmt: skip
    if rows is None:
        shift, factor = load_factors(t, b, h, dims.H, tile.i, dims.M)
    else:
        shift, factor = rows.shift, rows.factor
    w = row_weights(s, shift, factor, t, spec)
    if spec.STREAM:
        dp = stream_dot_t(
            dx, dy, grad_out, v, b, h, key_count(mask, b, dims.N), dims, spec.E, spec.BLOCK_E,
            spec.PRECISION, TRANSPOSED,
        )  # fmt: skip
    else:
        dp = dot_t(dx, dy, spec.PRECISION)
    if rows is None:
        delta = load_delta(t, b, h, dims.H, tile.i, dims.M)
    else:
        delta = rows.delta
    w, ds = softmax_gradient(
        w, dp, keep, slope, delta, grad_weights, t, mask, drop, b, h, tile, PASS.LOGITS, SELECT,
        TRANSPOSED,
    )  # fmt: skip
    return w, ds, keep


@triton.jit
def softmax_gradient(
    p, dp, keep, slope, delta, grad_weights, t, mask, drop, b, h, tile,
    LOGITS: tl.constexpr, SELECT: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(W without dropout's factor, dS) of a tile from P and dO V^T; see tile_gradient.

    ``slope``: that of logits_of. LOGITS: dS is the gradient of logits. SELECT makes masked pairs 0,
    even where they are NaN.
    """
    if grad_weights.ptr is not None:
        ptrs = pair_ptrs(grad_weights, b, h, tile.i, tile.j)
        dp += tl.load(ptrs, mask=keep, other=0.0).to(tl.float32) * t.grad_weights_scale
    w = p
    if drop.seed_ptr is not None:
        BLOCK_M: tl.constexpr = p.shape[1] if TRANSPOSED else p.shape[0]
        BLOCK_N: tl.constexpr = p.shape[0] if TRANSPOSED else p.shape[1]
        kept = survives(drop, b, h, tile.i0, tile.j0, BLOCK_M, BLOCK_N, TRANSPOSED)
        w = tl.where(kept, p, 0.0)
        dp = tl.where(kept, dp * drop.scale, 0.0)
    ds = p * (dp - delta)
    if SELECT:
        w = tl.where(keep, w, 0.0)
        ds = tl.where(keep, ds, 0.0)
    if not LOGITS:
        ds = curve_gradient(ds, slope, mask)
    return w, ds
