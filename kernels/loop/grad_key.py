"""dK and dV: a program owns a block of keys and sweeps the rows that keep some of them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..host.launch import Call, spec
from ..score.score import load_side, pull_back
from ..tile.block_lists import block_lists, list_line, query_blocks, share_of_blocks
from ..tile.launching import launch
from ..tile.masking import key_count, row_range
from ..tile.strided import (
    ABSENT,
    EXACT_SLICE,
    VARYING,
    Dims,
    any_not_finite,
    head_ptr,
    place,
    store_tile,
    view,
)
from .garbage import crowded, launches, mended, row_of, width
from .gradient import add_product, load_value_side, tile_gradient
from .sweep import Pass, Tile, full_span, partial_span, step_start, whole_span

TURN = tl.constexpr(128)  # row blocks


@triton.jit
def sweep_rows(
    dk, dv, side_k, side_v, grad_k, grad_v, q, k, v, terms, bias, grad_out, grad_weights, t,
    mask, lists, drop, dims, spec, b, h, j0, span, PASS,
):  # fmt: skip
    """dK and dV of a key block from a sweep over row blocks of one head; tiles are transposed."""
    M, N = dims.M, dims.N
    j = (j0 + tl.arange(0, spec.BLOCK_N))[:, None]
    stages: tl.constexpr = 1 if PASS.EXACT else spec.STAGES
    # Invariants of an exact sweep spill. In float32, ptxas spills more if they are not hoisted.
    hoist: tl.constexpr = not PASS.EXACT or q.ptr.dtype.element_ty == tl.float32
    for n in tl.range(0, span.count * PASS.SLICES, num_stages=stages, disable_licm=not hoist):
        i0 = step_start(lists, span, n, PASS)
        offs_m = i0 + tl.arange(0, PASS.SIZE)
        i = offs_m[None, :]
        side_q = load_side(q, terms, b, h, offs_m, M, spec, True)
        do = load_value_side(grad_out, b, h, offs_m, M, spec, True)
        row_begin, row_end = row_range(mask, b, i, M, N)
        tile = Tile(i0, j0, i, j, row_begin, row_end)
        w, ds, keep = tile_gradient(
            side_k, side_q, side_v, do, None, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, drop, dims, spec, b, h, tile, PASS, True,
        )  # fmt: skip
        if grad_k.ptr is not None:
            if terms.w_ptr is not None:
                if not PASS.EXACT:  # dK is right after the first sweeps: pull_back skips dS = 0
                    keys = key_count(mask, b, N)
                    pull_back(ds, side_k, side_q, q, k, terms, b, h, keys, dims, spec, True)
            else:
                dk = add_product(
                    dk, ds, keep, side_q, q, b, h, offs_m, M, spec, PASS, spec.D, spec.BLOCK_D
                )
        if grad_v.ptr is not None:
            dv = add_product(
                dv, w, keep, do, grad_out, b, h, offs_m, M, spec, PASS, spec.E, spec.BLOCK_E
            )
    return dk, dv


@triton.jit
def sweep_blocks(
    dk, dv, side_k, side_v, grad_k, grad_v, q, k, v, terms, bias, grad_out, grad_weights, t,
    mask, lists, drop, dims, spec, b, h, j0, line, blocks, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of row blocks: exact, or of partial and of full tiles."""
    BIASED: tl.constexpr = bias.ptr is not None
    PARTIAL: tl.constexpr = Pass(spec.BLOCK_M, MASKED=True, BIASED=BIASED)
    FULL: tl.constexpr = Pass(spec.BLOCK_M, MASKED=False, BIASED=spec.BIAS_IN_FULL)
    SLICED: tl.constexpr = Pass(EXACT_SLICE, True, BIASED, True, spec.BLOCK_M // EXACT_SLICE)
    if EXACT:
        return sweep_rows(
            dk, dv, side_k, side_v, grad_k, grad_v, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec, b, h, j0, whole_span(line, blocks), SLICED,
        )  # fmt: skip
    else:
        dk, dv = sweep_rows(
            dk, dv, side_k, side_v, grad_k, grad_v, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec, b, h, j0, partial_span(line, blocks), PARTIAL,
        )  # fmt: skip
        return sweep_rows(
            dk, dv, side_k, side_v, grad_k, grad_v, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec, b, h, j0, full_span(line, blocks), FULL,
        )  # fmt: skip


@triton.jit
def sweep_heads(
    side_k, side_v, grad_k, grad_v, q, k, v, terms, bias, grad_out, grad_weights, t,
    mask, lists, drop, dims, spec, b, hkv, block, heads, EXACT: tl.constexpr,
):  # fmt: skip
    """dK and dV of a key block from some heads of a group.

    APART: a sum over thousands of tiles would lose digits, too. So TURN tiles have their own.
    """
    j0 = block * spec.BLOCK_N
    dk = tl.zeros((spec.BLOCK_N, spec.BLOCK_D), tl.float32)
    dv = tl.zeros((spec.BLOCK_N, spec.BLOCK_E), tl.float32)
    for g in tl.range(0, heads):
        h = hkv * dims.group + g
        line = list_line(lists, b, h, block)
        blocks = query_blocks(mask, lists, line, b, j0, dims.M, dims.N, spec.BLOCK_M, spec.BLOCK_N)
        if spec.APART:
            begin, _, _, end = blocks
            turns = tl.cdiv(end - begin, TURN)
            for turn in tl.range(0, turns):
                part_k, part_v = sweep_blocks(
                    tl.zeros_like(dk), tl.zeros_like(dv), side_k, side_v, grad_k, grad_v,
                    q, k, v, terms, bias, grad_out, grad_weights, t, mask, lists, drop, dims, spec,
                    b, h, j0, line, share_of_blocks(turn, turns, blocks), EXACT,
                )  # fmt: skip
                dk, dv = dk + part_k, dv + part_v
        else:
            dk, dv = sweep_blocks(
                dk, dv, side_k, side_v, grad_k, grad_v,
                q, k, v, terms, bias, grad_out, grad_weights, t, mask, lists, drop, dims, spec,
                b, h, j0, line, blocks, EXACT,
            )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=VARYING)
