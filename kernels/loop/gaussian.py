"""The Terms of a gaussian score: see score/gaussian.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastattn.problem.record import SCORES

from ..host.config import padded
from ..host.launch import Call
from ..host.tuned import BLOCKS
from ..score.score import Terms
from ..tile.launching import launch
from ..tile.strided import VARYING, head_ptr, load_tile, place, view

PADDING = BLOCKS[-1]  # tokens
TOKENS = tl.constexpr(32)  # of a program; 32 x 256 numbers are 64 registers a thread


@triton.jit
def gaussian_bandwidths_kernel(
    w_ptr, stride_b, stride_h, stride_d, ratio_ptr, factor_ptr, H, D, BLOCK_D: tl.constexpr
):  # fmt: skip
    """r and c of a head, as bandwidths_of in csrc/problem/bandwidths.h has them."""
    head = tl.program_id(0)
    offs_d = tl.arange(0, BLOCK_D)
    start = w_ptr + (head // H).to(tl.int64) * stride_b + (head % H).to(tl.int64) * stride_h
    w = tl.load(start + offs_d.to(tl.int64) * stride_d, mask=offs_d < D, other=float("inf"))
    size = tl.abs(w.to(tl.float32))
    least = tl.min(size, 0)
    least = tl.where(least < float("inf"), tl.maximum(least, 1.1754943508222875e-38), 1.0)
    bits = tl.minimum(least.to(tl.int32, bitcast=True) & 0x7F800000, 252 << 23)
    power = ((254 << 23) - bits).to(tl.float32, bitcast=True).to(tl.float64)
    one = least.to(tl.float64) * power
    # NaN stays NaN.
    ratio = power * (least.to(tl.float64) / tl.where(size < least, least, size).to(tl.float64))
    width = (D + 1) // 2 * 2
    tl.store(ratio_ptr + head.to(tl.int64) * width + offs_d, ratio.to(tl.float32),
             mask=offs_d < width)  # fmt: skip
    tl.store(factor_ptr + head, (1.0 / (one * one)).to(tl.float32))


@triton.jit(do_not_specialize=VARYING)
def transpose_kernel(x, to_ptr, H, n, padded, D, BLOCK_D: tl.constexpr):
    """TOKENS queries, or keys, as Terms has them; 0 behind the last one."""
    block, b, h = place(padded // TOKENS, H, False)
    offs = block * TOKENS + tl.arange(0, TOKENS)
    offs_d = tl.arange(0, BLOCK_D)
    tile = load_tile(head_ptr(x, b, h), x, offs, offs_d, n, D, True, True)
    store_transposed(to_ptr, tile.to(tl.float32), b * H + h, offs, offs_d, padded, D)


@triton.jit
def store_transposed(ptr, tile, head, offs, offs_d, padded, D):
    """Writes a tile of tokens by dims as Terms has them."""
    width = (D + 1) // 2 * 2
    at = head.to(tl.int64) * width + offs_d[None, :]
    tl.store(ptr + at * padded + offs[:, None], tile, mask=offs_d[None, :] < width)


def is_gaussian(call: Call) -> bool:
    """Whether a call's score is this one."""
    return call.score == SCORES["gaussian"]


def gaussian_terms(call: Call) -> Terms:
    """The Terms of a call: r, c, and transposed queries and keys."""
    B, H, D = call.B, call.H, call.D
    width = triton.cdiv(D, 2) * 2
    queries, keys = (triton.cdiv(n, PADDING) * PADDING for n in (call.M, call.N))

    def transposed(x, length: int):
        _, heads, tokens, _ = x.shape
        to = x.new_empty(B, heads, width, length, dtype=torch.float32)
        launch(transpose_kernel, B * heads * (length // TOKENS.value))(
            view(x), to, heads, tokens, length, D, BLOCK_D=padded(D)
        )
        return to

    ratio = call.q.new_empty(B, H, width, dtype=torch.float32)
    factor = call.q.new_empty(B, H, dtype=torch.float32)
    w = call.w.expand(B, H, D)
    launch(gaussian_bandwidths_kernel, B * H)(
        w, *w.stride(), ratio, factor, H, D, BLOCK_D=padded(D)
    )
    sides = transposed(call.q, queries), transposed(call.k, keys)
    return Terms(ratio, factor, *sides, None, queries, keys, None, None, None)
