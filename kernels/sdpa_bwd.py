"""Scaled dot-product attention, backward, from the saved (m, 1 / l): no M x N matrix is stored.

    P = 2^(s - m) / l     W = F * P (F: dropout factors)     dP = F * (dO V^T + dW)
    dS = P * (dP - delta)     delta_i = sum_j P_ij dP_ij - dlse_i = dO_i . O_i + (W . dW)_i - dlse_i
    dV = W^T dO     dK = scale dS^T Q     dQ = scale dS K     dbias = dS, summed where it broadcasts

    delta:  for (b, h, row block): dO . O; with dW also a pass over the keys
    dq:     for (b, h, row block):       Q, dO, dQ stay; K, V stream by      3 products a tile
            (few queries: and for a chunk of the keys; a merge adds the chunks up, in order)
    dkdv:   for (b, key head, key block): K, V, dK, dV stay; Q, dO of the group's heads stream by; 4
            (heads wider than 128: dK and dV one after the other, 5)
    dbias:  for (tile of the bias): dS of all (b, h) that share it, in order

Every result has one owner, so there are no atomics, and results are the same on every run; the
price is 7 products where atomics would need 5. dkdv works on transposed tiles, so that P^T and dS^T
come out of the first products in the registers where the second ones want them. Dao,
"FlashAttention-2: faster attention with better parallelism and work partitioning", 2023.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dropout import dropout_args, survives
from .launch import Call, per_head_weights, spec
from .masking import (
    block_at,
    block_lists,
    key_blocks,
    key_count,
    kv_range,
    list_line,
    mask_args,
    mask_scores,
    query_blocks,
    row_range,
    share_of_blocks,
)
from .score import DOT_PRODUCT, Terms, load_side, pull_back, scores
from .sdpa_fwd import FEW_QUERIES, chunks_of, slots_of
from .softmax import LOG2E, fold_factor, load_stats, weights_of
from .tiles import (
    ABSENT,
    EXACT_SLICE,
    VARYING,
    Dims,
    Spec,
    any_not_finite,
    dot_t,
    exact_dot,
    head_ptr,
    load_tile,
    place,
    row_numbers,
    row_ptrs,
    store_tile,
    stream_dot_t,
    view,
)


class Backward(NamedTuple):
    """What the kernels read besides q, k, v, terms, bias, grad_out and grad_weights.

    Those seven travel beside it: Triton 3.6 forgets, in loops, the constants of tuples in tuples.
    """

    grad_weights_scale: Any  # 1 / H for a mean over heads
    stats_ptr: Any
    log2_ptr: Any  # of fold_factor, one product less in the inner loops; None where stats serve
    delta_ptr: Any
    scale_log2: Any


@triton.jit
def mended(marks_ptr, size, GARBAGE: tl.constexpr):
    """``size``, or 0 where a kernel that mends finds no mark and so neither loads nor stores."""
    if GARBAGE == "mend":
        return tl.where(tl.load(marks_ptr + tl.program_id(0)) != 0, size, 0)
    else:
        return size


@triton.jit
def load_value_side(x, b, h, offs, n, spec, CHECK: tl.constexpr):
    """Rows of dO, or of v, as tile_gradient takes them; numbers of rows where products stream."""
    if spec.STREAM:
        return offs
    else:
        offs_e = tl.arange(0, spec.BLOCK_E)
        ptr = head_ptr(x, b, h)
        return load_tile(ptr, x, offs, offs_e, n, spec.E, CHECK, spec.E != spec.BLOCK_E)


@triton.jit
def load_rows(t, b, h, H, i, M):
    """(shift, factor for weights_of, delta) of the rows i, in the shape of i."""
    delta = tl.load(row_ptrs(t.delta_ptr, b, h, H, i, M), mask=i < M, other=0.0)
    shift, factor = load_stats(t.stats_ptr, b, h, H, i, M)
    if t.log2_ptr is not None:
        ptrs = row_ptrs(t.log2_ptr, b, h, H, i, M)
        factor = tl.load(ptrs, mask=i < M, other=float("inf"))
    return shift, factor, delta


@triton.jit
def tile_gradient(
    x, y, dx, dy, shift, factor, delta,
    q, k, v, terms, bias, grad_out, grad_weights, t,
    mask, drop, dims, spec, b, h, i0, j0, i, j,
    row_begin, row_end, MASKED: tl.constexpr, BIASED: tl.constexpr, SELECT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(W without dropout's factor, dS, keep) of a tile; x, y: sides q, k; dx, dy: sides dO, v.

    TRANSPOSED: keys by rows; x, y are then k, q, and dx, dy are v, dO. i, j and what belongs to
    rows come shaped to broadcast. SELECT makes masked pairs 0 even where NaN surrounds them.
    """
    s = scores(x, y, q, k, terms, b, h, key_count(mask, b, dims.N), dims, spec, TRANSPOSED)
    s, keep = mask_scores(
        s, t.scale_log2, bias, mask, b, h, i, j, row_begin, row_end, dims.M, dims.N,
        MASKED, BIASED, spec.FOLD_SCALE,
    )  # fmt: skip
    w = weights_of(
        s, shift, factor, t.scale_log2 if spec.FOLD_SCALE else 1.0, t.log2_ptr is not None
    )
    if spec.STREAM:
        do_ptr, v_ptr = head_ptr(grad_out, b, h), head_ptr(v, b, h // dims.group)
        keys = key_count(mask, b, dims.N)
        if TRANSPOSED:
            dp = stream_dot_t(
                dx, v_ptr, v, keys, dy, do_ptr, grad_out, dims.M, spec.E, spec.BLOCK_E,
                spec.PRECISION,
            )  # fmt: skip
        else:
            dp = stream_dot_t(
                dx, do_ptr, grad_out, dims.M, dy, v_ptr, v, keys, spec.E, spec.BLOCK_E,
                spec.PRECISION,
            )  # fmt: skip
    else:
        dp = dot_t(dx, dy, spec.PRECISION)
    w, ds = softmax_gradient(
        w, dp, keep, delta, grad_weights, t, drop, b, h, i0, j0, i, j,
        SELECT, BLOCK_M, BLOCK_N, TRANSPOSED,
    )  # fmt: skip
    return w, ds, keep


@triton.jit
def softmax_gradient(
    p, dp, keep, delta, grad_weights, t, drop, b, h, i0, j0, i, j,
    SELECT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(W without dropout's factor, dS) of a tile from P and dO V^T; see tile_gradient."""
    if grad_weights.ptr is not None:
        rows = head_ptr(grad_weights, b, h) + i.to(tl.int64) * grad_weights.stride_r
        ptrs = rows + j.to(tl.int64) * grad_weights.stride_c
        dp += tl.load(ptrs, mask=keep, other=0.0).to(tl.float32) * t.grad_weights_scale
    w = p
    if drop.seed_ptr is not None:
        kept = survives(drop, b, h, i0, j0, BLOCK_M, BLOCK_N, TRANSPOSED)
        w = tl.where(kept, p, 0.0)
        dp = tl.where(kept, dp * drop.scale, 0.0)
    ds = p * (dp - delta)
    if SELECT:
        w = tl.where(keep, w, 0.0)
        ds = tl.where(keep, ds, 0.0)
    return w, ds


# ---- delta ----


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
    weighted = tl.zeros((spec.BLOCK_M,), tl.float32)
    for block in tl.range(begin, end):
        j0 = block * spec.BLOCK_N
        offs_n = j0 + tl.arange(0, spec.BLOCK_N)
        j = offs_n[None, :]
        side_k = load_side(k, terms, b, h // dims.group, offs_n, keys, spec, True)
        s = scores(side_q, side_k, q, k, terms, b, h, keys, dims, spec, False)
        s, keep = mask_scores(
            s, t.scale_log2, bias, mask, b, h, i, j, row_begin, row_end, M, N,
            True, bias.ptr is not None, spec.FOLD_SCALE,
        )  # fmt: skip
        w = weights_of(s, shift, factor, t.scale_log2 if spec.FOLD_SCALE else 1.0, False)
        if drop.seed_ptr is not None:
            kept = survives(drop, b, h, i0, j0, spec.BLOCK_M, spec.BLOCK_N, False)
            w = tl.where(kept, w * drop.scale, 0.0)
        rows = head_ptr(grad_weights, b, h) + i.to(tl.int64) * grad_weights.stride_r
        ptrs = rows + j.to(tl.int64) * grad_weights.stride_c
        gw = tl.load(ptrs, mask=keep, other=0.0).to(tl.float32) * t.grad_weights_scale
        weighted += tl.sum(w * gw, 1)
    return weighted


# ---- dQ ----


@triton.jit
def sweep_keys(
    dq, side_q, do, shift, factor, delta,
    q, k, v, terms, bias, grad_out, grad_weights, t,
    mask, lists, drop, dims, spec, b, h, line, i0,
    first, count, split, jump, MASKED: tl.constexpr, BIASED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """dQ of a row block from ``count`` key blocks; positions as in the forward's attend."""
    SELECT: tl.constexpr = EXACT or ((MASKED or BIASED) and terms.w_ptr is not None)
    M, N = dims.M, dims.N
    i = (i0 + tl.arange(0, spec.BLOCK_M))[:, None]
    row_begin, row_end = row_range(mask, b, i, M, N)
    keys = key_count(mask, b, N)
    k_ptr = head_ptr(k, b, h // dims.group)
    offs_d = tl.arange(0, spec.BLOCK_D)
    for n in tl.range(0, count * SLICES, num_stages=1 if EXACT else spec.STAGES):
        step = n + tl.zeros((), tl.int32)
        position = first + step // SLICES
        if MASKED:
            position += tl.where(step // SLICES >= split, jump, 0)
        j0 = (block_at(lists, line, position) * SLICES + step % SLICES) * BLOCK_N
        offs_n = j0 + tl.arange(0, BLOCK_N)
        side_k = load_side(k, terms, b, h // dims.group, offs_n, keys, spec, MASKED)
        side_v = load_value_side(v, b, h // dims.group, offs_n, keys, spec, MASKED)
        w, ds, keep = tile_gradient(
            side_q, side_k, do, side_v, shift, factor, delta,
            q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, drop,
            dims, spec, b, h, i0, j0, i, offs_n[None, :], row_begin, row_end,
            MASKED, BIASED, SELECT, spec.BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        if terms.w_ptr is not None:
            pull_back(ds, side_q, side_k, q, k, terms, b, h, keys, dims, spec, False)
        elif EXACT:
            dq = exact_dot(ds, keep, k_ptr, k, offs_n, keys, offs_d, spec.D, dq, BLOCK_N)
        else:
            tile_k = side_k
            if spec.STREAM:
                tile_k = load_tile(k_ptr, k, offs_n, offs_d, keys, spec.D, True, True)
            dq = tl.dot(ds.to(tile_k.dtype), tile_k, dq, input_precision=spec.PRECISION)
    return dq


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_dq_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t, grad_q, mask, lists, drop, scale,
    H, group, M, N, spec, marks_ptr, chunks, GARBAGE: tl.constexpr,
):  # fmt: skip
    """With chunks, grad_q is the first of new_parts."""
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
    rows = mended(marks_ptr, M, GARBAGE)
    side_q = load_side(q, terms, b, h, offs_m, rows, spec, True)
    do = load_value_side(grad_out, b, h, offs_m, rows, spec, True)
    shift, factor, delta = load_rows(t, b, h, H, offs_m[:, None], M)
    line = list_line(lists, b, h, block)
    begin, full_begin, full_end, end = key_blocks(
        mask, lists, line, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N
    )
    if chunks is not None:
        begin, full_begin, full_end, end = share_of_blocks(
            chunk, chunks, begin, full_begin, full_end, end
        )
    n_full = full_end - full_begin

    dq = tl.zeros((spec.BLOCK_M, spec.BLOCK_D), tl.float32)
    if GARBAGE != "mend":
        dq = sweep_keys(
            dq, side_q, do, shift, factor, delta,
            q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec, b, h, line, i0,
            begin, end - begin - n_full, full_begin - begin, n_full,
            True, bias.ptr is not None, False, spec.BLOCK_N, 1,
        )  # fmt: skip
        dq = sweep_keys(
            dq, side_q, do, shift, factor, delta,
            q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec, b, h, line, i0,
            full_begin, n_full, 0, 0, False, spec.BIAS_IN_FULL, False, spec.BLOCK_N, 1,
        )  # fmt: skip
    if GARBAGE == "mark":
        tl.store(marks_ptr + tl.program_id(0), any_not_finite(dq, offs_m, M, spec.FLAT).to(tl.int8))
    elif GARBAGE != "none" and terms.w_ptr is None:
        again = rows > 0 if GARBAGE == "mend" else any_not_finite(dq, offs_m, M, spec.FLAT)
        if again:  # as in the forward, minding masked garbage
            dq = tl.zeros((spec.BLOCK_M, spec.BLOCK_D), tl.float32)
            dq = sweep_keys(
                dq, side_q, do, shift, factor, delta,
                q, k, v, terms, bias, grad_out, grad_weights, t,
                mask, lists, drop, dims, spec,
                b, h, line, i0, begin, end - begin, end, 0,
                True, bias.ptr is not None, True, EXACT_SLICE, spec.BLOCK_N // EXACT_SLICE,
            )  # fmt: skip
    if terms.w_ptr is None:
        store_tile(grad_ptr, grad_q, offs_m, offs_d, rows, spec.D, dq * scale)


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_merge_kernel(parts_ptr, grad_q, chunks, H, group, M, N, spec, CHUNKS: tl.constexpr):
    """dQ of one row from those of its chunks, side by side: at most CHUNKS."""
    row, b, h = place(M, H, False)
    c, offs_d = tl.arange(0, CHUNKS), tl.arange(0, spec.BLOCK_D)
    part = row_numbers(b, h, H, row, M) * chunks + c
    ptrs = parts_ptr + part[:, None] * spec.D + offs_d[None, :]
    inside = (c < chunks)[:, None] & (offs_d < spec.D)[None, :]
    dq = tl.sum(tl.load(ptrs, mask=inside, other=0.0), 0)[None, :]
    offs_m = row + tl.arange(0, 1)
    store_tile(head_ptr(grad_q, b, h), grad_q, offs_m, offs_d, M, spec.D, dq)


# ---- dK, dV ----


@triton.jit
def sweep_rows(
    dk, dv, side_k, side_v, grad_k, grad_v,
    q, k, v, terms, bias, grad_out, grad_weights, t,
    mask, lists, drop, dims, spec, b, h, line, j0,
    first, count, split, jump, MASKED: tl.constexpr, BIASED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """dK and dV of a key block from ``count`` row blocks of one head; tiles are transposed."""
    SELECT: tl.constexpr = EXACT or ((MASKED or BIASED) and terms.w_ptr is not None)
    M, N = dims.M, dims.N
    j = (j0 + tl.arange(0, spec.BLOCK_N))[:, None]
    q_ptr = head_ptr(q, b, h)
    do_ptr = head_ptr(grad_out, b, h)
    offs_d = tl.arange(0, spec.BLOCK_D)
    offs_e = tl.arange(0, spec.BLOCK_E)
    for n in tl.range(0, count * SLICES, num_stages=1 if EXACT else spec.STAGES):
        step = n + tl.zeros((), tl.int32)
        position = first + step // SLICES
        if MASKED:
            position += tl.where(step // SLICES >= split, jump, 0)
        i0 = (block_at(lists, line, position) * SLICES + step % SLICES) * BLOCK_M
        offs_m = i0 + tl.arange(0, BLOCK_M)
        i = offs_m[None, :]
        side_q = load_side(q, terms, b, h, offs_m, M, spec, True)
        do = load_value_side(grad_out, b, h, offs_m, M, spec, True)
        shift, factor, delta = load_rows(t, b, h, dims.H, i, M)
        row_begin, row_end = row_range(mask, b, i, M, N)
        w, ds, keep = tile_gradient(
            side_k, side_q, side_v, do, shift, factor, delta,
            q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, drop,
            dims, spec, b, h, i0, j0, i, j, row_begin, row_end,
            MASKED, BIASED, SELECT, BLOCK_M, spec.BLOCK_N, True,
        )  # fmt: skip
        if grad_v.ptr is not None:
            if EXACT:
                dv = exact_dot(w, keep, do_ptr, grad_out, offs_m, M, offs_e, spec.E, dv, BLOCK_M)
            else:
                tile_do = do
                if spec.STREAM:
                    tile_do = load_tile(do_ptr, grad_out, offs_m, offs_e, M, spec.E, True, True)
                dv = tl.dot(w.to(tile_do.dtype), tile_do, dv, input_precision=spec.PRECISION)
        if grad_k.ptr is not None:
            if terms.w_ptr is not None:
                if not EXACT:  # which is for dV: dK minds what is masked in any case
                    keys = key_count(mask, b, N)
                    pull_back(ds, side_k, side_q, q, k, terms, b, h, keys, dims, spec, True)
            elif EXACT:
                dk = exact_dot(ds, keep, q_ptr, q, offs_m, M, offs_d, spec.D, dk, BLOCK_M)
            else:
                tile_q = side_q
                if spec.STREAM:
                    tile_q = load_tile(q_ptr, q, offs_m, offs_d, M, spec.D, True, True)
                dk = tl.dot(ds.to(tile_q.dtype), tile_q, dk, input_precision=spec.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_dkdv_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t, grad_k, grad_v, mask, lists, drop, scale,
    H, group, M, N, spec, marks_ptr, GARBAGE: tl.constexpr,
):  # fmt: skip
    """Either gradient may be absent: wide heads take one after the other, for the registers."""
    dims = Dims(H, group, M, N)
    block, b, hkv = place(tl.cdiv(N, spec.BLOCK_N), H // group, False)
    j0 = block * spec.BLOCK_N
    offs_n = j0 + tl.arange(0, spec.BLOCK_N)
    offs_d = tl.arange(0, spec.BLOCK_D)
    offs_e = tl.arange(0, spec.BLOCK_E)
    cols = mended(marks_ptr, N, GARBAGE)
    keys = tl.minimum(key_count(mask, b, N), cols)
    side_k = load_side(k, terms, b, hkv, offs_n, keys, spec, True)
    side_v = load_value_side(v, b, hkv, offs_n, keys, spec, True)
    dk = tl.zeros((spec.BLOCK_N, spec.BLOCK_D), tl.float32)
    dv = tl.zeros((spec.BLOCK_N, spec.BLOCK_E), tl.float32)
    for g in tl.range(0, 0 if GARBAGE == "mend" else group):
        h = hkv * group + g
        line = list_line(lists, b, h, block)
        begin, full_begin, full_end, end = query_blocks(
            mask, lists, line, b, j0, M, N, spec.BLOCK_M, spec.BLOCK_N
        )
        n_full = full_end - full_begin
        dk, dv = sweep_rows(
            dk, dv, side_k, side_v, grad_k, grad_v,
            q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec,
            b, h, line, j0, begin, end - begin - n_full, full_begin - begin, n_full,
            True, bias.ptr is not None, False, spec.BLOCK_M, 1,
        )  # fmt: skip
        dk, dv = sweep_rows(
            dk, dv, side_k, side_v, grad_k, grad_v,
            q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec,
            b, h, line, j0, full_begin, n_full, 0, 0,
            False, spec.BIAS_IN_FULL, False, spec.BLOCK_M, 1,
        )  # fmt: skip
    if GARBAGE == "mark":
        bad = any_not_finite(dk, offs_n, N, spec.FLAT) | any_not_finite(dv, offs_n, N, spec.FLAT)
        tl.store(marks_ptr + tl.program_id(0), bad.to(tl.int8))
    elif GARBAGE != "none":
        if GARBAGE == "mend":
            again = cols > 0
        else:
            again = any_not_finite(dk, offs_n, N, spec.FLAT) | any_not_finite(
                dv, offs_n, N, spec.FLAT
            )
        if again:
            dk = tl.zeros((spec.BLOCK_N, spec.BLOCK_D), tl.float32)
            dv = tl.zeros((spec.BLOCK_N, spec.BLOCK_E), tl.float32)
            for g in tl.range(0, group):
                h = hkv * group + g
                line = list_line(lists, b, h, block)
                begin, full_begin, full_end, end = query_blocks(
                    mask, lists, line, b, j0, M, N, spec.BLOCK_M, spec.BLOCK_N
                )
                dk, dv = sweep_rows(
                    dk, dv, side_k, side_v, grad_k, grad_v,
                    q, k, v, terms, bias, grad_out, grad_weights, t,
                    mask, lists, drop, dims, spec,
                    b, h, line, j0, begin, end - begin, end, 0,
                    True, bias.ptr is not None, True, EXACT_SLICE, spec.BLOCK_M // EXACT_SLICE,
                )  # fmt: skip
    # Keys past the length are masked for every row: what a row of NaN puts there is 0 * NaN.
    used = (offs_n < keys)[:, None]
    dk, dv = tl.where(used, dk, 0.0), tl.where(used, dv, 0.0)
    if drop.seed_ptr is not None:
        dv = dv * drop.scale
    if grad_k.ptr is not None and terms.w_ptr is None:
        store_tile(head_ptr(grad_k, b, hkv), grad_k, offs_n, offs_d, cols, spec.D, dk * scale)
    if grad_v.ptr is not None:
        store_tile(head_ptr(grad_v, b, hkv), grad_v, offs_n, offs_e, cols, spec.E, dv)


# ---- dbias ----


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_dbias_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t,
    partial_ptr, mask, drop, H, group, M, N, spec, B, bias_B, bias_H, chunks, n_rows, n_cols,
    SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """dS of one tile, summed over a chunk of the (b, h) that share a bias, in order.

    Writes fp32 [chunks, bias_B, bias_H, rows, cols]; rows (cols) are row blocks (key blocks),
    summed, where the bias broadcasts over them. The caller adds up what is left.
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
            shift, factor, delta = load_rows(t, b, h, H, i, M)
            row_begin, row_end = row_range(mask, b, i, M, N)
            w, ds, keep = tile_gradient(
                x, y, dx, dy, shift, factor, delta,
                q, k, v, terms, bias, grad_out, grad_weights, t,
                mask, drop, dims, spec,
                b, h, i0, j0, i, j, row_begin, row_end,
                True, True, True, spec.BLOCK_M, spec.BLOCK_N, False,
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


# ---- launchers ----

# Programs that the gradient of a bias is split into at least, where it is small: two for each of
# 132 multiprocessors. Fixed, as the order of sums must not depend on the device.
DBIAS_PROGRAMS = 264


def launch_sdpa_bwd(
    call: Call, out, stats, grad_out, grad_lse, grad_weights, bias_needs_grad,
    terms: Terms = DOT_PRODUCT,
):  # fmt: skip
    """(grad_q, grad_k, grad_v, grad_w, grad_bias) of the backward operator; absent: empty."""
    grads = [torch.empty_like(x) for x in (call.q, call.k, call.v)]
    grad_w = call.q.new_empty(0, dtype=torch.float32)
    grad_bias = call.q.new_empty(0)
    if math.prod(call.shape) == 0:
        if bias_needs_grad:
            grad_bias = call.bias.new_zeros(call.bias.shape)
        return *[x.zero_() for x in grads], grad_w, grad_bias
    t, mask, drop = backward_args(call, out, stats, grad_out, grad_lse, grad_weights, terms)
    _launch_dq(call, t, mask, drop, grads[0])
    _launch_dkdv(call, t, mask, drop, *grads[1:])
    if bias_needs_grad:
        grad_bias = launch_dbias(call, t, mask, drop)
    return *grads, grad_w, grad_bias


def backward_args(call: Call, out, stats, grad_out, grad_lse, grad_weights, terms: Terms):
    """(t, mask, drop) that the kernels take; launches the one that fills delta."""
    B, H, M, _ = call.shape
    share = 1.0 / H if call.weights == "mean" else 1.0
    gw = per_head_weights(call, grad_weights)
    delta = call.q.new_empty(B, H, M, dtype=torch.float32)
    # Rounded, the exponent of a small weight is off by 2^-20: that would show in fp32 results.
    folds = call.bias is None and call.q.dtype != torch.float32
    t = (
        view(call.q), view(call.k), view(call.v), terms, view(call.bias, call.shape),
        view(grad_out), view(gw), Backward(
            None if gw is None else share, stats, torch.empty_like(delta) if folds else None, delta,
            call.scale * LOG2E.value,
        ),
    )  # fmt: skip
    mask, drop = mask_args(call), dropout_args(call.dropout_p, call.seed)
    _launch_delta(call, t, mask, drop, out, grad_lse)
    return t, mask, drop


def _launch_delta(call: Call, t, mask, drop, out, grad_lse) -> None:
    shape, options = spec(call, "tile")
    grid = triton.cdiv(call.M, shape.BLOCK_M.value) * call.B * call.H
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    sdpa_bwd_delta_kernel[(grid,)](
        *t, view(out), grad_lse, mask, drop, *call.dims, shape, **options
    )


def _launch_dq(call: Call, t, mask, drop, grad_q) -> None:
    shape, options = spec(call, _row_of("dq", call))
    block_m, block_n = shape.BLOCK_M.value, shape.BLOCK_N.value
    lists = block_lists(call, mask, block_m, block_n)
    chunks = chunks_of(call.M, call.N)
    parts = new_parts(call) if chunks > 1 else None
    to = grad_q if parts is None else parts[:, :, :, 0]
    programs = triton.cdiv(call.M, block_m) * chunks * call.B * call.H
    for launch, marks, garbage in _launches(call, shape, programs, call.w is None):
        sdpa_bwd_dq_kernel[(programs,)](
            *t, view(to), mask, lists, drop, call.scale, *call.dims, launch,
            marks, chunks if chunks > 1 else None, GARBAGE=garbage, **options,
        )  # fmt: skip
    if parts is not None:
        launch_merge_dq(call, parts, grad_q, shape)


def _row_of(kernel: str, call: Call) -> str:
    """The kernel's name in config.TABLE."""
    return f"decode_{kernel}" if call.M <= FEW_QUERIES and call.w is None else kernel


def new_parts(call: Call) -> Tensor:
    """Room for dQ of the chunks of every row, fp32 [B, H, M, chunks, D]."""
    chunks = chunks_of(call.M, call.N)
    return call.q.new_empty(call.B, call.H, call.M, chunks, call.D, dtype=torch.float32)


def launch_merge_dq(call: Call, parts: Tensor, grad_q: Tensor, shape: Spec) -> None:
    """Adds up the chunks of every row."""
    chunks = parts.shape[3]
    sdpa_bwd_merge_kernel[(call.B * call.H * call.M,)](
        parts, view(grad_q), chunks, *call.dims, shape, CHUNKS=slots_of(chunks)
    )


def _launches(
    call: Call, shape, programs: int, spoils: bool
) -> list[tuple[Spec, Tensor | None, str]]:
    """(spec, marks, what to do about garbage) of each launch of a kernel.

    Where masks cut through tiles, a masked value that is not finite spoils a plain product: 0 * NaN
    is NaN. A program that sees such a result starts again, minding every pair ("mind"). That takes
    registers: kernels short of them leave a "mark", and a second launch will "mend" what it finds.
    Gradients of the additive score are no products, and do not ``spoil``.
    """
    if not (call.masks_within_tiles and spoils):
        return [(shape, None, "none")]
    if call.w is not None or _crowded(call) or _width(shape) > 128:
        marks = call.q.new_empty(programs, dtype=torch.int8)
        mend = shape._replace(STREAM=tl.constexpr(_width(shape) > 128))
        return [(shape, marks, "mark"), (mend, marks, "mend")]
    return [(shape, None, "mind")]


def _crowded(call: Call) -> bool:
    """Whether registers are short: exact products of fp32 take their operands from there."""
    return call.rich or call.q.dtype == torch.float32


def _width(shape) -> int:
    return max(shape.BLOCK_D.value, shape.BLOCK_E.value)


def _launch_dkdv(call: Call, t, mask, drop, grad_k, grad_v) -> None:
    shape, options = spec(call, _row_of("dkdv", call))
    block_m, block_n = shape.BLOCK_M.value, shape.BLOCK_N.value
    lists = block_lists(call, mask, block_m, block_n, columns=True)
    dk, dv = view(grad_k), view(grad_v)
    # Two accumulators of a wide head leave no registers for the rest, and where much is asked of an
    # additive score its loops want them.
    apart = _width(shape) > (64 if _crowded(call) else 128)
    if call.w is not None:
        apart = call.rich or _width(shape) > 128
    programs = triton.cdiv(call.N, block_n) * call.B * call.Hkv
    for wanted in ((dk, ABSENT), (ABSENT, dv)) if apart else ((dk, dv),):
        spoils = call.w is None or wanted[1] is dv
        for launch, marks, garbage in _launches(call, shape, programs, spoils):
            sdpa_bwd_dkdv_kernel[(programs,)](
                *t, *wanted, mask, lists, drop, call.scale, *call.dims, launch,
                marks, GARBAGE=garbage, **options,
            )  # fmt: skip


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
