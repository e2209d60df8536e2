"""Scaled dot-product attention, forward.

    out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = 2^(s_ij - m_i)      lse_i = ln sum_j e^(s_ij)

    for (b, h, row block)                    one program; Q, O, m, l stay in registers
      for key blocks that some row keeps     K and V stream through shared memory
        S = Q K^T                            partial blocks: bias and mask
        P, m, l = softmax_step(S)            dropout multiplies P after l has summed it
        O = alpha O + P V
      out = O / l, lse

Saved for backward: lse. Returned weights are a second kernel that recomputes S against the known
m and l; their mean over heads is added up in head order in registers, one tile a program.

Accumulation is fp32; P is rounded to the inputs' dtype for the second product. Dao,
"FlashAttention-2: faster attention with better parallelism and work partitioning", 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dropout import dropout_args, survives
from .launch import Call, empty_forward, per_head_weights, spec
from .masking import (
    block_at,
    block_lists,
    key_blocks,
    key_count,
    kv_range,
    list_line,
    mask_args,
    mask_scores,
    row_range,
)
from .softmax import LOG2E, load_factor, softmax_finish, softmax_step, weights_of
from .tiles import (
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


@triton.jit
def attend(
    acc, m_i, l_i, tile_q, k, v, bias, mask, lists, drop, scale, dims, spec, b, h, line, i0,
    first, count, split, jump, MASKED: tl.constexpr, BIASED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Takes a row block through ``count`` key blocks: positions from ``first``, jumping at split.

    A step takes BLOCK_N keys; SLICES steps are a block.
    """
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
        s = dot_t(tile_q, tile_k, spec.PRECISION)
        s, keep = mask_scores(
            s, scale, bias, mask, b, h, i, offs_n[None, :], row_begin, row_end, M, N,
            MASKED, BIASED, spec.FOLD_SCALE,
        )  # fmt: skip
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale if spec.FOLD_SCALE else 1.0)
        if drop.seed_ptr is not None:
            p = tl.where(survives(drop, b, h, i0, j0, spec.BLOCK_M, BLOCK_N, False), p, 0.0)
        acc = acc * alpha[:, None]
        if EXACT:
            acc = exact_dot(p, keep, v_ptr, v, offs_n, keys, offs_e, spec.E, acc, BLOCK_N)
        else:
            tile_v = load_tile(
                v_ptr, v, offs_n, offs_e, keys, spec.E, MASKED, spec.E != spec.BLOCK_E
            )
            acc = tl.dot(p.to(tile_v.dtype), tile_v, acc, input_precision=spec.PRECISION)
    return acc, m_i, l_i


@triton.jit
def sdpa_fwd_kernel(
    q, k, v, bias, out, lse_ptr, max_ptr, inv_sum_ptr, mask, lists, drop, scale, dims, spec
):
    M, N = dims.M, dims.N
    block, b, h = place(tl.cdiv(M, spec.BLOCK_M), dims.H, spec.REVERSE)
    i0 = block * spec.BLOCK_M
    offs_m = i0 + tl.arange(0, spec.BLOCK_M)
    offs_d = tl.arange(0, spec.BLOCK_D)
    tile_q = load_tile(
        head_ptr(q, b, h), q, offs_m, offs_d, M, spec.D, True, spec.D != spec.BLOCK_D
    )
    line = list_line(lists, b, h, block)
    begin, full_begin, full_end, end = key_blocks(
        mask, lists, line, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N
    )
    n_full = full_end - full_begin

    acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_E), tl.float32)
    m_i = tl.full((spec.BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((spec.BLOCK_M,), tl.float32)
    acc, m_i, l_i = attend(
        acc, m_i, l_i, tile_q, k, v, bias, mask, lists, drop, scale, dims, spec, b, h, line, i0,
        begin, end - begin - n_full, full_begin - begin, n_full,
        True, bias.ptr is not None, False, spec.BLOCK_N, 1,
    )  # fmt: skip
    acc, m_i, l_i = attend(
        acc, m_i, l_i, tile_q, k, v, bias, mask, lists, drop, scale, dims, spec, b, h, line, i0,
        full_begin, n_full, 0, 0, False, spec.BIAS_IN_FULL, False, spec.BLOCK_N, 1,
    )  # fmt: skip
    if spec.MASKS_WITHIN_TILES:
        # NaN or infinity in the result: perhaps from a masked value, as 0 * NaN. Again, minding it.
        if any_not_finite(acc, offs_m, M):
            acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_E), tl.float32)
            m_i = tl.full((spec.BLOCK_M,), float("-inf"), tl.float32)
            l_i = tl.zeros((spec.BLOCK_M,), tl.float32)
            acc, m_i, l_i = attend(
                acc, m_i, l_i, tile_q, k, v, bias, mask, lists, drop, scale, dims, spec,
                b, h, line, i0, begin, end - begin, end, 0,
                True, bias.ptr is not None, True, EXACT_SLICE, spec.BLOCK_N // EXACT_SLICE,
            )  # fmt: skip

    inv_l, lse = softmax_finish(m_i, l_i)
    tl.store(row_ptrs(lse_ptr, b, h, dims.H, offs_m, M), lse, mask=offs_m < M)
    if max_ptr is not None:
        m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
        tl.store(row_ptrs(max_ptr, b, h, dims.H, offs_m, M), m_i, mask=offs_m < M)
        tl.store(row_ptrs(inv_sum_ptr, b, h, dims.H, offs_m, M), inv_l, mask=offs_m < M)
    if drop.seed_ptr is not None:
        inv_l = inv_l * drop.scale
    offs_e = tl.arange(0, spec.BLOCK_E)
    store_tile(head_ptr(out, b, h), out, offs_m, offs_e, M, spec.E, acc * inv_l[:, None])


