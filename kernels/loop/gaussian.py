"""The Terms of a gaussian score: see score/gaussian.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.problem.record import SCORES

from ..host.config import padded
from ..host.launch import Call
from ..host.tuned import BLOCKS
from ..score.score import Terms
from ..tile.launching import launch
from ..tile.strided import ABSENT, VARYING, View, head_ptr, load_tile, place, view

PADDING = BLOCKS[-1]  # tokens
TOKENS = tl.constexpr(32)  # of a program; 32 x 256 numbers are 64 registers a thread


@triton.jit(do_not_specialize=VARYING)
def gaussian_side_kernel(
    x, w, to_ptr, grad_ptr, grad_w_ptr, ratio_ptr, factor_ptr, H, n, padded, D,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """TOKENS queries, or keys, as Terms has them; 0 behind the last one.

    Beside queries, the first program of a head makes r and c.
    """
    block, b, h = place(padded // TOKENS, H, False)
    offs = block * TOKENS + tl.arange(0, TOKENS)
    offs_d = tl.arange(0, BLOCK_D)
    tile = load_tile(head_ptr(x, b, h), x, offs, offs_d, n, D, True, True).to(tl.float32)
    store_side(tile, to_ptr, grad_ptr, grad_w_ptr, b * H + h, offs, offs_d, padded, D)
    if w.ptr is not None:
        if block == 0:
            store_bandwidths(w, ratio_ptr, factor_ptr, b, h, H, offs_d, D)


@triton.jit
def store_bandwidths(w, ratio_ptr, factor_ptr, b, h, H, offs_d, D):
    """r and c of a head, as bandwidths_of in csrc/problem/bandwidths.h has them."""
    ptrs = head_ptr(w, b, h) + offs_d.to(tl.int64) * w.stride_c
    size = tl.abs(tl.load(ptrs, mask=offs_d < D, other=float("inf")).to(tl.float32))
    least = tl.min(size, 0)
    least = tl.where(least < float("inf"), tl.maximum(least, 1.1754943508222875e-38), 1.0)
    bits = tl.minimum(least.to(tl.int32, bitcast=True) & 0x7F800000, 252 << 23)
    power = ((254 << 23) - bits).to(tl.float32, bitcast=True).to(tl.float64)
    one = least.to(tl.float64) * power
    # NaN stays NaN.
    ratio = power * (least.to(tl.float64) / tl.where(size < least, least, size).to(tl.float64))
    width = (D + 1) // 2 * 2
    tl.store(ratio_ptr + (b * H + h).to(tl.int64) * width + offs_d, ratio.to(tl.float32),
             mask=offs_d < width)  # fmt: skip
    tl.store(factor_ptr + b * H + h, (1.0 / (one * one)).to(tl.float32))


@triton.jit
def store_side(tile, ptr, grad_ptr, grad_w_ptr, head, offs, offs_d, padded, D):
    """Writes a tile of tokens by dims as Terms has them, and 0 to the sums that there are."""
    at = side_offsets(head, offs, offs_d, padded, D)
    inside = (offs_d < (D + 1) // 2 * 2)[None, :]
    tl.store(ptr + at, tile, mask=inside)
    if grad_ptr is not None:
        tl.store(grad_ptr + at, tl.zeros_like(tile), mask=inside)
    if grad_w_ptr is not None:
        tl.store(grad_w_ptr + at, tl.zeros_like(tile), mask=inside)


@triton.jit
def side_offsets(head, offs, offs_d, padded, D):
    """Where tokens, by rows, and dims of a head are in an array of Terms."""
    return (head.to(tl.int64) * ((D + 1) // 2 * 2) + offs_d)[None, :] * padded + offs[:, None]


def is_gaussian(call: Call) -> bool:
    """Whether a call's score is this one."""
    return call.score == SCORES["gaussian"]


def empty_sums(call: Call, e: Tensor, f: Tensor, wanted: bool) -> tuple[Tensor | None, ...]:
    """Those of Terms, uninitialised: of the queries, the keys and the parameter.

    Thousands of blocks add to the sums of a row. In float32 these would lose digits of fp32.
    """
    kind = torch.float64 if call.q.dtype == torch.float32 else torch.float32
    return tuple(torch.empty_like(x, dtype=kind) if wanted else None for x in (e, f, e))


def gaussian_terms(call: Call, sums: bool) -> Terms:
    """The Terms of a call: r, c, and transposed queries and keys."""
    B, H, D = call.B, call.H, call.D
    width = triton.cdiv(D, 2) * 2
    queries, keys = (triton.cdiv(n, PADDING) * PADDING for n in (call.M, call.N))
    ratio, factor, e, f = (
        call.q.new_empty(shape, dtype=torch.float32)
        for shape in ((B, H, width), (B, H), (B, H, width, queries), (B, call.Hkv, width, keys))
    )
    grad_q, grad_k, grad_w = empty_sums(call, e, f, sums)

    def launch_side(x: Tensor, w: View, to: Tensor, *made: Tensor | None) -> None:
        _, heads, tokens, _ = x.shape
        length = to.shape[-1]
        launch(gaussian_side_kernel, B * heads * (length // TOKENS.value))(
            view(x), w, to, *made, heads, tokens, length, D, BLOCK_D=padded(D)
        )

    launch_side(call.q, view_bandwidths(call), e, grad_q, grad_w, ratio, factor)
    launch_side(call.k, ABSENT, f, grad_k, None, None, None)
    return Terms(ratio, factor, e, f, None, queries, keys, grad_q, grad_k, grad_w)


def view_bandwidths(call: Call) -> View:
    """The bandwidths as [B, H, 1, D]."""
    return view(call.w.expand(call.B, call.H, call.D)[:, :, None])