def sdpa_bwd_dkdv_kernel(
    q, k, v, terms, bias, grad_out, grad_weights, t, grad_k, grad_v, mask, lists, drop, scale,
    H, group, M, N, spec, marks_ptr, GARBAGE: tl.constexpr,
):  # fmt: skip
    """Either gradient may be absent: wide heads take one after the other, to save registers."""
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
    PARTIAL: tl.constexpr = Pass(spec.BLOCK_M, MASKED=True, BIASED=bias.ptr is not None)
    FULL: tl.constexpr = Pass(spec.BLOCK_M, MASKED=False, BIASED=spec.BIAS_IN_FULL)
    dk = tl.zeros((spec.BLOCK_N, spec.BLOCK_D), tl.float32)
    dv = tl.zeros((spec.BLOCK_N, spec.BLOCK_E), tl.float32)
    if spec.APART:
        dk, dv = sweep_heads(
            side_k, side_v, grad_k, grad_v, q, k, v, terms, bias, grad_out, grad_weights, t,
            mask, lists, drop, dims, spec, b, hkv, block, 0 if GARBAGE == "mend" else group, False,
        )  # fmt: skip
    else:  # ptxas would spill registers of half types if this were a function's loop
        for g in tl.range(0, 0 if GARBAGE == "mend" else group):
            h = hkv * group + g
            line = list_line(lists, b, h, block)
            blocks = query_blocks(mask, lists, line, b, j0, M, N, spec.BLOCK_M, spec.BLOCK_N)
            dk, dv = sweep_rows(
                dk, dv, side_k, side_v, grad_k, grad_v,
                q, k, v, terms, bias, grad_out, grad_weights, t,
                mask, lists, drop, dims, spec, b, h, j0,
                partial_span(line, blocks), PARTIAL,
            )  # fmt: skip
            dk, dv = sweep_rows(
                dk, dv, side_k, side_v, grad_k, grad_v,
                q, k, v, terms, bias, grad_out, grad_weights, t,
                mask, lists, drop, dims, spec, b, h, j0,
                full_span(line, blocks), FULL,
            )  # fmt: skip
    if GARBAGE != "none":
        if GARBAGE == "mend":
            again = cols > 0
        else:
            again = any_not_finite(dk, offs_n, N, spec.FLAT)
            again = again | any_not_finite(dv, offs_n, N, spec.FLAT)
        if GARBAGE == "mark":
            tl.store(marks_ptr + tl.program_id(0), again.to(tl.int8))
        elif again:
            dk, dv = sweep_heads(
                side_k, side_v, grad_k, grad_v, q, k, v, terms, bias, grad_out, grad_weights, t,
                mask, lists, drop, dims, spec, b, hkv, block, group, True,
            )  # fmt: skip
    # Keys past the length are masked for every row. A row of NaN has put 0 * NaN there.
    used = (offs_n < keys)[:, None]
    dk, dv = tl.where(used, dk, 0.0), tl.where(used, dv, 0.0)
    if drop.seed_ptr is not None:
        dv = dv * drop.scale
    if grad_k.ptr is not None and terms.w_ptr is None:
        store_tile(head_ptr(grad_k, b, hkv), grad_k, offs_n, offs_d, cols, spec.D, dk * scale)
    if grad_v.ptr is not None:
        store_tile(head_ptr(grad_v, b, hkv), grad_v, offs_n, offs_e, cols, spec.E, dv)


def launch_dkdv(call: Call, t, mask, drop, grad_k, grad_v) -> None:
    shape, options = spec(call, row_of("dkdv", call))
    block_m, block_n = shape.BLOCK_M.value, shape.BLOCK_N.value
    lists = block_lists(call, mask, block_m, block_n, columns=True)
    dk, dv = view(grad_k), view(grad_v)
    # Two accumulators of a wide head leave too few registers. An additive score's own loops need
    # them too if the problem is rich.
    apart = width(shape) > (64 if crowded(call) else 128)
    if call.w is not None:
        apart = call.rich or width(shape) > 128
    programs = triton.cdiv(call.N, block_n) * call.B * call.Hkv
    for wanted in ((dk, ABSENT), (ABSENT, dv)) if apart else ((dk, dv),):
        spoils = call.w is None or wanted[1] is dv
        for variant, marks, garbage in launches(call, shape, programs, spoils):
            launch(sdpa_bwd_dkdv_kernel, programs)(
                *t, *wanted, mask, lists, drop, call.scale, *call.dims, variant,
                marks, GARBAGE=garbage, **options,
            )  # fmt: skip
