"""Additive attention, backward: backward.py's kernels around score/additive.py's gradients.

    dq_id = 4 w_d sum_j dS_ij t_ijd     dk_jd = 4 w_d sum_i dS_ij t_ijd     t = (1 - tanh^2) / 4
    dw_d = sum_ij dS_ij tanh(q_id + k_jd)                  dS, dV, dbias: as for every score

A program of dq owns a block of queries. It adds a tile's sums over keys, dim by dim, to its part of
a workspace laid out like E. A program of dkdv does the same with keys and F. dw has one such sum
for every query. No two programs share a sum, and every sum has one order. Who makes E and F clears
the sums.

    rows:   for (b, head, block of tokens):       dQ or dK from the sums, transposed
    w:      for (b, h, dim):                      dw, the sum over queries

    few:    for (b, key head, chunk of keys): everything, for fewer queries than a tile has rows
              for key blocks                  K, V, dK, dV stay
                for heads, queries            dQ and dw of the chunk are added up in memory, and
                                              over chunks by a merge
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..host.config import padded
from ..host.launch import FEW_QUERIES, Call, Saved, empty_gradients, spec
from ..score.additive import bounded, reciprocal
from ..score.score import load_scores
from ..tile.launching import launch
from ..tile.masking import key_count, kv_range, row_range
from ..tile.softmax import LOG2E
from ..tile.strided import (
    ABSENT,
    VARYING,
    Dims,
    head_ptr,
    load_tile,
    place,
    row_numbers,
    store_tile,
    view,
)
from .additive_forward import (
    additive_terms,
    few_terms,
    scaled_weights,
    scores_in_memory,
    view_weights,
)
from .backward import backward_args, launch_sdpa_bwd
from .gaussian import PADDING, TOKENS, is_gaussian, side_offsets, view_bandwidths
from .grad_bias import launch_dbias
from .grad_delta import launch_sink_grad
from .grad_query import launch_merge_parts, new_parts
from .gradient import load_rows, row_weights, softmax_gradient
from .sweep import Pass, Tile, logits_of, pairs_of


@triton.jit(do_not_specialize=VARYING)
def additive_bwd_few_kernel(
    q, k, v, w, bias, grad_out, grad_weights, t, scores_ptr, grad_k, grad_v, parts_ptr, parts_w_ptr,
    chunks, mask, drop, H, group, M, N, spec,
):  # fmt: skip
    """Gradients of a chunk of keys; dQ of a query, and dw of a head, are left to be added up.

    As in additive_row_scores_kernel there is no E, no F and no range. Scores come from memory, with
    the bits that forward saw. Masked pairs have dS = 0, a finite t, and W = 0 by selection, so no
    exact sweep is needed.
    """
    dims = Dims(H, group, M, N)
    chunk, b, hkv = place(chunks, H // group, False)
    keys = key_count(mask, b, N)
    n_blocks = tl.cdiv(N, spec.BLOCK_N)
    per_chunk = tl.cdiv(n_blocks, chunks)
    offs_d, offs_e = tl.arange(0, spec.BLOCK_D), tl.arange(0, spec.BLOCK_E)
    k_ptr, v_ptr = head_ptr(k, b, hkv), head_ptr(v, b, hkv)
    dk_ptr, dv_ptr = head_ptr(grad_k, b, hkv), head_ptr(grad_v, b, hkv)
    no_part = tl.zeros((spec.BLOCK_D,), tl.float32)
    for n in tl.range(0, group * M):
        q_ptrs, w_ptrs = part_ptrs(parts_ptr, parts_w_ptr, chunk, chunks, b, hkv, n, dims, spec)
        tl.store(q_ptrs, no_part, mask=offs_d < spec.D)
        tl.store(w_ptrs, no_part, mask=offs_d < spec.D)
    tl.debug_barrier()  # other threads add to them
    for block in tl.range(chunk * per_chunk, tl.minimum((chunk + 1) * per_chunk, n_blocks)):
        j0 = block * spec.BLOCK_N
        offs_n = j0 + tl.arange(0, spec.BLOCK_N)
        tile_k = load_tile(k_ptr, k, offs_n, offs_d, keys, spec.D, True, True).to(tl.float32)
        tile_v = load_tile(v_ptr, v, offs_n, offs_e, keys, spec.E, True, True).to(tl.float32)
        dk = tl.zeros((spec.BLOCK_N, spec.BLOCK_D), tl.float32)
        dv = tl.zeros((spec.BLOCK_N, spec.BLOCK_E), tl.float32)
        for n in tl.range(0, group * M):
            h, row = hkv * group + n // M, n % M
            begin, _, _, end = kv_range(mask, b, row, M, N, 1, spec.BLOCK_N)
            if (block >= begin) & (block < end):
                dk, dv, part_q, part_w = pull_back_row(
                    dk, dv, tile_k, tile_v, q, w, bias, grad_out, grad_weights, t, scores_ptr,
                    keys, mask, drop, dims, spec, b, h, row, j0,
                )  # fmt: skip
                q_ptrs, w_ptrs = part_ptrs(
                    parts_ptr, parts_w_ptr, chunk, chunks, b, hkv, n, dims, spec
                )
                part_q += tl.load(q_ptrs, mask=offs_d < spec.D)
                part_w += tl.load(w_ptrs, mask=offs_d < spec.D)
                tl.store(q_ptrs, part_q, mask=offs_d < spec.D)
                tl.store(w_ptrs, part_w, mask=offs_d < spec.D)
                tl.debug_barrier()  # the next block adds to what other threads have just stored
        if drop.seed_ptr is not None:
            dv = dv * drop.scale
        store_tile(dk_ptr, grad_k, offs_n, offs_d, N, spec.D, dk)
        store_tile(dv_ptr, grad_v, offs_n, offs_e, N, spec.E, dv)


@triton.jit
def part_ptrs(parts_ptr, parts_w_ptr, chunk, chunks, b, hkv, n, dims, spec):
    """Pointers to the parts of a chunk: dQ of row n of a group's heads, and dw of its head."""
    h, row = hkv * dims.group + n // dims.M, n % dims.M
    part = row_numbers(b, h, dims.H, row, dims.M) * chunks + chunk
    part_w = (b.to(tl.int64) * dims.H + h) * chunks + chunk
    offs_d = tl.arange(0, spec.BLOCK_D)
    return parts_ptr + part * spec.D + offs_d, parts_w_ptr + part_w * spec.D + offs_d


