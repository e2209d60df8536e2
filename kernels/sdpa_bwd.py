"""Scaled dot-product attention, backward, from the saved log-sum-exp: no M x N matrix is stored.

    P = 2^(s - lse)     W = F * P (F: dropout factors)     dP = F * (dO V^T + dW)
    dS = P * (dP - delta)     delta_i = sum_j P_ij dP_ij - dlse_i = dO_i . O_i + (W . dW)_i - dlse_i
    dV = W^T dO     dK = scale dS^T Q     dQ = scale dS K     dbias = dS, summed where it broadcasts

    delta:  for (b, h, row block): dO . O; with dW also a pass over the keys
    dq:     for (b, h, row block):       Q, dO, dQ stay; K, V stream by      3 products a tile
    dkdv:   for (b, key head, key block): K, V, dK, dV stay; Q, dO of the group's heads stream by; 4
            (heads wider than 128: dK and dV one after the other, 5)
    dbias:  for (tile of the bias): dS of all (b, h) that share it, in order

Every result has one owner, so there are no atomics, and results are the same on every run; the
price is 7 products where atomics would need 5. dkdv works on transposed tiles, so that P^T and dS^T
come out of the first products in the registers where the second ones want them. Dao,
"FlashAttention-2: faster attention with better parallelism and work partitioning", 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

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
)
from .softmax import LOG2E, load_factor, load_lse_log2, weights_of
from .tiles import (
    ABSENT,
    EXACT_SLICE,
    any_not_finite,
    dot_t,
    exact_dot,
    head_ptr,
    load_tile,
    place,
    row_ptrs,
    store_tile,
    view,
)


class Backward(NamedTuple):
    """What the kernels read besides q, k, v, bias, grad_out and grad_weights.

    Those six travel beside it: Triton 3.6 forgets, in loops, the constants of tuples in tuples.
    """

    grad_weights_scale: Any  # 1 / H for a mean over heads
    lse_ptr: Any
    factor_ptr: Any  # what 2^(s - lse) is multiplied by; None: nothing
    delta_ptr: Any
    scale_log2: Any


@triton.jit
def tile_gradient(
    x, y, dx, dy, lse_log2, factor, delta,
    q, k, v, bias, grad_out, grad_weights, t,
    mask, drop, dims, spec, b, h, i0, j0, i, j,
    row_begin, row_end, MASKED: tl.constexpr, BIASED: tl.constexpr, SELECT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(W without dropout's factor, dS, keep) of a tile; x, y are q, k, and dx, dy are dO, v.

    TRANSPOSED: keys by rows; x, y are then k, q, and dx, dy are v, dO. i, j, lse and delta come
    shaped to broadcast. SELECT makes masked pairs 0 even where NaN surrounds them.
    """
    s = dot_t(x, y, spec.PRECISION)
    s, keep = mask_scores(
        s, t.scale_log2, bias, mask, b, h, i, j, row_begin, row_end, dims.M, dims.N,
        MASKED, BIASED, spec.FOLD_SCALE,
    )  # fmt: skip
    w = weights_of(s, lse_log2, factor, t.scale_log2 if spec.FOLD_SCALE else 1.0, BIASED)
    dp = dot_t(dx, dy, spec.PRECISION)
    if grad_weights.ptr is not None:
        rows = head_ptr(grad_weights, b, h) + i.to(tl.int64) * grad_weights.stride_r
        ptrs = rows + j.to(tl.int64) * grad_weights.stride_c
        dp += tl.load(ptrs, mask=keep, other=0.0).to(tl.float32) * t.grad_weights_scale
    p = w
    if drop.seed_ptr is not None:
        kept = survives(drop, b, h, i0, j0, BLOCK_M, BLOCK_N, TRANSPOSED)
        w = tl.where(kept, p, 0.0)
        dp = tl.where(kept, dp * drop.scale, 0.0)
    ds = p * (dp - delta)
    if SELECT:
        w = tl.where(keep, w, 0.0)
        ds = tl.where(keep, ds, 0.0)
    return w, ds, keep


# ---- delta ----


