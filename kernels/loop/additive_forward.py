"""Additive attention, forward: what comes before the loop over tiles that all scores share.

    s_ij = sum_d w_d tanh(q_id + k_jd)      the rest as in forward.py

    centre:   for (b, key head, share of the keys):  lowest and highest key of every dim
    factors:  for (b, head, block of tokens):        E = e^2q or F = e^2k, transposed; for keys also
                                                     how far they reach from the centre, for queries
                                                     w over a power of two
    then sdpa_fwd_kernel, with tiles of scores from score/additive.py. The device decides there
    which loop the range of the keys needs, so the host waits for nothing.

    rows:     for (b, h, query, chunk of keys):      scores of very few queries, instead of all that
    scores:   for (b, h, tile):                      if weights are returned, scores to memory
                                                     first: both kernels of forward.py read them

Workspaces are fp32 and as large as q and k, and scores of up to 16 queries, or of returned weights.
Sums of fp32 gradients are float64. Nothing is of size M x N x D. Saved for backward: the same as
in forward.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.config import padded
from ..host.launch import Call, spec
from ..score.additive import HALF_UNIT, KEY_LIMIT, SATURATION, reciprocal
from ..score.score import DOT_PRODUCT, Terms, scores
from ..tile.launching import launch
from ..tile.masking import key_count, kv_range, mask_args
from ..tile.softmax import LOG2E
from ..tile.strided import (
    ABSENT,
    VARYING,
    Dims,
    View,
    head_ptr,
    load_tile,
    place,
    row_numbers,
    row_offsets,
    view,
)
from .forward import chunks_of, launch_sdpa_fwd
from .gaussian import PADDING, TOKENS, empty_sums, gaussian_terms, is_gaussian, store_side

SHARES = tl.constexpr(16)  # of the keys, at most
SHARE = 512  # keys, at least
LARGEST_KEY = tl.constexpr(4096.0)  # its exponent is below 2^14, as that of a query it can meet
LN2_HIGH = tl.constexpr(0.693359375)  # 10 bits: its products with exponents up to 2^14 are exact
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)


@triton.jit(do_not_specialize=VARYING)
def additive_centre_kernel(k, low_ptr, high_ptr, mask, Hkv, N, shares, D, BLOCK_D: tl.constexpr):
    """The lowest and the highest key of every dim in a share of the keys: fp32 [B Hkv, shares, D].

    Keys beyond LARGEST_KEY do not count: their tiles take the direct loop in any case.
    """
    share, b, h = place(shares, Hkv, False)
    keys = key_count(mask, b, N)
    per_share = tl.cdiv(tl.cdiv(N, shares), TOKENS) * TOKENS
    offs_d = tl.arange(0, BLOCK_D)
    low = tl.full((TOKENS, BLOCK_D), float("inf"), tl.float32)
    high = tl.full((TOKENS, BLOCK_D), float("-inf"), tl.float32)
    for start in tl.range(share * per_share, tl.minimum((share + 1) * per_share, keys), TOKENS):
        offs_n = start + tl.arange(0, TOKENS)
        tile = load_tile(head_ptr(k, b, h), k, offs_n, offs_d, keys, D, True, True).to(tl.float32)
        counts = (offs_n < keys)[:, None] & (tl.abs(tile) <= LARGEST_KEY)
        low = tl.minimum(low, tl.where(counts, tile, float("inf")))
        high = tl.maximum(high, tl.where(counts, tile, float("-inf")))
    at = tl.program_id(0).to(tl.int64) * D + offs_d
    tl.store(low_ptr + at, tl.min(low, 0), mask=offs_d < D)
    tl.store(high_ptr + at, tl.max(high, 0), mask=offs_d < D)


@triton.jit
def load_centre(low_ptr, high_ptr, head, shares, D, BLOCK_D: tl.constexpr):
    """The middle of the keys: exponents that divide F of a key head, and multiply E.

    0 where keys are in range without that.
    """
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    share = tl.arange(0, SHARES)[:, None]
    at = (head.to(tl.int64) * shares + share) * D + offs_d
    inside = (share < shares) & (offs_d < D)
    low = tl.min(tl.load(low_ptr + at, mask=inside, other=float("inf")), 0)
    high = tl.max(tl.load(high_ptr + at, mask=inside, other=float("-inf")), 0)
    near = tl.maximum(tl.abs(low), tl.abs(high)) * (2.0 * LOG2E) < KEY_LIMIT - 1.0
    return tl.where(near | (low > high), 0.0, tl.floor((low + high) * LOG2E + 0.5))


@triton.jit(do_not_specialize=VARYING)
def additive_factors_kernel(
    x, w, low_ptr, high_ptr, factor_ptr, grad_ptr, grad_w_ptr, reach_ptr, w_ptr, power_ptr, mask,
    H, group, n, padded, shares, D, BLOCK_D: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """e^(2 x) of TOKENS queries, or keys if reach_ptr is given: 2^(whole +- centre) e^rest.

    Beside queries, the first program of a head fills w and power of Terms.

    The rest is found without loss (Cody and Waite), and the shift by a whole number is exact. So a
    factor is as accurate as its smallest exponent allows: q = 60 + a and k = -60 + b lose nothing.
    """
    block, b, h = place(padded // TOKENS, H, False)
    offs = block * TOKENS + tl.arange(0, TOKENS)
    offs_d = tl.arange(0, BLOCK_D)
    count = n
    if reach_ptr is not None:
        count = key_count(mask, b, n)
    tile = load_tile(head_ptr(x, b, h), x, offs, offs_d, count, D, True, True).to(tl.float32)
    head = b * (H // group) + h // group
    centre = load_centre(low_ptr, high_ptr, head, shares, D, BLOCK_D)[None, :]
    wild = tl.abs(tile) > 2.0 * LARGEST_KEY
    x2 = tl.where(wild, tl.where(tile > 0.0, 4.0, -4.0) * LARGEST_KEY, 2.0 * tile)
    whole = tl.floor(tl.fma(x2, LOG2E, 0.5))
    rest = tl.fma(whole, -LN2_LOW, tl.fma(whole, -LN2_HIGH, x2))
    if reach_ptr is not None:
        whole -= centre
        used = (offs < count)[:, None] & (offs_d < D)[None, :]
        far = tl.where(tl.abs(tile) <= LARGEST_KEY, tl.abs(whole), float("inf"))
        reach = tl.max(tl.where(used, far, 0.0), 1)
        at = (b.to(tl.int64) * H + h) * padded + offs
        tl.store(reach_ptr + at, reach)
        limit = KEY_LIMIT
    else:
        whole += centre
        limit = KEY_LIMIT + SATURATION
    exponent = tl.maximum(tl.minimum(whole, limit) + HALF_UNIT, -127.0).to(tl.int32)
    power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)  # 0 at -127
    factor = tl.where(tile == tile, tl.exp(rest) * power, 0.0 if FINITE else float("nan"))
    store_side(factor, factor_ptr, grad_ptr, grad_w_ptr, b * H + h, offs, offs_d, padded, D)
    if w_ptr is not None:
        if (b == 0) & (block == 0):
            store_weights(w, w_ptr, power_ptr, h, D, BLOCK_D)


@triton.jit
def scaled_weights(w, h, D, BLOCK_D: tl.constexpr):
    """(weights / p, p) of a head, p being the power of two that makes the heaviest at most 2.

    Products of weights and denominators then stay in range. p is NaN if a weight is not finite.
    """
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = w.ptr + h.to(tl.int64) * w.stride_h * w.UNIT + offs_d.to(tl.int64) * w.stride_c
    x = tl.load(ptrs, mask=offs_d < D, other=0.0).to(tl.float32)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 0) > 0
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 1 << 23), 252 << 23)
    down = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    return x * down, tl.where(finite, bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def store_weights(w, w_ptr, power_ptr, h, D, BLOCK_D: tl.constexpr):
    """Fills w and power of Terms for a head."""
    offs_d = tl.arange(0, BLOCK_D)
    width = (D + 1) // 2 * 2
    scaled, power = scaled_weights(w, h, D, BLOCK_D)
    tl.store(w_ptr + h * width + offs_d, scaled, mask=offs_d < width)
    tl.store(power_ptr + h, power)


# ---- scores in memory ----


@triton.jit(do_not_specialize=VARYING)
def additive_row_scores_kernel(q, k, w, scores_ptr, mask, chunks, H, group, M, N, spec):
    """Scores of one query and a chunk of its keys, which are read in place.

    With one query, a pair is a key: an exponential for each costs no more than F would. So there is
    no E, no F and no range, and 2^60 stands for all that is larger.
    """
    part, b, h = place(M * chunks, H, False)
    row, chunk = part // chunks, part % chunks
    begin, _, _, end = kv_range(mask, b, row, M, N, 1, spec.BLOCK_N)
    per_chunk = tl.cdiv(end - begin, chunks)
    begin += chunk * per_chunk
    keys = key_count(mask, b, N)
    offs_d = tl.arange(0, spec.BLOCK_D)
    k_ptr = head_ptr(k, b, h // group)
    q_ptrs = head_ptr(q, b, h) + row_offsets(q, row) + offs_d.to(tl.int64) * q.stride_c
    q_row = tl.load(q_ptrs, mask=offs_d < spec.D, other=0.0).to(tl.float32)[None, :]
    scaled, power = scaled_weights(w, h, spec.D, spec.BLOCK_D)
    w1, w2 = tl.split(tl.reshape(scaled, (1, spec.BLOCK_D // 2, 2)))
    to_ptr = scores_ptr + row_numbers(b, h, H, row, M) * N
    for block in tl.range(begin, tl.minimum(begin + per_chunk, end)):
        offs_n = block * spec.BLOCK_N + tl.arange(0, spec.BLOCK_N)
        tile_k = load_tile(k_ptr, k, offs_n, offs_d, keys, spec.D, True, True)
        exponent = (q_row + tile_k.to(tl.float32)) * (2.0 * LOG2E)
        d = tl.exp2(tl.where(exponent > 60.0, 60.0, exponent)) + 1.0
        d1, d2 = tl.split(tl.reshape(d, (spec.BLOCK_N, spec.BLOCK_D // 2, 2)))
        halves = 0.5 * (w1 + w2) - (w1 * d2 + w2 * d1) * reciprocal(d1 * d2, spec)
        tl.store(to_ptr + offs_n, tl.sum(halves, 1) * 2.0 * power, mask=offs_n < keys)


@triton.jit(do_not_specialize=VARYING)
def additive_tile_scores_kernel(
    q, k, terms, scores_ptr, mask, H, group, M, N, spec, n_rows, n_cols
):
    """Scores of one tile, as the loops over tiles compute them."""
    dims = Dims(H, group, M, N)
    tile, b, h = place(n_rows * n_cols, H, False)
    row, col = tile // n_cols, tile % n_cols
    i0, j0 = row * spec.BLOCK_M, col * spec.BLOCK_N
    offs_m, offs_n = i0 + tl.arange(0, spec.BLOCK_M), j0 + tl.arange(0, spec.BLOCK_N)
    begin, _, _, end = kv_range(mask, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
    if (col >= begin) & (col < end):
        keys = key_count(mask, b, N)
        s = scores(offs_m, offs_n, q, k, terms, b, h, keys, dims, spec, False)
        ptrs = scores_ptr + row_numbers(b, h, H, offs_m, M)[:, None] * N + offs_n[None, :]
        tl.store(ptrs, s, mask=(offs_m < M)[:, None] & (offs_n < keys)[None, :])


# ---- launchers ----

ROWS_APART = 4  # at most so many queries have programs of their own; a tile would idle
STEP = 4096  # numbers of K that a program of a row holds at a time
KEPT_BYTES = 1 << 28  # at most, of scores that are kept for returned weights (0030)


def launch_additive_fwd(call: Call, sink: Tensor | None = None):
    """(out, lse, weights, stats) of the forward operator, for the gaussian score too."""
    terms = few_terms(call)
    if call.weights and terms.e_ptr is not None and 4 * math.prod(call.shape) <= KEPT_BYTES:
        terms = DOT_PRODUCT._replace(w_ptr=scores_in_memory(call, terms, "tile"))
    return launch_sdpa_fwd(call, sink, terms)


def few_terms(call: Call, finite: bool = False) -> Terms:
    """additive_terms of few queries, whose scores are in memory if a tile would idle.

    All kernels then read one number, whatever the order of its sum: forward, weights, gradients.
    """
    if is_gaussian(call) or call.M > ROWS_APART or math.prod(call.shape) * call.D == 0:
        return additive_terms(call, finite)
    s = new_scores(call)
    chunks = chunks_of(call.M, call.N)
    shape, options = spec(call, "decode")
    shape = shape._replace(BLOCK_N=tl.constexpr(STEP // shape.BLOCK_D.value))
    options |= dict(num_warps=4, num_stages=1)  # always: another launch may sum in another order
    launch(additive_row_scores_kernel, call.B * call.H * call.M * chunks)(
        view(call.q), view(call.k), view_weights(call), s, mask_args(call), chunks, *call.dims,
        shape, **options,
    )  # fmt: skip
    return DOT_PRODUCT._replace(w_ptr=s)


def new_scores(call: Call):
    """Room for scores."""
    return call.q.new_empty(call.shape, dtype=torch.float32)


def scores_in_memory(call: Call, terms: Terms, kernel: str = "decode"):
    """fp32 [B, H, M, N], written where a mask may keep a pair; ``terms`` are few_terms.

    ``kernel`` names the row of config.py that has the tile. A score depends on it only if a key of
    its tile is out of range (0009).
    """
    if terms.e_ptr is None:
        return terms.w_ptr
    s = new_scores(call)
    shape, options = spec(call, kernel)
    rows, cols = triton.cdiv(call.M, shape.BLOCK_M.value), triton.cdiv(call.N, shape.BLOCK_N.value)
    launch(additive_tile_scores_kernel, call.B * call.H * rows * cols)(
        view(call.q), view(call.k), terms, s, mask_args(call), *call.dims, shape, rows, cols,
        **options,
    )  # fmt: skip
    return s


def additive_terms(call: Call, finite: bool = False, sums: bool = False) -> Terms:
    """The Terms of a call, with E and F.

    ``finite``: E of a NaN is 0. Backward needs that, and finds the NaN in a row's statistics.
    ``sums``: those of gradients are 0, else absent.
    """
    if call.B * call.H * call.M * call.N * call.D == 0:
        return DOT_PRODUCT  # there are no scores, or all of them are 0
    if is_gaussian(call):
        return gaussian_terms(call, sums)
    B, Hkv, pairs = call.B, call.Hkv, triton.cdiv(call.D, 2)
    queries, keys = (triton.cdiv(n, PADDING) * PADDING for n in (call.M, call.N))
    shares = min(SHARES.value, triton.cdiv(call.N, SHARE))
    low, high, e, f, reach, w, power = (
        call.q.new_empty(shape, dtype=torch.float32)
        for shape in (
            (B, Hkv, shares, call.D), (B, Hkv, shares, call.D),
            (B, call.H, 2 * pairs, queries), (B, Hkv, 2 * pairs, keys), (B, Hkv, keys),
            (call.H, 2 * pairs), (call.H,),
        )
    )  # fmt: skip
    grad_q, grad_k, grad_w = empty_sums(call, e, f, sums)
    mask = mask_args(call)
    options = dict(
        BLOCK_D=padded(call.D), num_warps=4 if call.D <= 128 else 8, enable_fp_fusion=True
    )
    launch(additive_centre_kernel, B * Hkv * shares)(
        view(call.k), low, high, mask, Hkv, call.N, shares, call.D, **options
    )

    def launch_factors(x, group: int, weights, factor, *made) -> None:
        _, heads, tokens, _ = x.shape
        length = factor.shape[-1]
        launch(additive_factors_kernel, B * heads * (length // TOKENS.value))(
            view(x), weights, low, high, factor, *made, mask, heads, group, tokens, length, shares,
            call.D, FINITE=finite, **options,
        )  # fmt: skip

    launch_factors(call.q, call.H // Hkv, view_weights(call), e, grad_q, grad_w, None, w, power)
    launch_factors(call.k, 1, ABSENT, f, grad_k, None, reach, None, None)
    return Terms(w, power, e, f, reach, queries, keys, grad_q, grad_k, grad_w)


def view_weights(call: Call) -> View:
    """The weights as [1, H, 1, D]."""
    return view(call.w[None, :, None])