@triton.jit
def pull_back_row(
    dk, dv, tile_k, tile_v, q, w, bias, grad_out, grad_weights, t, scores_ptr, keys, mask, drop,
    dims, spec, b, h, row, j0,
):  # fmt: skip
    """(dK, dV, the query's dQ, the head's dw) of one query and a block of keys."""
    M = dims.M
    PARTIAL: tl.constexpr = Pass(spec.BLOCK_N, MASKED=True, BIASED=bias.ptr is not None)
    i = row + tl.zeros((1, 1), tl.int32)
    offs_n = j0 + tl.arange(0, spec.BLOCK_N)
    offs_m = row + tl.arange(0, 1)
    offs_d, offs_e = tl.arange(0, spec.BLOCK_D), tl.arange(0, spec.BLOCK_E)
    begin, end = row_range(mask, b, i, M, dims.N)
    tile = Tile(row, j0, i, offs_n[None, :], begin, end)
    q_row = load_tile(head_ptr(q, b, h), q, offs_m, offs_d, M, spec.D, False, True).to(tl.float32)
    do_ptr = head_ptr(grad_out, b, h)
    do = load_tile(do_ptr, grad_out, offs_m, offs_e, M, spec.E, False, True).to(tl.float32)
    scaled, power = scaled_weights(w, h, spec.D, spec.BLOCK_D)
    exponential = tl.exp2(tl.minimum((bounded(q_row) + bounded(tile_k)) * (2.0 * LOG2E), 100.0))
    u = reciprocal(exponential + 1.0, spec)
    rest = exponential * u
    tanh = rest - u
    s = load_scores(scores_ptr, offs_m, offs_n, b, h, keys, dims)
    pairs = pairs_of(bias, mask, dims, b, h, tile, PARTIAL)
    s, keep, slope = logits_of(s, pairs, mask, t.scale, spec, PARTIAL)
    rows = load_rows(t, b, h, dims.H, i, M)
    p = row_weights(s, rows.shift, rows.factor, t, spec)
    dp = tl.sum(tile_v * do, 1)[None, :]
    p, ds = softmax_gradient(
        p, dp, keep, slope, rows.delta, grad_weights, t, mask, drop, b, h, tile, False, True, False
    )
    ds = tl.trans(ds)
    pulled = ds * u * rest * (scaled * power * 4.0)[None, :]
    dv += tl.where(tl.trans(keep), tl.trans(p) * do, 0.0)
    return dk + pulled, dv, tl.sum(pulled, 0), tl.sum(ds * tanh, 0)


