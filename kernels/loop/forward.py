"""Scaled dot-product attention, forward. score/score.py has the scores other than Q K^T.

    out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = 2^(s_ij - m_i)      lse_i = ln sum_j e^(s_ij)

    for (b, h, row block)                    one program; Q, O, m, l stay in registers
      for key blocks that some row keeps     K and V stream through shared memory
        S = Q K^T                            partial blocks: bias and mask
        P, m, l = softmax_step(S)            dropout multiplies P after l has summed it
        O = alpha O + P V
      out = O / l, lse

Few queries make too few programs. Their keys are then split into chunks, and a second kernel merges
O, m and l of the chunks (Dao et al., "Flash-Decoding for long-context inference", 2023).

Saved for backward: stats (m, 1 / l). Returned weights come from another kernel, which computes S
again and uses the stats. A program of that kernel owns one tile, and adds up heads in their order.

Sums are fp32; those of fp32 weights are float64. P is rounded to the inputs' dtype for the second
product. Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning",
2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.launch import (
    FEW_QUERIES,
    Call,
    as_rows,
    empty_forward,
    heads_as_rows,
    per_head_weights,
    spec,
)
from ..score.score import DOT_PRODUCT, Terms, load_side
from ..tile.block_lists import block_lists, key_blocks, list_line, share_of_blocks
from ..tile.dropout import survives
from ..tile.launching import launch
from ..tile.masking import bias_view, key_count, kv_range, mask_args, row_range
from ..tile.softmax import (
    load_stats,
    softmax_finish,
    softmax_step,
    store_stats,
    unit_of,
    weights_of,
)
from ..tile.strided import (
    ABSENT,
    EXACT_SLICE,
    VARYING,
    Dims,
    View,
    any_not_finite,
    exact_dot,
    head_ptr,
    load_tile,
    place,
    row_numbers,
    row_offsets,
    row_ptrs,
    store_tile,
    view,
)
from .sweep import Pass, Tile, full_span, logits, partial_span, step_start, whole_span


class Partial(NamedTuple):
    """Where chunks of keys leave their results, fp32; all None where keys are not split."""

    acc_ptr: Any  # [B, H, M, chunks, E]
    stats_ptr: Any  # [B, H, M, chunks, 2]: m, l
    chunks: Any


WHOLE = Partial(None, None, None)

# The number of chunks depends on the rows and keys of a head alone (see heads_as_rows of
# host/launch.py). So a row has the same bits on every device and beside any batch mates.
KEYS_PER_CHUNK = 512
MAX_CHUNKS = 64


def chunks_of(M: int, N: int) -> int:
    """How many parts the keys of a row block are split into."""
    return min(max(N // KEYS_PER_CHUNK, 1), MAX_CHUNKS) if M <= FEW_QUERIES else 1


def slots_of(chunks: int) -> int:
    """Chunks that a merge has room for: one of two numbers, because each is a kernel."""
    return 8 if chunks <= 8 else MAX_CHUNKS


@triton.jit
def attend(
    acc, m_i, l_i, side_q, q, k, v, terms, bias, mask, lists, drop, scale, dims, spec,
    b, h, i0, span, PASS,
):  # fmt: skip
    """(O, m, l) of a row block after a sweep over key blocks."""
    M, N = dims.M, dims.N
    i = (i0 + tl.arange(0, spec.BLOCK_M))[:, None]
    row_begin, row_end = row_range(mask, b, i, M, N)
    keys = key_count(mask, b, N)
    v_ptr = head_ptr(v, b, h // dims.group)
    offs_e = tl.arange(0, spec.BLOCK_E)
    for n in tl.range(0, span.count * PASS.SLICES, num_stages=1 if PASS.EXACT else spec.STAGES):
        j0 = step_start(lists, span, n, PASS)
        offs_n = j0 + tl.arange(0, PASS.SIZE)
        side_k = load_side(k, terms, b, h // dims.group, offs_n, keys, spec, PASS.MASKED)
        tile = Tile(i0, j0, i, offs_n[None, :], row_begin, row_end)
        s, keep, _ = logits(
            side_q, side_k, q, k, terms, bias, mask, scale, keys, dims, spec, b, h, tile, PASS,
            False,
        )  # fmt: skip
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, unit_of(scale, spec))
        if drop.seed_ptr is not None:
            p = tl.where(survives(drop, b, h, i0, j0, spec.BLOCK_M, PASS.SIZE, False), p, 0.0)
        start = tl.zeros_like(acc) if spec.APART else acc * alpha[:, None]
        if PASS.EXACT:
            product = exact_dot(p, keep, v_ptr, v, offs_n, keys, offs_e, spec.E, start, PASS.SIZE)
        else:
            tile_v = load_tile(
                v_ptr, v, offs_n, offs_e, keys, spec.E, PASS.MASKED, spec.E != spec.BLOCK_E
            )
            product = tl.dot(p.to(tile_v.dtype), tile_v, start, input_precision=spec.PRECISION)
        acc = tl.fma(acc, alpha[:, None], product) if spec.APART else product
    return acc, m_i, l_i


@triton.jit(do_not_specialize=VARYING)
def sdpa_fwd_kernel(
    q, k, v, terms, bias, sink, out, lse_ptr, stats_ptr, acc_ptr, part_ptr, chunks, mask, lists,
    drop, scale, natural, H, group, M, N, spec,
):  # fmt: skip
    dims = Dims(H, group, M, N)
    partial = Partial(acc_ptr, part_ptr, chunks)
    n_blocks = tl.cdiv(M, spec.BLOCK_M)
    if partial.chunks is not None:
        n_blocks *= partial.chunks
    block, b, h = place(n_blocks, H, spec.REVERSE)
    if partial.chunks is not None:
        chunk = block % partial.chunks
        block = block // partial.chunks
    i0 = block * spec.BLOCK_M
    offs_m = i0 + tl.arange(0, spec.BLOCK_M)
    side_q = load_side(q, terms, b, h, offs_m, M, spec, True)
    line = list_line(lists, b, h, block)
    blocks = key_blocks(mask, lists, line, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
    if partial.chunks is not None:
        blocks = share_of_blocks(chunk, partial.chunks, blocks)

    PARTIAL: tl.constexpr = Pass(spec.BLOCK_N, MASKED=True, BIASED=bias.ptr is not None)
    FULL: tl.constexpr = Pass(spec.BLOCK_N, MASKED=False, BIASED=spec.BIAS_IN_FULL)
    SUM: tl.constexpr = tl.float64 if spec.APART else tl.float32  # of thousands of tiles
    acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_E), tl.float32)
    m_i = tl.full((spec.BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((spec.BLOCK_M,), SUM)
    acc, m_i, l_i = attend(
        acc, m_i, l_i, side_q, q, k, v, terms, bias, mask, lists, drop, scale, dims, spec,
        b, h, i0, partial_span(line, blocks), PARTIAL,
    )  # fmt: skip
    acc, m_i, l_i = attend(
        acc, m_i, l_i, side_q, q, k, v, terms, bias, mask, lists, drop, scale, dims, spec,
        b, h, i0, full_span(line, blocks), FULL,
    )  # fmt: skip
    if spec.MASKS_WITHIN_TILES:
        # NaN or infinity may have come from a masked value, as 0 * NaN. The exact sweep tells.
        if any_not_finite(acc, offs_m, M, spec.FLAT):
            acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_E), tl.float32)
            m_i = tl.full((spec.BLOCK_M,), float("-inf"), tl.float32)
            l_i = tl.zeros((spec.BLOCK_M,), SUM)
            EXACT: tl.constexpr = Pass(
                EXACT_SLICE, True, bias.ptr is not None, True, spec.BLOCK_N // EXACT_SLICE
            )
            acc, m_i, l_i = attend(
                acc, m_i, l_i, side_q, q, k, v, terms, bias, mask, lists, drop, scale, dims, spec,
                b, h, i0, whole_span(line, blocks), EXACT,
            )  # fmt: skip

    l_i = l_i.to(tl.float32)
    offs_e = tl.arange(0, spec.BLOCK_E)
    if partial.chunks is not None:
        store_partial(partial, acc, m_i, l_i, b, h, chunk, offs_m, dims, spec)
    else:
        factor = finish_rows(m_i, l_i, sink, lse_ptr, stats_ptr, drop, natural, dims, b, h, offs_m)
        store_tile(head_ptr(out, b, h), out, offs_m, offs_e, M, spec.E, acc * factor[:, None])


@triton.jit
def finish_rows(m_i, l_i, sink, lse_ptr, stats_ptr, drop, natural, dims, b, h, offs_m):
    """Stores log-sum-exp and stats of rows; returns what O is multiplied by."""
    of_row = None
    if sink.ptr is not None:
        ptrs = head_ptr(sink, b, h) + row_offsets(sink, offs_m)
        of_row = tl.load(ptrs, mask=offs_m < dims.M, other=0.0).to(tl.float32)
    shift, factor, lse = softmax_finish(m_i, l_i, of_row, natural)
    tl.store(row_ptrs(lse_ptr, b, h, dims.H, offs_m, dims.M), lse, mask=offs_m < dims.M)
    store_stats(stats_ptr, b, h, dims.H, offs_m, dims.M, shift, factor)
    if drop.seed_ptr is not None:
        factor = factor * drop.scale
    return factor


@triton.jit
def store_partial(partial, acc, m_i, l_i, b, h, chunk, offs_m, dims, spec):
    """Leaves the results of a chunk of keys to sdpa_merge_kernel."""
    offs_e = tl.arange(0, spec.BLOCK_E)
    part = row_numbers(b, h, dims.H, offs_m, dims.M) * partial.chunks + chunk
    ptrs = partial.acc_ptr + part[:, None] * spec.E + offs_e[None, :]
    inside = offs_m < dims.M
    tl.store(ptrs, acc, mask=inside[:, None] & (offs_e < spec.E)[None, :])
    tl.store(partial.stats_ptr + 2 * part, m_i, mask=inside)
    tl.store(partial.stats_ptr + 2 * part + 1, l_i, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def sdpa_merge_kernel(
    out, sink, lse_ptr, stats_ptr, acc_ptr, part_ptr, chunks, drop, scale, natural, H, group, M, N,
    spec, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One row: its chunks side by side, at least as many as there are."""
    dims = Dims(H, group, M, N)
    partial = Partial(acc_ptr, part_ptr, chunks)
    row, b, h = place(M, H, False)
    offs_m = row + tl.arange(0, 1)
    c, offs_e = tl.arange(0, CHUNKS), tl.arange(0, spec.BLOCK_E)
    part = row_numbers(b, h, H, row, M) * partial.chunks + c
    there = c < partial.chunks
    m_c = tl.load(partial.stats_ptr + 2 * part, mask=there, other=float("-inf"))
    l_c = tl.load(partial.stats_ptr + 2 * part + 1, mask=there, other=0.0)
    m_i = tl.max(m_c, 0)
    below = m_c - tl.where(m_i == float("-inf"), 0.0, m_i)
    alpha = tl.exp2(below * unit_of(scale, spec))
    l_i = tl.sum(l_c * alpha, 0)
    ptrs = partial.acc_ptr + part[:, None] * spec.E + offs_e[None, :]
    acc = tl.load(ptrs, mask=there[:, None] & (offs_e < spec.E)[None, :], other=0.0)
    acc = tl.sum(acc * alpha[:, None], 0)
    m_i, l_i = m_i + tl.zeros((1,), tl.float32), l_i + tl.zeros((1,), tl.float32)
    factor = finish_rows(m_i, l_i, sink, lse_ptr, stats_ptr, drop, natural, dims, b, h, offs_m)
    rows = acc[None, :] * factor[:, None]
    store_tile(head_ptr(out, b, h), out, offs_m, offs_e, M, spec.E, rows)