@triton.jit
def sdpa_weights_kernel(
    q, k, bias, weights, max_ptr, inv_sum_ptr, mask, drop, scale, share, heads, dims, spec,
    n_rows, n_cols,
):  # fmt: skip
    """One tile of the weights of ``heads`` heads, added up, times ``share``."""
    M, N = dims.M, dims.N
    tile = tl.program_id(0)
    col, row, head = tile % n_cols, tile // n_cols % n_rows, tile // n_cols // n_rows
    b, h_out = head // (dims.H // heads), head % (dims.H // heads)
    i0, j0 = row * spec.BLOCK_M, col * spec.BLOCK_N
    offs_m, offs_n = i0 + tl.arange(0, spec.BLOCK_M), j0 + tl.arange(0, spec.BLOCK_N)
    offs_d = tl.arange(0, spec.BLOCK_D)
    i, j = offs_m[:, None], offs_n[None, :]
    begin, full_begin, full_end, end = kv_range(mask, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
    row_begin, row_end = row_range(mask, b, i, M, N)
    keys = key_count(mask, b, N)
    acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_N), tl.float32)
    for g in tl.range(0, tl.where((col >= begin) & (col < end), heads, 0)):
        h = h_out * heads + g
        tile_q = load_tile(
            head_ptr(q, b, h), q, offs_m, offs_d, M, spec.D, True, spec.D != spec.BLOCK_D
        )
        tile_k = load_tile(
            head_ptr(k, b, h // dims.group), k, offs_n, offs_d, keys, spec.D,
            True, spec.D != spec.BLOCK_D,
        )  # fmt: skip
        s = dot_t(tile_q, tile_k, spec.PRECISION)
        s, keep = mask_scores(
            s, scale, bias, mask, b, h, i, j, row_begin, row_end, M, N,
            True, bias.ptr is not None, spec.FOLD_SCALE,
        )  # fmt: skip
        m_i = load_factor(max_ptr, b, h, dims.H, offs_m, M)
        inv_l = load_factor(inv_sum_ptr, b, h, dims.H, offs_m, M)
        p = weights_of(
            s, m_i[:, None], inv_l[:, None], scale if spec.FOLD_SCALE else 1.0,
            bias.ptr is not None,
        )  # fmt: skip
        if drop.seed_ptr is not None:
            kept = survives(drop, b, h, i0, j0, spec.BLOCK_M, spec.BLOCK_N, False)
            p = tl.where(kept, p, 0.0)
        acc += p
    store_tile(head_ptr(weights, b, h_out), weights, offs_m, offs_n, M, N, acc * share)


# ---- launchers ----


def launch_sdpa_fwd(call: Call):
    """(out, lse, weights) of the forward operator."""
    out, lse, weights = empty_forward(call)
    B, H, M, N = call.shape
    if B * H * M == 0:
        return out, lse, weights
    shape, options = spec(call, "fwd")
    block_m, block_n = shape.BLOCK_M.value, shape.BLOCK_N.value
    mask = mask_args(call)
    stats = (
        (torch.empty_like(lse), torch.empty_like(lse)) if call.weights != "none" else (None,) * 2
    )
    sdpa_fwd_kernel[(triton.cdiv(M, block_m) * B * H,)](
        view(call.q), view(call.k), view(call.v), view(call.bias, call.shape), view(out), lse,
        *stats, mask, block_lists(call, mask, block_m, block_n),
        dropout_args(call.dropout_p, call.seed),
        call.scale * LOG2E.value, call.dims, shape, **options,
    )  # fmt: skip
    if call.weights != "none" and N:
        _launch_weights(call, mask, stats, per_head_weights(call, weights))
    return out, lse, weights


def _launch_weights(call: Call, mask, stats, weights) -> None:
    shape, options = spec(call, "tile")
    drop = dropout_args(call.dropout_p, call.seed)
    heads = 1 if call.weights == "full" else call.H
    rows, cols = triton.cdiv(call.M, shape.BLOCK_M.value), triton.cdiv(call.N, shape.BLOCK_N.value)
    sdpa_weights_kernel[(call.B * (call.H // heads) * rows * cols,)](
        view(call.q), view(call.k), view(call.bias, call.shape), view(weights), *stats, mask, drop,
        call.scale * LOG2E.value, (drop.scale if call.dropout_p else 1.0) / heads, heads,
        call.dims, shape, rows, cols, **options,
    )  # fmt: skip