@triton.jit(do_not_specialize=VARYING)
def additive_bwd_rows_kernel(sums_ptr, grad, H, n, padded, D, BLOCK_D: tl.constexpr):
    """dQ, or dK: the sums of TOKENS rows."""
    block, b, h = place(tl.cdiv(n, TOKENS), H, False)
    offs = block * TOKENS + tl.arange(0, TOKENS)
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = sums_ptr + side_offsets(b * H + h, offs, offs_d, padded, D)
    sums = tl.load(ptrs, mask=(offs_d < D)[None, :], other=0.0)
    store_tile(head_ptr(grad, b, h), grad, offs, offs_d, n, D, sums)


@triton.jit(do_not_specialize=VARYING)
def additive_bwd_w_kernel(sums_ptr, divisor, grad_ptr, H, n, padded, D, BLOCK: tl.constexpr):
    """dw of one dim: the sum over queries, divided by a bandwidth if there are any."""
    d, b, h = place(D, H, False)
    total = tl.zeros((BLOCK, 1), sums_ptr.dtype.element_ty)
    for start in tl.range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        ptrs = sums_ptr + side_offsets(b * H + h, offs, d + tl.arange(0, 1), padded, D)
        total += tl.load(ptrs, mask=(offs < n)[:, None], other=0.0)
    dw = tl.sum(tl.sum(total, 1), 0).to(tl.float32)
    if divisor.ptr is not None:
        dw /= tl.load(head_ptr(divisor, b, h) + d.to(tl.int64) * divisor.stride_c).to(tl.float32)
    tl.store(grad_ptr + tl.program_id(0), dw)


# ---- launchers ----

STEP = 2048  # numbers that a program of few queries holds of each of K, V, dK, dV; 4096 spill


def launch_additive_bwd(call: Call, saved: Saved):
    """What ``launch_sdpa_bwd`` returns."""
    if not is_gaussian(call) and call.M <= FEW_QUERIES and math.prod(call.shape) * call.D > 0:
        return _launch_few(call, saved)
    terms = additive_terms(call, finite=True, sums=True)
    grad_q, grad_k, grad_v, grad_w, *others = launch_sdpa_bwd(call, saved, terms)
    B, H, M, D = call.q.shape
    if terms.w_ptr is None:
        return grad_q, grad_k, grad_v, grad_w.new_zeros(B, H, D), *others
    for sums, grad in ((terms.grad_q_ptr, grad_q), (terms.grad_k_ptr, grad_k)):
        heads, n = grad.shape[1:3]
        launch(additive_bwd_rows_kernel, B * heads * triton.cdiv(n, TOKENS.value))(
            sums, view(grad), heads, n, sums.shape[-1], D, BLOCK_D=padded(D)
        )
    grad_w = grad_w.new_empty(B, H, D)
    divisor = view_bandwidths(call) if is_gaussian(call) else ABSENT
    launch(additive_bwd_w_kernel, B * H * D)(
        terms.grad_w_ptr, divisor, grad_w, H, M, terms.queries, D, BLOCK=PADDING
    )
    return grad_q, grad_k, grad_v, grad_w, *others


def _launch_few(call: Call, saved: Saved):
    grads = empty_gradients(call)
    terms = few_terms(call, finite=True)
    t, mask, drop = backward_args(call, saved, terms)
    shape, options = spec(call, "decode_bwd")
    widest = max(shape.BLOCK_D.value, shape.BLOCK_E.value)
    shape = shape._replace(BLOCK_N=tl.constexpr(STEP // widest))
    parts = new_parts(call)
    B, H, _, chunks, D = parts.shape
    parts_w, grad_w = parts.new_empty(B, H, 1, chunks, D), parts.new_empty(B, H, D)
    launch(additive_bwd_few_kernel, B * call.Hkv * chunks)(
        *t[:3], view_weights(call), *t[4:], scores_in_memory(call, terms), view(grads[1]),
        view(grads[2]), parts, parts_w, chunks, mask, drop, *call.dims, shape, **options,
    )  # fmt: skip
    launch_merge_parts(call, parts, grads[0], shape)
    launch_merge_parts(call, parts_w, grad_w[:, :, None], shape)
    grad_bias = launch_dbias(call, t, mask, drop) if saved.bias_needs_grad else call.q.new_empty(0)
    return *grads, grad_w, grad_bias, launch_sink_grad(call, saved, t[-1].delta_ptr)