@triton.jit(do_not_specialize=VARYING)
def sdpa_weights_kernel(
    q, k, terms, bias, weights, stats_ptr, mask, drop, scale, share, heads, H, group, M, N, spec,
    n_rows, n_cols,
):  # fmt: skip
    """One tile of the weights of ``heads`` heads, added up, times ``share``."""
    dims = Dims(H, group, M, N)
    number = tl.program_id(0)
    col, row, head = number % n_cols, number // n_cols % n_rows, number // n_cols // n_rows
    b, h_out = head // (H // heads), head % (H // heads)
    i0, j0 = row * spec.BLOCK_M, col * spec.BLOCK_N
    offs_m, offs_n = i0 + tl.arange(0, spec.BLOCK_M), j0 + tl.arange(0, spec.BLOCK_N)
    i, j = offs_m[:, None], offs_n[None, :]
    begin, full_begin, full_end, end = kv_range(mask, b, i0, M, N, spec.BLOCK_M, spec.BLOCK_N)
    row_begin, row_end = row_range(mask, b, i, M, N)
    tile = Tile(i0, j0, i, j, row_begin, row_end)
    keys = key_count(mask, b, N)
    PARTIAL: tl.constexpr = Pass(spec.BLOCK_N, MASKED=True, BIASED=bias.ptr is not None)
    acc = tl.zeros((spec.BLOCK_M, spec.BLOCK_N), tl.float32)
    for g in tl.range(0, tl.where((col >= begin) & (col < end), heads, 0)):
        h = h_out * heads + g
        side_q = load_side(q, terms, b, h, offs_m, M, spec, True)
        side_k = load_side(k, terms, b, h // group, offs_n, keys, spec, True)
        s, keep, _ = logits(
            side_q, side_k, q, k, terms, bias, mask, scale, keys, dims, spec, b, h, tile,
            PARTIAL, False,
        )  # fmt: skip
        shift, factor = load_stats(stats_ptr, b, h, H, i, M)
        p = weights_of(s, shift, factor, unit_of(scale, spec), False)
        p = tl.where(keep, p, 0.0)  # in a row of NaN too, masked keys weigh 0
        if drop.seed_ptr is not None:
            kept = survives(drop, b, h, i0, j0, spec.BLOCK_M, spec.BLOCK_N, False)
            p = tl.where(kept, p, 0.0)
        acc += p
    store_tile(head_ptr(weights, b, h_out), weights, offs_m, offs_n, M, N, acc * share)


# ---- launchers ----


def launch_sdpa_fwd(call: Call, sink: Tensor | None = None, terms: Terms = DOT_PRODUCT):
    """(out, lse, weights, stats) of the forward operator."""
    out, lse, weights, stats = empty_forward(call)
    if lse.numel() == 0:
        return out, lse, weights.zero_(), stats  # a mean over no heads is 0, as in eager
    call = heads_as_rows(call)
    B, H, M, N = call.shape
    shape, options = spec(call, "fwd" if M > FEW_QUERIES else "decode")
    block_m, block_n = shape.BLOCK_M.value, shape.BLOCK_N.value
    mask, drop = mask_args(call), call.dropout
    chunks = chunks_of(M, N)
    sizes = (B, H, M, chunks, call.E), (B, H, M, chunks, 2)
    parts = (call.q.new_empty(size, dtype=torch.float32) for size in sizes)
    partial = Partial(*parts, chunks) if chunks > 1 else WHOLE
    rows, of_rows = view(as_rows(out, call)), sink_view(sink, call)
    launch(sdpa_fwd_kernel, triton.cdiv(M, block_m) * chunks * B * H)(
        view(call.q), view(call.k), view(call.v), terms, bias_view(call), of_rows,
        rows, lse, stats, *partial, mask, block_lists(call, mask, block_m, block_n), drop,
        call.logit_scale, call.natural, *call.dims, shape, **options,
    )  # fmt: skip
    if chunks > 1:
        launch(sdpa_merge_kernel, B * H * M)(
            rows, of_rows, lse, stats, *partial, drop, call.logit_scale, call.natural, *call.dims,
            shape, CHUNKS=slots_of(chunks),
        )  # fmt: skip
    if call.weights_mode != "none" and N:
        launch_weights(call, terms, mask, stats, per_head_weights(call, weights))
    return out, lse, weights, stats


def sink_view(sink: Tensor | None, call: Call) -> View:
    """Sinks [H] or [B, H] as numbers of rows, with the heads and rows that ``call`` has."""
    if sink is None:
        return ABSENT
    heads = sink.expand(call.B, sink.shape[-1])[..., None, None]
    return view(as_rows(heads, call), (*call.shape[:3], 1))


def launch_weights(call: Call, terms: Terms, mask, stats, weights) -> None:
    """Fills weights, [B, H or 1, M, N], from the statistics of rows."""
    shape, options = spec(call, "tile")
    drop = call.dropout
    heads = 1 if call.weights_mode == "full" else call.H
    rows, cols = triton.cdiv(call.M, shape.BLOCK_M.value), triton.cdiv(call.N, shape.BLOCK_N.value)
    launch(sdpa_weights_kernel, call.B * (call.H // heads) * rows * cols)(
        view(call.q), view(call.k), terms, bias_view(call), view(weights), stats, mask,
        drop, call.logit_scale, (drop.scale if call.dropout_p else 1.0) / heads, heads,
        *call.dims, shape, rows, cols, **options,
    )  # fmt: skip
