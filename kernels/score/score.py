"""Tiles of scores: the dot product, and the additive or gaussian score in its place."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..tile.strided import dot_t, head_ptr, load_tile, row_numbers, stream_dot_t
from .additive import UNIT, additive_gradients, direct_scores, keys_in_range, paired_scores
from .gaussian import gaussian_gradients, gaussian_scores


class Terms(NamedTuple):
    """What scores other than the dot product take beside q and k; all None for that one.

    ``e``, ``f`` and the sums are [heads, D rounded up to 2, padded tokens], fp32 but for those of
    empty_sums; the padding makes every tile whole. The gaussian (gaussian.py) has no ``reach``, and
    r, c, q, k in the first four.
    Where scores are in memory, ``w`` is where, fp32 [B, H, M, N], and all others are None.
    """

    w_ptr: Any  # fp32 [H, D rounded up to 2]: weights over a power of two, at most 2
    power_ptr: Any  # fp32 [H]: that power; NaN if a weight is not finite
    e_ptr: Any  # per query head
    f_ptr: Any  # per key head
    reach_ptr: Any  # fp32 [B, Hkv, tokens]: the largest |exponent| of a key, inf: not for the loop
    queries: Any  # padded tokens
    keys: Any
    grad_q_ptr: Any  # what backward adds to; None where it is not wanted
    grad_k_ptr: Any
    grad_w_ptr: Any  # per query


DOT_PRODUCT = Terms(*[None] * 10)


@triton.jit
def load_side(x, terms, b, h, offs, n, spec, CHECK: tl.constexpr):
    """Queries, or keys, as ``scores`` takes them: a tile, or row numbers where loops load them."""
    if terms.w_ptr is None and not spec.STREAM:
        offs_d = tl.arange(0, spec.BLOCK_D)
        ptr = head_ptr(x, b, h)
        return load_tile(ptr, x, offs, offs_d, n, spec.D, CHECK, spec.D != spec.BLOCK_D)
    else:
        return offs


@triton.jit
def scores(x, y, q, k, terms, b, h, n_keys, dims, spec, TRANSPOSED: tl.constexpr):
    """Scores of the queries x and the keys y, as load_side gives them.

    If TRANSPOSED, x are the keys, and scores have keys by rows. n_keys: how many may be read.
    """
    if terms.w_ptr is None:
        if spec.STREAM:
            return stream_dot_t(
                x, y, q, k, b, h, n_keys, dims, spec.D, spec.BLOCK_D, spec.PRECISION, TRANSPOSED
            )
        else:
            return dot_t(x, y, spec.PRECISION)
    elif terms.e_ptr is None:
        return load_scores(terms.w_ptr, x, y, b, h, n_keys, dims)
    elif terms.reach_ptr is None:
        return gaussian_scores(x, y, terms, b, h, dims, spec, TRANSPOSED)
    else:
        if keys_in_range(x, y, terms, b, h, dims, TRANSPOSED):
            s = paired_scores(x, y, terms, b, h, dims, spec, TRANSPOSED) * (-2.0 * UNIT)
        else:
            s = direct_scores(x, y, q, k, terms, b, h, n_keys, dims, spec, TRANSPOSED) * 2.0
        return s * tl.load(terms.power_ptr + h)


@triton.jit
def load_scores(ptr, offs_m, offs_n, b, h, n_keys, dims):
    """Scores that are in memory; see Terms."""
    ptrs = ptr + row_numbers(b, h, dims.H, offs_m, dims.M)[:, None] * dims.N + offs_n[None, :]
    return tl.load(ptrs, mask=(offs_m < dims.M)[:, None] & (offs_n < n_keys)[None, :], other=0.0)


@triton.jit
def pull_back(ds, x, y, q, k, terms, b, h, n_keys, dims, spec, TRANSPOSED: tl.constexpr):
    """Adds what a tile dS contributes to the gradients of its rows: dq and dw, or dk if TRANSPOSED.

    The dot product's gradients are products of tiles instead.
    """
    if terms.reach_ptr is None:
        gaussian_gradients(ds, x, y, terms, b, h, dims, spec, TRANSPOSED)
    else:
        additive_gradients(ds, x, y, q, k, terms, b, h, n_keys, dims, spec, TRANSPOSED)
    tl.debug_barrier()  # the next tile adds to what other threads have just stored