@triton.jit
def sdpa_bwd_delta_kernel(
    q, k, v, bias, grad_out, grad_weights, t, out, grad_lse_ptr, mask, drop, dims, spec
):
    M = dims.M
    block, b, h = place(tl.cdiv(M, spec.BLOCK_M), dims.H, False)
    i0 = block * spec.BLOCK_M
    offs_m = i0 + tl.arange(0, spec.BLOCK_M)
    offs_e = tl.arange(0, spec.BLOCK_E)
    o = load_tile(head_ptr(out, b, h), out, offs_m, offs_e, M, spec.E, True, True)
    do = load_tile(head_ptr(grad_out, b, h), grad_out, offs_m, offs_e, M, spec.E, True, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse_ptr is not None:
        ptrs = row_ptrs(grad_lse_ptr, b, h, dims.H, offs_m, M)
        delta -= tl.load(ptrs, mask=offs_m < M, other=0.0).to(tl.float32)
    if grad_weights.ptr is not None or t.factor_ptr is not None:
        total, weighted = sum_weights(
            q, k, v, bias, grad_out, grad_weights, t, mask, drop, dims, spec, b, h, i0
        )
        if t.factor_ptr is not None:
            factor = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
            weighted = weighted * factor
            ptrs = row_ptrs(t.factor_ptr, b, h, dims.H, offs_m, M)
            tl.store(ptrs, factor, mask=offs_m < M)
        delta += weighted
    tl.store(row_ptrs(t.delta_ptr, b, h, dims.H, offs_m, M), delta, mask=offs_m < M)


@triton.jit
def sum_weights(q, k, v, bias, grad_out, grad_weights, t, mask, drop, dims, spec, b, h, i0):
    """(sum_j 2^(s_ij - lse_i), sum_j W_ij dW_ij) of a row block."""
    M, N = dims.M, dims.N
    offs_m = i0 + tl.arange(0, spec.BLOCK_M)
    offs_d = tl.arange(0, spec.BLOCK_D)
    i = offs_m[:, None]
    tile_q = load_tile(
        head_ptr(q, b, h), q, offs_m, offs_d, M, spec.D, True, spec.D != spec.BLOCK_D
    )
    lse_log2 = load_lse_log2(t.lse_ptr, b, h, dims.H, offs_m, M)
    row_begin, row_end = row_range(mask, b, i, M, N)
    begin, full_begin, full_end, end = kv_range(mask, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
    total = tl.zeros((spec.BLOCK_M,), tl.float32)
    weighted = tl.zeros((spec.BLOCK_M,), tl.float32)
    for block in tl.range(begin, end):
        j0 = block * spec.BLOCK_N
        offs_n = j0 + tl.arange(0, spec.BLOCK_N)
        j = offs_n[None, :]
        tile_k = load_tile(
            head_ptr(k, b, h // dims.group), k, offs_n, offs_d, key_count(mask, b, N), spec.D,
            True, spec.D != spec.BLOCK_D,
        )  # fmt: skip
        s = dot_t(tile_q, tile_k, spec.PRECISION)
        s, keep = mask_scores(
            s, t.scale_log2, bias, mask, b, h, i, j, row_begin, row_end, M, N,
            True, bias.ptr is not None, spec.FOLD_SCALE,
        )  # fmt: skip
        w = weights_of(
            s, lse_log2[:, None], 1.0, t.scale_log2 if spec.FOLD_SCALE else 1.0,
            bias.ptr is not None,
        )  # fmt: skip
        total += tl.sum(w, 1)
        if grad_weights.ptr is not None:
            if drop.seed_ptr is not None:
                kept = survives(drop, b, h, i0, j0, spec.BLOCK_M, spec.BLOCK_N, False)
                w = tl.where(kept, w * drop.scale, 0.0)
            rows = head_ptr(grad_weights, b, h) + i.to(tl.int64) * grad_weights.stride_r
            ptrs = rows + j.to(tl.int64) * grad_weights.stride_c
            gw = tl.load(ptrs, mask=keep, other=0.0).to(tl.float32) * t.grad_weights_scale
            weighted += tl.sum(w * gw, 1)
    return total, weighted


# ---- dQ ----


@triton.jit
def sweep_keys(
    dq, tile_q, do, lse_log2, factor, delta,
    q, k, v, bias, grad_out, grad_weights, t,
    mask, lists, drop, dims, spec, b, h, line, i0,
    first, count, split, jump, MASKED: tl.constexpr, BIASED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """dQ of a row block from ``count`` key blocks; positions as in the forward's attend."""
    M, N = dims.M, dims.N
    i = (i0 + tl.arange(0, spec.BLOCK_M))[:, None]
    row_begin, row_end = row_range(mask, b, i, M, N)
    keys = key_count(mask, b, N)
    k_ptr = head_ptr(k, b, h // dims.group)
    v_ptr = head_ptr(v, b, h // dims.group)
    offs_d = tl.arange(0, spec.BLOCK_D)
    offs_e = tl.arange(0, spec.BLOCK_E)
    for n in tl.range(0, count * SLICES, num_stages=1 if EXACT else spec.STAGES):
        step = n + tl.zeros((), tl.int32)
        position = first + step // SLICES
        if MASKED:
            position += tl.where(step // SLICES >= split, jump, 0)
        j0 = (block_at(lists, line, position) * SLICES + step % SLICES) * BLOCK_N
        offs_n = j0 + tl.arange(0, BLOCK_N)
        tile_k = load_tile(k_ptr, k, offs_n, offs_d, keys, spec.D, MASKED, spec.D != spec.BLOCK_D)
        tile_v = load_tile(v_ptr, v, offs_n, offs_e, keys, spec.E, MASKED, spec.E != spec.BLOCK_E)
        w, ds, keep = tile_gradient(
            tile_q, tile_k, do, tile_v, lse_log2[:, None], factor, delta[:, None],
            q, k, v, bias, grad_out, grad_weights, t,
            mask, drop,
            dims, spec, b, h, i0, j0, i, offs_n[None, :], row_begin, row_end,
            MASKED, BIASED, EXACT, spec.BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        if EXACT:
            dq = exact_dot(ds, keep, k_ptr, k, offs_n, keys, offs_d, spec.D, dq, BLOCK_N)
        else:
            dq = tl.dot(ds.to(tile_k.dtype), tile_k, dq, input_precision=spec.PRECISION)
    return dq


@triton.jit
def sdpa_bwd_dq_kernel(
    q, k, v, bias, grad_out, grad_weights, t, grad_q, mask, lists, drop, scale, dims, spec
):
    M, N = dims.M, dims.N
    block, b, h = place(tl.cdiv(M, spec.BLOCK_M), dims.H, spec.REVERSE)
    i0 = block * spec.BLOCK_M
    offs_m = i0 + tl.arange(0, spec.BLOCK_M)
    offs_d = tl.arange(0, spec.BLOCK_D)
    offs_e = tl.arange(0, spec.BLOCK_E)
    tile_q = load_tile(
        head_ptr(q, b, h), q, offs_m, offs_d, M, spec.D, True, spec.D != spec.BLOCK_D
    )
    do = load_tile(
        head_ptr(grad_out, b, h), grad_out, offs_m, offs_e, M, spec.E,
        True, spec.E != spec.BLOCK_E,
    )  # fmt: skip
    lse_log2 = load_lse_log2(t.lse_ptr, b, h, dims.H, offs_m, M)
    delta = tl.load(row_ptrs(t.delta_ptr, b, h, dims.H, offs_m, M), mask=offs_m < M, other=0.0)
    factor = load_factor(t.factor_ptr, b, h, dims.H, i0 + tl.arange(0, spec.BLOCK_M)[:, None], M)
    line = list_line(lists, b, h, block)
    begin, full_begin, full_end, end = key_blocks(
        mask, lists, line, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N
    )
    n_full = full_end - full_begin

    dq = tl.zeros((spec.BLOCK_M, spec.BLOCK_D), tl.float32)
    dq = sweep_keys(
        dq, tile_q, do, lse_log2, factor, delta,
        q, k, v, bias, grad_out, grad_weights, t,
        mask, lists, drop, dims, spec, b, h, line, i0,
        begin, end - begin - n_full, full_begin - begin, n_full,
        True, bias.ptr is not None, False, spec.BLOCK_N, 1,
    )  # fmt: skip
    dq = sweep_keys(
        dq, tile_q, do, lse_log2, factor, delta,
        q, k, v, bias, grad_out, grad_weights, t,
        mask, lists, drop, dims, spec, b, h, line, i0,
        full_begin, n_full, 0, 0, False, spec.BIAS_IN_FULL, False, spec.BLOCK_N, 1,
    )  # fmt: skip
    if spec.MASKS_WITHIN_TILES:
        if any_not_finite(dq, offs_m, M):  # as in the forward: again, minding masked garbage
            dq = tl.zeros((spec.BLOCK_M, spec.BLOCK_D), tl.float32)
            dq = sweep_keys(
                dq, tile_q, do, lse_log2, factor, delta,
                q, k, v, bias, grad_out, grad_weights, t,
                mask, lists, drop, dims, spec,
                b, h, line, i0, begin, end - begin, end, 0,
                True, bias.ptr is not None, True, EXACT_SLICE, spec.BLOCK_N // EXACT_SLICE,
            )  # fmt: skip
    store_tile(head_ptr(grad_q, b, h), grad_q, offs_m, offs_d, M, spec.D, dq * scale)


# ---- dK, dV ----


@triton.jit
def sweep_rows(
    dk, dv, tile_k, tile_v, grad_k, grad_v,
    q, k, v, bias, grad_out, grad_weights, t,
    mask, lists, drop, dims, spec, b, h, line, j0,
    first, count, split, jump, MASKED: tl.constexpr, BIASED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """dK and dV of a key block from ``count`` row blocks of one head; tiles are transposed."""
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
        tile_q = load_tile(q_ptr, q, offs_m, offs_d, M, spec.D, True, spec.D != spec.BLOCK_D)
        do = load_tile(do_ptr, grad_out, offs_m, offs_e, M, spec.E, True, spec.E != spec.BLOCK_E)
        lse_log2 = load_lse_log2(t.lse_ptr, b, h, dims.H, offs_m, M)
        delta = tl.load(row_ptrs(t.delta_ptr, b, h, dims.H, offs_m, M), mask=offs_m < M, other=0.0)
        factor = load_factor(t.factor_ptr, b, h, dims.H, i, M)
        row_begin, row_end = row_range(mask, b, i, M, N)
        w, ds, keep = tile_gradient(
            tile_k, tile_q, tile_v, do, lse_log2[None, :], factor, delta[None, :],
            q, k, v, bias, grad_out, grad_weights, t,
            mask, drop,
            dims, spec, b, h, i0, j0, i, j, row_begin, row_end,
            MASKED, BIASED, EXACT, BLOCK_M, spec.BLOCK_N, True,
        )  # fmt: skip
        if grad_v.ptr is not None:
            if EXACT:
                dv = exact_dot(w, keep, do_ptr, grad_out, offs_m, M, offs_e, spec.E, dv, BLOCK_M)
            else:
                dv = tl.dot(w.to(do.dtype), do, dv, input_precision=spec.PRECISION)
        if grad_k.ptr is not None:
            if EXACT:
                dk = exact_dot(ds, keep, q_ptr, q, offs_m, M, offs_d, spec.D, dk, BLOCK_M)
            else:
                dk = tl.dot(ds.to(tile_q.dtype), tile_q, dk, input_precision=spec.PRECISION)
    return dk, dv


@triton.jit
def sdpa_bwd_dkdv_kernel(
    q, k, v, bias, grad_out, grad_weights, t, grad_k, grad_v, mask, lists, drop, scale, dims, spec
):
    """Either gradient may be absent: wide heads take one after the other, for the registers."""
    M, N = dims.M, dims.N
    block, b, hkv = place(tl.cdiv(N, spec.BLOCK_N), dims.H // dims.group, False)
    j0 = block * spec.BLOCK_N
    offs_n = j0 + tl.arange(0, spec.BLOCK_N)
    offs_d = tl.arange(0, spec.BLOCK_D)
    offs_e = tl.arange(0, spec.BLOCK_E)
    keys = key_count(mask, b, N)
    tile_k = load_tile(
        head_ptr(k, b, hkv), k, offs_n, offs_d, keys, spec.D, True, spec.D != spec.BLOCK_D
    )
    tile_v = load_tile(
        head_ptr(v, b, hkv), v, offs_n, offs_e, keys, spec.E, True, spec.E != spec.BLOCK_E
    )
    dk = tl.zeros((spec.BLOCK_N, spec.BLOCK_D), tl.float32)
    dv = tl.zeros((spec.BLOCK_N, spec.BLOCK_E), tl.float32)
    for g in tl.range(0, dims.group):
        h = hkv * dims.group + g
        line = list_line(lists, b, h, block)
        begin, full_begin, full_end, end = query_blocks(
            mask, lists, line, b, j0, M, N, spec.BLOCK_M, spec.BLOCK_N
        )
        n_full = full_end - full_begin
        dk, dv = sweep_rows(
            dk, dv, tile_k, tile_v, grad_k, grad_v,
            q, k, v, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec,
            b, h, line, j0, begin, end - begin - n_full, full_begin - begin, n_full,
            True, bias.ptr is not None, False, spec.BLOCK_M, 1,
        )  # fmt: skip
        dk, dv = sweep_rows(
            dk, dv, tile_k, tile_v, grad_k, grad_v,
            q, k, v, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec,
            b, h, line, j0, full_begin, n_full, 0, 0,
            False, spec.BIAS_IN_FULL, False, spec.BLOCK_M, 1,
        )  # fmt: skip
    if spec.MASKS_WITHIN_TILES:
        if any_not_finite(dk, offs_n, N) | any_not_finite(dv, offs_n, N):
            dk = tl.zeros((spec.BLOCK_N, spec.BLOCK_D), tl.float32)
            dv = tl.zeros((spec.BLOCK_N, spec.BLOCK_E), tl.float32)
            for g in tl.range(0, dims.group):
                h = hkv * dims.group + g
                line = list_line(lists, b, h, block)
                begin, full_begin, full_end, end = query_blocks(
                    mask, lists, line, b, j0, M, N, spec.BLOCK_M, spec.BLOCK_N
                )
                dk, dv = sweep_rows(
                    dk, dv, tile_k, tile_v, grad_k, grad_v,
                    q, k, v, bias, grad_out, grad_weights, t,
                    mask, lists, drop, dims, spec,
                    b, h, line, j0, begin, end - begin, end, 0,
                    True, bias.ptr is not None, True, EXACT_SLICE, spec.BLOCK_M // EXACT_SLICE,
                )  # fmt: skip
    if drop.seed_ptr is not None:
        dv = dv * drop.scale
    if grad_k.ptr is not None:
        store_tile(head_ptr(grad_k, b, hkv), grad_k, offs_n, offs_d, N, spec.D, dk * scale)
    if grad_v.ptr is not None:
        store_tile(head_ptr(grad_v, b, hkv), grad_v, offs_n, offs_e, N, spec.E, dv)


# ---- dbias ----


@triton.jit
def sdpa_bwd_dbias_kernel(
    q, k, v, bias, grad_out, grad_weights, t,
    partial_ptr, mask, drop, dims, spec, B, bias_B, bias_H, chunks, n_rows, n_cols,
    SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """dS of one tile, summed over a chunk of the (b, h) that share a bias, in order.

    Writes fp32 [chunks, bias_B, bias_H, rows, cols]; rows (cols) are row blocks (key blocks),
    summed, where the bias broadcasts over them. The caller adds up what is left.
    """
    M, N = dims.M, dims.N
    tile = tl.program_id(0).to(tl.int64)
    col, row, outer = tile % n_cols, tile // n_cols % n_rows, tile // n_cols // n_rows
    head, chunk = outer % (bias_B * bias_H), outer // (bias_B * bias_H)
    sharing_b, sharing_h = B // bias_B, dims.H // bias_H
    per_chunk = tl.cdiv(sharing_b * sharing_h, chunks)
    i0 = (row * spec.BLOCK_M).to(tl.int32)
    j0 = (col * spec.BLOCK_N).to(tl.int32)
    offs_m, offs_n = i0 + tl.arange(0, spec.BLOCK_M), j0 + tl.arange(0, spec.BLOCK_N)
    offs_d, offs_e = tl.arange(0, spec.BLOCK_D), tl.arange(0, spec.BLOCK_E)
    i, j = offs_m[:, None], offs_n[None, :]
    acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_N), tl.float32)
    stop = tl.minimum((chunk + 1) * per_chunk, sharing_b * sharing_h)
    for n in tl.range(chunk * per_chunk, stop):
        b = (head // bias_H * sharing_b + n // sharing_h).to(tl.int32)
        h = (head % bias_H * sharing_h + n % sharing_h).to(tl.int32)
        begin, full_begin, full_end, end = kv_range(mask, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
        if (col >= begin) & (col < end):
            keys = key_count(mask, b, N)
            hkv = h // dims.group
            x = load_tile(head_ptr(q, b, h), q, offs_m, offs_d, M, spec.D, True, True)
            y = load_tile(head_ptr(k, b, hkv), k, offs_n, offs_d, keys, spec.D, True, True)
            dx = load_tile(
                head_ptr(grad_out, b, h), grad_out, offs_m, offs_e, M, spec.E, True, True
            )
            dy = load_tile(head_ptr(v, b, hkv), v, offs_n, offs_e, keys, spec.E, True, True)
            lse_log2 = load_lse_log2(t.lse_ptr, b, h, dims.H, offs_m, M)
            delta = tl.load(
                row_ptrs(t.delta_ptr, b, h, dims.H, offs_m, M), mask=offs_m < M, other=0.0
            )
            factor = load_factor(t.factor_ptr, b, h, dims.H, i, M)
            row_begin, row_end = row_range(mask, b, i, M, N)
            w, ds, keep = tile_gradient(
                x, y, dx, dy, lse_log2[:, None], factor, delta[:, None],
                q, k, v, bias, grad_out, grad_weights, t,
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


def launch_sdpa_bwd(call: Call, out, lse, grad_out, grad_lse, grad_weights, bias_needs_grad):
    """(grad_q, grad_k, grad_v, grad_w, grad_bias) of the backward operator; absent: empty."""
    grads = [torch.empty_like(x) for x in (call.q, call.k, call.v)]
    grad_w = call.q.new_empty(0, dtype=torch.float32)
    grad_bias = call.q.new_empty(0)
    B, H, M, N = call.shape
    if B * H * M * N == 0:
        if bias_needs_grad:
            grad_bias = call.bias.new_zeros(call.bias.shape)
        return *[x.zero_() for x in grads], grad_w, grad_bias
    share = 1.0 / H if call.weights == "mean" else 1.0
    gw = per_head_weights(call, grad_weights)
    # The rounding of lse shows in fp32 results, and drowns in that of fp16 and bf16.
    factors = torch.empty_like(lse) if call.q.dtype == torch.float32 else None
    t = (
        view(call.q), view(call.k), view(call.v), view(call.bias, call.shape), view(grad_out),
        view(gw), Backward(
            None if gw is None else share, lse, factors, torch.empty_like(lse),
            call.scale * LOG2E.value,
        ),
    )  # fmt: skip
    mask, drop = mask_args(call), dropout_args(call.dropout_p, call.seed)
    _launch_delta(call, t, mask, drop, out, grad_lse)
    _launch_dq(call, t, mask, drop, grads[0])
    _launch_dkdv(call, t, mask, drop, *grads[1:])
    if bias_needs_grad:
        grad_bias = _launch_dbias(call, t, mask, drop)
    return *grads, grad_w, grad_bias


def _launch_delta(call: Call, t, mask, drop, out, grad_lse) -> None:
    shape, options = spec(call, "tile")
    grid = triton.cdiv(call.M, shape.BLOCK_M.value) * call.B * call.H
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    sdpa_bwd_delta_kernel[(grid,)](*t, view(out), grad_lse, mask, drop, call.dims, shape, **options)


def _launch_dq(call: Call, t, mask, drop, grad_q) -> None:
    shape, options = spec(call, "dq")
    block_m, block_n = shape.BLOCK_M.value, shape.BLOCK_N.value
    lists = block_lists(call, mask, block_m, block_n)
    sdpa_bwd_dq_kernel[(triton.cdiv(call.M, block_m) * call.B * call.H,)](
        *t, view(grad_q), mask, lists, drop, call.scale, call.dims, shape, **options
    )


def _launch_dkdv(call: Call, t, mask, drop, grad_k, grad_v) -> None:
    shape, options = spec(call, "dkdv")
    block_m, block_n = shape.BLOCK_M.value, shape.BLOCK_N.value
    lists = block_lists(call, mask, block_m, block_n, columns=True)
    dk, dv = view(grad_k), view(grad_v)
    # Two accumulators of a wide head leave no registers for the rest.
    apart = max(shape.BLOCK_D.value, shape.BLOCK_E.value) > (64 if call.rich else 128)
    for wanted in ((dk, ABSENT), (ABSENT, dv)) if apart else ((dk, dv),):
        sdpa_bwd_dkdv_kernel[(triton.cdiv(call.N, block_n) * call.B * call.Hkv,)](
            *t, *wanted, mask, lists, drop, call.scale, call.dims, shape, **options
        )


def _launch_dbias(call: Call, t, mask, drop):
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
        *t, partial, mask, drop, call.dims, shape, B, bias_B, bias_H, chunks, rows, cols,
        SUM_ROWS=sum_rows, SUM_COLS=sum_cols, **options,
    )  # fmt: skip
    dims = [0, *([3] if sum_rows else []), *([4] if sum_cols else [])]
    return partial.sum(dims).view(call.bias.shape).to(call.bias.dtype)
