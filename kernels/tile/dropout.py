"""Dropout bits: Philox4x32 with 7 rounds, a pure function of (seed, b, h, i, j).

``problem.Dropout`` is the definition, and every backend draws the same bits. Backward draws them
again, so nothing of size M x N is stored. The seed is drawn on the device and stays there: a CUDA
graph draws new bits whenever it is replayed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.problem import record


class Dropout(NamedTuple):
    """What a kernel is given; all None without dropout."""

    seed_ptr: Any
    threshold: Any  # 32 bits, as a signed int
    scale: Any
    b: Any = None  # of a block of a larger problem: where its indices begin in that; else None
    h: Any = None
    i: Any = None
    j4: Any = None  # of 4 keys


def dropout_args(p: float, seed, origin: tuple[int, int, int, int] = (0, 0, 0, 0)) -> Dropout:
    """From the probability, the int64 seed tensor, and the indices (b, h, i, j) of a block."""
    if p == 0.0:
        return Dropout(None, None, None)
    rule = record.Dropout(p, seed)
    signed = rule.threshold - 2**32 if rule.threshold >= 2**31 else rule.threshold
    *first, j = origin
    return Dropout(seed, signed, rule.scale, *((*first, j // 4) if any(origin) else ()))


@triton.jit
def survives(
    drop, b, h, i0, j0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Which weights of the tile at (i0, j0) are kept: bool [BLOCK_M, BLOCK_N], or its transpose.

    j0 is a multiple of 4. A counter yields the words of 4 neighbouring keys, which are drawn once
    and interleaved.
    """
    i = i0 + tl.arange(0, BLOCK_M)
    j4 = j0 // 4 + tl.arange(0, BLOCK_N // 4)
    if TRANSPOSED:
        i = i[None, :]
        j4 = j4[:, None]
    else:
        i = i[:, None]
        j4 = j4[None, :]
    if drop.i is not None:
        b += drop.b
        h += drop.h
        i += drop.i
        j4 += drop.j4
    seed = tl.load(drop.seed_ptr)
    w0, w1, w2, w3 = tl.philox(seed, j4, i, h, b, n_rounds=7)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [.., .., 2, 2]: the last two dims are j % 4
    if TRANSPOSED:
        words = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (BLOCK_N, BLOCK_M))
    else:
        words = tl.reshape(words, (BLOCK_M, BLOCK_N))
    threshold = tl.full((1, 1), drop.threshold, tl.int32).to(tl.uint32, bitcast=True)
    return words >= threshold
